"""Adapters as PEFT saves them answer as there, as in GGUF files, and as when they were merged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from edgeh2o import LLM, SamplingParams
from edgeh2o.cli.main import main
from edgeh2o.errors import EdgeH2OError
from edgeh2o.export.gguf import quantize_model
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.lora_config import LoraAdapter
from edgeh2o.models.transformers.peft_config import PeftConfig
from edgeh2o.runners.native import NativeModelFile
from edgeh2o.runners.safetensors import SafetensorsModelFile
from tests.models.lora_files import ALPHA, RANK, random_pairs
from tests.models.lora_files import write_adapter as write_gguf_adapter
from tests.tiny_models import TinyModelFactory

from .folders import CASES, make_config, options_of, rename_tensor, write_folder
from .peft_folders import (
    CONFIG,
    FOLDER,
    PREFIX,
    Modules,
    random_modules,
    read_recorded,
    seeded,
    write_adapter,
    write_recorded,
)
from .published import read_published
from .published_cases import log_probabilities, write_case
from .safetensors_files import read_safetensors, write_safetensors

RECORDED = sorted(path.stem for path in FOLDER.glob("*.npz"))
TOKENS = np.random.default_rng(3).integers(3, 90, 96).astype(np.int32)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
# With Q and K in another order, fused matrices, stacks of experts, norms of heads, and Gemma.
SAME_CASES = ["llama", "phi3", "qwen2moe", "qwen3", "gemma2", "glm4", "granite"]


def of_folder(folder: Path, *adapters: Path | LoraAdapter) -> NDArray[np.float64]:
    return log_probabilities(SafetensorsModelFile(folder, "f32", lora=_lora(adapters)), TOKENS)


def of_file(model: Path, *adapters: Path | LoraAdapter) -> NDArray[np.float64]:
    return log_probabilities(NativeModelFile(model, lora=_lora(adapters)), TOKENS)


def _lora(adapters: tuple[Path | LoraAdapter, ...]) -> tuple[LoraAdapter, ...]:
    return tuple(
        each if isinstance(each, LoraAdapter) else LoraAdapter(str(each)) for each in adapters
    )


@pytest.mark.parametrize("case", RECORDED)
def test_log_probabilities_are_those_of_peft(
    tokenizer_folder: Path, tmp_path: Path, case: str
) -> None:
    """Recorded by tools/update_adapter_goldens.py; a GGUF file of the model gives the same bits."""
    recorded = read_recorded(case)
    published = read_published(recorded.base)
    write_case(tmp_path / "base", published, tokenizer_folder)
    (tmp_path / "adapter").mkdir()
    write_recorded(tmp_path / "adapter", recorded.config, recorded.shapes)
    lora = (LoraAdapter(str(tmp_path / "adapter")),)
    file = SafetensorsModelFile(tmp_path / "base", "f32", lora=lora)
    actual = log_probabilities(file, published.tokens)
    assert np.abs(recorded.log_probabilities - published.log_probabilities).max() > 0.1
    np.testing.assert_allclose(
        actual[recorded.positions], recorded.log_probabilities, rtol=0, atol=1e-3
    )
    if case != "falcon_h1":  # whose multipliers a GGUF file has in its weights
        quantize_model(tmp_path / "base", tmp_path / "base.gguf", "f32")
        of_gguf = log_probabilities(
            NativeModelFile(tmp_path / "base.gguf", lora=lora), published.tokens
        )
        np.testing.assert_array_equal(of_gguf, actual)


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_folder_that_it_was_merged_into(
    tiny_model: TinyModelFactory, tmp_path: Path, case: str
) -> None:
    """For every matrix that is not an embedding, by the names of the checkpoint."""
    folder = write_folder(tiny_model(**options_of(case)), tmp_path / "base")
    stored = read_safetensors(folder / "model.safetensors")
    shapes = {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in stored.items()
        if tensor.ndim == 2 and min(tensor.shape) > 1 and "embed_tokens" not in name
    }
    modules = random_modules(shapes)  # type: ignore[arg-type]
    adapter = write_adapter(tmp_path / "adapter", modules)
    base, actual = of_folder(folder), of_folder(folder, adapter)
    for name, (a, b) in modules.items():
        product = b.astype(np.float64) @ a.astype(np.float64)
        stored[f"{name}.weight"] = (stored[f"{name}.weight"] + 12 / 5 * product).astype(np.float32)
    write_safetensors(folder / "model.safetensors", stored, "F32")
    expected = of_folder(folder)
    assert np.abs(expected - base).max() > 0.1
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("case", SAME_CASES)
def test_the_same_numbers_in_a_gguf_file_give_the_same_bits(
    tiny_model: TinyModelFactory, tmp_path: Path, case: str
) -> None:
    model = tiny_model(**options_of(case))
    names = [
        tensor.name
        for tensor in GGUFReader(model).tensors
        if len(tensor.shape) > 1 and tensor.name.startswith("blk.")
    ]
    pairs = random_pairs(model, names)
    as_file = write_gguf_adapter(tmp_path / "a.gguf", pairs, architecture=case)
    with open_gguf(model) as gguf:
        config = make_config(gguf.metadata)
    modules: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    for name, (a, b) in pairs.items():
        ups = rename_tensor(name, b, config, case)
        for number, (whole, up) in enumerate(ups.items()):
            modules[whole.removesuffix(".weight")] = (a[number] if len(ups) > 1 else a, up)
    as_folder = write_adapter(tmp_path / "adapter", modules, r=RANK, lora_alpha=ALPHA)
    expected = of_file(model, LoraAdapter(str(as_file), 0.7))
    np.testing.assert_array_equal(of_file(model, LoraAdapter(str(as_folder), 0.7)), expected)
    folder = write_folder(model, tmp_path / "base")
    on_folder = of_folder(folder, LoraAdapter(str(as_folder), 0.7))
    np.testing.assert_array_equal(of_folder(folder, LoraAdapter(str(as_file), 0.7)), on_folder)
    # Of Gemma's norms a folder holds one less, which rounds.
    np.testing.assert_allclose(on_folder, expected, rtol=0, atol=1e-4 if case == "gemma2" else 0)


Q_PROJ, DOWN_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.fixture
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(architecture="llama", tensor_type="F32", tied=False)


@pytest.fixture
def modules(model: Path) -> Modules:
    shapes = {tensor.name: tensor.shape.tolist() for tensor in GGUFReader(model).tensors}
    of_q, of_down = shapes["blk.0.attn_q.weight"], shapes["blk.1.ffn_down.weight"]
    return random_modules({Q_PROJ: (of_q[1], of_q[0]), DOWN_PROJ: (of_down[1], of_down[0])})


def test_ways_to_write_and_to_name_one(model: Path, modules: Modules, tmp_path: Path) -> None:
    expected = of_file(model, write_adapter(tmp_path / "0", modules))
    for number, options in enumerate(
        ({"prefix": ""}, {"suffix": ".default.weight"}, {"fan_in_fan_out": True}, {"bias": "all"}),
        start=1,
    ):
        adapter = write_adapter(tmp_path / str(number), modules, **options)  # type: ignore[arg-type]
        np.testing.assert_array_equal(of_file(model, adapter), expected)
    weights = tmp_path / "0" / "adapter_model.safetensors"
    np.testing.assert_array_equal(of_file(model, weights), expected)
    for dtype, atol in (("F16", 0.02), ("BF16", 0.2)):
        adapter = write_adapter(tmp_path / dtype, modules, dtype=dtype)
        np.testing.assert_allclose(of_file(model, adapter), expected, rtol=0, atol=atol)
    # Half of it twice, the one as it is and the other by its settings.
    half = write_adapter(tmp_path / "half", modules, lora_alpha=6)
    twice = of_file(model, LoraAdapter(str(tmp_path / "0"), 0.5), half)
    np.testing.assert_allclose(twice, expected, rtol=0, atol=1e-4)


def test_the_output_that_lies_beside_its_update_is_not_read(model: Path, tmp_path: Path) -> None:
    """PEFT saves a frozen matrix too, if it is that of an embedding or the output."""
    shape = next(t.shape.tolist() for t in GGUFReader(model).tensors if t.name == "output.weight")
    modules = random_modules({"lm_head": (shape[1], shape[0])})
    expected = of_file(model, write_adapter(tmp_path / "alone", modules))
    assert np.abs(expected - of_file(model)).max() > 0.1
    name = f"{PREFIX}lm_head.base_layer.weight"
    frozen = seeded(name, (shape[1], shape[0]))
    both = write_adapter(tmp_path / "both", modules, more={name: frozen})
    np.testing.assert_array_equal(of_file(model, both), expected)
    resized = write_adapter(tmp_path / "resized", modules, more={name: frozen[:-1]})
    with pytest.raises(EdgeH2OError, match=r"'base_model.model.lm_head.base_layer.weight' is a wh"):
        of_file(model, resized)


@pytest.mark.parametrize(
    ("changes", "module", "rank", "factor"),
    [
        ({}, Q_PROJ, 5, 12 / 5),
        ({"lora_alpha": 1.5}, Q_PROJ, 5, 0.3),
        ({"use_rslora": True}, Q_PROJ, 5, 12 / math.sqrt(5)),
        ({"alpha_pattern": {"q_proj": 3}}, Q_PROJ, 5, 3 / 5),
        ({"alpha_pattern": {"proj": 3}}, Q_PROJ, 5, 12 / 5),  # no end of a name behind a dot
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj$": 3}}, Q_PROJ, 5, 3 / 5),
        ({"alpha_pattern": {"^self_attn.q_proj": 3}}, Q_PROJ, 5, 12 / 5),
        ({"alpha_pattern": {".*q_proj": 3, "q_proj": 4}}, Q_PROJ, 5, 3 / 5),
        ({"alpha_pattern": {"k_proj": 3, r"layers\.[0-3]\..*(q|k)_proj": 4}}, Q_PROJ, 5, 4 / 5),
        ({"rank_pattern": {r"layers.\d+.self_attn.(?:q|v)_proj": 7}}, Q_PROJ, 7, 12 / 7),
        ({"rank_pattern": {"q_proj": 7}, "use_rslora": True}, Q_PROJ, 7, 12 / math.sqrt(7)),
        ({"rank_pattern": {"q_proj": 7}}, DOWN_PROJ, 5, 12 / 5),
        # Of a parameter of the layer, as PEFT has routers of transformers 5.
        (
            {"alpha_pattern": {"gate": 3}, "target_parameters": ["gate.weight"]},
            "model.layers.0.mlp.gate",
            5,
            12 / 5,
        ),
        (
            {"alpha_pattern": {"gate.weight": 3}, "target_parameters": ["gate.weight"]},
            "model.layers.0.mlp.gate",
            5,
            3 / 5,
        ),
    ],
)
def test_what_an_update_counts(
    changes: Mapping[str, Any], module: str, rank: int, factor: float
) -> None:
    """As PEFT matches patterns: ``re.match(rf"(.*\\.)?({pattern})$", name)``, the first counts."""
    assert PeftConfig({**CONFIG, **changes}).factor(module, rank) == pytest.approx(factor)


def test_an_answer_a_session_file_and_a_flag(
    model: Path, modules: Modules, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other settings are another adapter, and what was read with one is not taken up without it."""
    adapter = write_adapter(tmp_path / "a", modules)
    other = write_adapter(tmp_path / "b", modules, lora_alpha=13)
    folder = write_folder(model, tmp_path / "base")
    texts, prints = [], set()
    for path, lora in [(model, adapter), (model, other), (model, (adapter, 3)), (folder, adapter)]:
        with LLM(path, lora=lora, quantize="f32" if path == folder else None) as llm:
            texts.append(llm.generate("the cat sat on the mat", GREEDY).text)
            prints.add(llm.model.fingerprint)
    assert texts[0] == texts[3] and len(prints) == 4
    with LLM(folder, lora=[adapter], quantize="f32") as llm:
        llm.generate("the cat sat", GREEDY, keep_cache=True)
        llm.save_session(tmp_path / "session")
    with LLM(folder, quantize="f32") as llm, pytest.raises(EdgeH2OError, match=r"made with lora"):
        llm.load_session(tmp_path / "session")
    prompt = ["-p", "the cat sat on the mat", "-n", "4", "--temp", "0", "--quiet", "--ignore-eos"]
    assert main(["run", str(model), *prompt, "--lora", f"{adapter}:3"]) == 0
    assert capsys.readouterr().out.strip() == texts[2].strip()


def test_what_texts_do_without_has_no_update(tokenizer_folder: Path, tmp_path: Path) -> None:
    """An adapter of pictures alone is refused; with texts, it is left out as its matrices are."""
    write_case(tmp_path / "base", read_published("gemma3"), tokenizer_folder)
    stored = read_safetensors(tmp_path / "base" / "model.safetensors")
    matrices = [name for name in stored if name.endswith("q_proj.weight")]
    pictures, texts = (
        random_modules(
            {
                name.removesuffix(".weight"): stored[name].shape  # type: ignore[misc]
                for name in matrices
                if ("vision" in name) == of_pictures
            }
        )
        for of_pictures in (True, False)
    )
    assert pictures and texts
    both = of_folder(tmp_path / "base", write_adapter(tmp_path / "both", {**pictures, **texts}))
    alone = of_folder(tmp_path / "base", write_adapter(tmp_path / "texts", texts))
    np.testing.assert_array_equal(both, alone)
    with pytest.raises(EdgeH2OError, match="changes nothing that a text is computed with"):
        of_folder(tmp_path / "base", write_adapter(tmp_path / "pictures", pictures))


def test_json_of_a_folder_is_read_whole(model: Path, modules: Modules, tmp_path: Path) -> None:
    """Keys that PEFT has had or will have count for nothing while they are unset."""
    new = {"enable_lora": None, "merge_weights": False, "some_new_thing": None, "more": {}}
    adapter = write_adapter(tmp_path / "a", modules, **new)
    few = ("peft_type", "r", "lora_alpha")
    (tmp_path / "b").mkdir()
    small = write_adapter(tmp_path / "b" / "c", modules)
    (small / "adapter_config.json").write_text(json.dumps({key: CONFIG[key] for key in few}))
    np.testing.assert_array_equal(of_file(model, adapter), of_file(model, small))
