"""Fuzz target of adapters as PEFT saves them: settings, names, shapes, what is added to a model.

python -m tools.fuzz_adapters --seconds 60 [--corpus DIR]

An input is the text of an adapter_config.json, a zero byte, and a safetensors file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf

from tests.transformers.peft_folders import random_modules, write_adapter
from tools.fuzz_gguf import SMALLEST
from tools.fuzz_loop import instrumented_imports, run_fuzzer
from tools.make_tiny_model import write_tiny_model

with instrumented_imports():
    from edgeh2o.errors import FormatError
    from edgeh2o.lora_config import LoraAdapter
    from edgeh2o.runners.native import NativeModelFile

# Q and K in another order, fused matrices, experts, and latent attention.
ARCHITECTURES = ("llama", "phi3", "qwen2moe", "deepseek2")
# Modules, and the tensor whose shape they have, rows times a factor.
_MODULES = (
    ("llama", "self_attn.q_proj", "attn_q", 1),
    ("llama", "self_attn.k_proj", "attn_k", 1),
    ("phi3", "self_attn.qkv_proj", "attn_qkv", 1),
    ("phi3", "mlp.gate_up_proj", "ffn_up", 1),
    ("qwen2moe", "mlp.gate", "ffn_gate_inp", 1),
    ("qwen2moe", "mlp.experts.1.up_proj", "ffn_up_exps", 1),
    ("qwen2moe", "mlp.experts.base_layer", "ffn_gate_exps", 2),
    ("qwen2moe", "mlp.experts", "ffn_down_exps", 1),
    ("deepseek2", "self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", 1),
)


def _write_models(folder: Path) -> list[Path]:
    options = {**SMALLEST, "n_experts": 2, "n_experts_used": 1}
    return [
        write_tiny_model(folder / f"{name}.gguf", **options, architecture=name)
        for name in ARCHITECTURES
    ]


def make_seeds() -> Iterator[bytes]:
    """One for each module, plain and with patterns."""
    patterns = {r".*layers\.[0-1].*(q|k)_proj": 3, "mlp": 2}
    with tempfile.TemporaryDirectory() as scratch:
        shapes = {
            (model.stem, tensor.name): tensor.shape.tolist()
            for model in _write_models(Path(scratch))
            for tensor in gguf.GGUFReader(model).tensors
        }
        for architecture, module, tensor, n_times in _MODULES:
            n_cols, n_rows, *_ = shapes[architecture, f"blk.0.{tensor}.weight"]
            # Parameters have the ranks of both experts.
            rank = 4 if "experts" in module and "1" not in module else 2
            modules = random_modules({f"model.layers.0.{module}": (n_times * n_rows, n_cols)}, rank)
            for changes in ({"use_rslora": True}, {"alpha_pattern": patterns, "r": 2}):
                folder = Path(scratch) / f"{module}-{len(changes)}"
                write_adapter(folder, modules, **{"r": 2, **changes})
                settings = (folder / "adapter_config.json").read_bytes()
                yield settings + b"\0" + (folder / "adapter_model.safetensors").read_bytes()


def make_target(folder: Path) -> Callable[[bytes], None]:
    """Adds the adapter to each model; a refusal counts where all refuse."""
    models = _write_models(folder)

    def read(content: bytes) -> None:
        settings, _, weights = content.partition(b"\0")
        (folder / "adapter_config.json").write_bytes(settings)
        (folder / "adapter_model.safetensors").write_bytes(weights)
        refusals = []
        for model in models:
            try:
                with NativeModelFile(model, lora=(LoraAdapter(str(folder)),)) as file:
                    file.load()
            except FormatError as error:
                refusals.append(error)
        if len(refusals) == len(models):
            raise refusals[0]

    return read


def main() -> int:
    """Command line entry; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        return run_fuzzer(make_target(Path(folder)), make_seeds(), name="fuzz_adapters")


if __name__ == "__main__":
    raise SystemExit(main())
