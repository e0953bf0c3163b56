"""Fuzz target of the GGUF reader: header, hyperparameters, tensor list, loading of the weights.

python -m tools.fuzz_gguf --seconds 60 [--corpus DIR]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from tests.random_blocks import MIXED, rewrite
from tests.tiny_architectures import FAMILIES
from tools.fuzz_loop import instrumented_imports, run_fuzzer
from tools.make_tiny_model import write_tiny_model
from tools.tiny_models.drafters import write_assistant, write_eagle3
from tools.tiny_models.model import TinyModel

with instrumented_imports():
    from edgeh2o.attention.dense import DenseConfig
    from edgeh2o.attention.h2o import H2OConfig
    from edgeh2o.formats.split import open_model_file
    from edgeh2o.models.drafters import is_drafter, read_drafter
    from edgeh2o.runners.base import SessionShape
    from edgeh2o.runners.drafting_layer import DraftingLayerFile
    from edgeh2o.runners.native import NativeModelFile, estimate_session_bytes

MAX_LOADED_BYTES = 4 * 2**20
SHAPE = SessionShape(max_context=512, batch_size=128, chunk_size=128, cache_type="f16")
SMALLEST = {
    "n_layers": 1,
    "model_dim": 32,
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 16,
    **{"kv_rank": 32, "q_rank": 32, "nope_dim": 32, "value_dim": 16, "sliding_nope_dim": 32},
    "ffn_dim": 32,
}
SEED_OPTIONS: tuple[dict[str, object], ...] = (
    *(
        {"architecture": name, "tensor_type": "Q4_0", "n_layers": 1 + family.is_hybrid}
        for name, family in FAMILIES.items()
    ),
    {"tensor_type": "F16", "biases": True, "tied": False},
    {"tensor_type": "Q8_0", "rope_scaling": "linear", "rotary_dim": 8},
    {"tensor_type": "BF16", "rope_scaling": "llama3"},
    {
        **{"architecture": "gemma4", "n_layers": 3, "sliding_window_pattern": 2},
        **{"n_shared_kv": 1, "head_dim_sliding": 8, "token_input_dim": 8},
    },
    {"architecture": "nanbeige", "n_layers": 2, "n_loops": 2, "tensor_type": "Q4_0"},
    {"n_layers": 2, "n_heads": (2, 4), "n_kv_heads": (1, 2), "ffn_dim": (32, 64)},
)
# That drafters of the seeds were made for.
DRAFTED_FOR: dict[str, object] = {
    **SMALLEST,
    **{"architecture": "gemma4", "n_layers": 3, "sliding_window_pattern": 3},
}


def make_seeds() -> Iterator[bytes]:
    """Small correct models, and what drafts for one."""
    with tempfile.TemporaryDirectory() as folder:
        for options in SEED_OPTIONS:
            yield write_tiny_model(
                Path(folder) / "seed.gguf", **{**SMALLEST, **options}
            ).read_bytes()
        main = TinyModel(**DRAFTED_FOR)  # type: ignore[arg-type]
        path = Path(folder) / "seed.gguf"
        yield write_assistant(path, main, model_dim=32, n_heads=2).read_bytes()
        yield write_eagle3(path, main, n_heads=2, n_kv_heads=1, guessed=range(3, 99)).read_bytes()
        wide = {"model_dim": 256, "ffn_dim": 256, "head_dim": 128}
        model = write_tiny_model(Path(folder) / "wide.gguf", **{**SMALLEST, **wide})
        yield rewrite(model, Path(folder) / "seed.gguf", MIXED).read_bytes()


def make_target(folder: Path) -> Callable[[bytes], None]:
    """Reads a file as ``edgeh2o run`` does, up to the point where it would read the prompt."""
    path = folder / "input.gguf"
    policy = H2OConfig(local=32, heavy=32)
    with NativeModelFile(write_tiny_model(folder / "main.gguf", **DRAFTED_FOR)) as file:
        main = file.load()

    def read_what_drafts() -> bool:
        with closing(open_model_file(path)) as gguf:
            if not is_drafter(gguf.metadata):
                return False
            drafter = read_drafter(gguf, main.config)
            layers = DraftingLayerFile(gguf, drafter, name="drafter", flag="--draft")
            if layers.n_weight_bytes <= MAX_LOADED_BYTES:
                layers.pack(main._core_model)
            return True

    def read(content: bytes) -> None:
        path.write_bytes(content)
        if read_what_drafts():
            return
        with NativeModelFile(path) as file:
            reads_all = file.config.index_top_k or file.config.has_distance_bias
            rule = DenseConfig() if reads_all else policy
            estimate_session_bytes(file.config, rule, SHAPE)
            if file.n_weight_bytes <= MAX_LOADED_BYTES:
                file.load()

    return read


def main() -> int:
    """Command line entry; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        return run_fuzzer(make_target(Path(folder)), make_seeds(), name="fuzz_gguf")


if __name__ == "__main__":
    raise SystemExit(main())
