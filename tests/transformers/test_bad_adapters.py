"""Adapters of PEFT that are damaged, made to do harm, of another model, or not understood."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import LLM
from edgeh2o.cli.main import main
from edgeh2o.errors import EdgeH2OError, FormatError, ResourceError
from edgeh2o.lora_config import LoraAdapter
from edgeh2o.models.transformers.peft_config import PeftConfig
from edgeh2o.runners.native import NativeModelFile
from edgeh2o.runners.safetensors import SafetensorsModelFile
from tests.tiny_models import TinyModelFactory

from .folders import write_folder
from .peft_folders import CONFIG, PREFIX, random_modules, seeded, write_adapter
from .published import read_published
from .published_cases import write_case
from .safetensors_files import write_raw

Q_PROJ = "model.layers.0.self_attn.q_proj"
DIM = 64


def load(model: Path, adapter: Path) -> None:
    lora = (LoraAdapter(str(adapter)),)
    is_folder = model.is_dir()
    with (
        SafetensorsModelFile(model, "f32", lora=lora)
        if is_folder
        else NativeModelFile(model, lora=lora)
    ) as file:
        file.load()


@pytest.fixture
def model(tiny_model: TinyModelFactory) -> Path:
    sizes = {"model_dim": DIM, "head_dim": 8, "ffn_dim": 128}
    return tiny_model(architecture="llama", tensor_type="F32", **sizes)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, "'peft_type' is 'IA3'; only adapters of the kind LORA"),
    "no_kind": ({"peft_type": None}, "'peft_type' is 'None'"),
    "dora": ({"use_dora": True}, "'use_dora' is set: DoRA, .* merge it into the model before"),
    "alora": ({"alora_invocation_tokens": [1, 2]}, "'alora_invocation_tokens' is set"),
    "replicated": ({"layer_replication": [[0, 2], [1, 3]]}, "'layer_replication' is set: a model"),
    "tokens": ({"trainable_token_indices": {"embed_tokens": [1]}}, "'trainable_token_indices' is"),
    "bias": ({"lora_bias": True}, "'lora_bias' is set: biases of updates"),
    "qalora": ({"use_qalora": True}, "'use_qalora' is set: QA-LoRA"),
    "bdlora": ({"use_bdlora": {"target_modules_bd_a": []}}, "'use_bdlora' is set: BD-LoRA"),
    "arrow": ({"arrow_config": {"top_k": 2}}, "'arrow_config' is set: Arrow"),
    "kasa": ({"kasa_config": {"beta": 1e-4}}, "'kasa_config' is set: KaSA"),
    "monte": ({"monteclora_config": {"n": 1}}, "'monteclora_config' is set: MonteCLoRA"),
    **{
        name: ({"init_lora_weights": name}, f"'init_lora_weights' is '{name}', which may have mov")
        for name in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new")
    },
    "unknown": ({"use_turbo": True}, "'use_turbo' is not known; .* newer edgeh2o, or merge it"),
    "rank": ({"r": 0}, "'r' is 0, but must be a whole number of at least 1"),
    "no_rank": ({"r": None}, "'r' is missing"),
    "half_rank": ({"r": 2.5}, "'r' is 2.5, but must be"),
    "other_rank": ({"r": 8}, f"'{Q_PROJ}' has a rank of 5, but adapter_config.json says 8"),
    "alpha": ({"lora_alpha": "16"}, "'lora_alpha' is '16', but must be a number"),
    "infinite": ({"lora_alpha": float("inf")}, "'lora_alpha' is inf, but must be a number"),
    "root": ({"use_rslora": "yes"}, "'use_rslora' is 'yes', but must be true or false"),
    "list": ({"rank_pattern": [1]}, "'rank_pattern' must be an object of patterns"),
    "ranks": ({"rank_pattern": {"q_proj": 4}}, "has a rank of 5, but adapter_config.json says 4"),
    "number": ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern: 'q_proj' is missing"),
    "range": ({"alpha_pattern": {"[z-a]": 1}}, "pattern '\\[z-a\\]', which is not understood"),
    "parameters": ({"target_parameters": "all"}, "'target_parameters' must be a list of names"),
    "long": ({"alpha_pattern": {"a" * 257: 1}}, "which is not understood"),
    "many": ({"alpha_pattern": {str(i): 1 for i in range(2**14 + 1)}}, "more than 16384 patterns"),
    **{
        pattern: ({"alpha_pattern": {pattern: 1}}, "which is not understood .* the name of each")
        for pattern in ("(a*)*", "((a|b)c)", "a{2}", "a**", "(?=a)", r"(a)\1", "a?", "a\n", "é")
    },
    "slow": ({"alpha_pattern": {".*a.*b.*c.*d": 1}}, "'alpha_pattern' has .* in too many ways"),
    "groups": ({"alpha_pattern": {"(a|.|..)" * 30: 1}}, "match in too many ways"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_refused(model: Path, tmp_path: Path, case: str) -> None:
    changes, problem = SETTINGS[case]
    modules = random_modules({Q_PROJ: (DIM, DIM)})
    adapter = write_adapter(tmp_path / "adapter", modules, **changes)
    with pytest.raises(FormatError, match=problem) as raised:
        load(model, adapter)
    assert str(raised.value).startswith(str(adapter))


def test_patterns_at_the_limit_end_soon() -> None:
    """A name as long as those of models, which none of them matches."""
    patterns = {f"{2 * '(a|.|..|...)'}.*{number}x": 1.0 for number in range(200)}
    config = PeftConfig({**CONFIG, "alpha_pattern": patterns})
    assert config.factor("a." * 30, 5) == 12 / 5
    more = {**patterns, **{f"{pattern}y": 1.0 for pattern in patterns}}
    with pytest.raises(FormatError, match="match in too many ways"):
        PeftConfig({**CONFIG, "alpha_pattern": more})


def _pair(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {f"{name}.lora_A.weight": seeded("a", a), f"{name}.lora_B.weight": seeded("b", b)}


PREFIXED = PREFIX + Q_PROJ
GOOD = _pair(PREFIXED, (5, DIM), (DIM, 5))
TENSORS: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "none": ({}, "it has no tensors"),
    "half": ({f"{PREFIXED}.lora_A.weight": seeded("a", (5, DIM))}, f"lora_B of module '{Q_PROJ}'"),
    "twice": (
        {**GOOD, f"{PREFIXED}.lora_A.default.weight": seeded("a", (5, DIM))},
        "lora_A.default.weight' is there twice",
    ),
    "embedding": (
        {f"{PREFIX}model.embed_tokens.lora_embedding_A": seeded("a", (5, 100))},
        "embed_tokens.lora_embedding_A' is an update of an embedding, which is not supported",
    ),
    "magnitude": (
        {**GOOD, f"{PREFIXED}.lora_magnitude_vector": seeded("a", (DIM,))},
        "lora_magnitude_vector' is a magnitude of DoRA",
    ),
    "bias": ({**GOOD, f"{PREFIXED}.bias": seeded("a", (DIM,))}, "q_proj.bias' is a bias that was"),
    "lora_bias": (
        {**GOOD, f"{PREFIXED}.lora_B.bias": seeded("a", (DIM,))},
        r"lora_B.bias' is a bias of an update \(lora_bias\)",
    ),
    "whole": (
        {**GOOD, f"{PREFIX}model.norm.weight": seeded("a", (DIM,))},
        r"'base_model.model.model.norm.weight' is a whole tensor of the model \(modules_to_save",
    ),
    "tokens": (
        {**GOOD, f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": seeded(
            "a", (2, DIM))},
        "trainable_tokens_delta' is new rows of single tokens",
    ),
    "frozen_alone": (
        {**GOOD, f"{PREFIX}lm_head.base_layer.weight": seeded("a", (100, DIM))},
        "lm_head.base_layer.weight' is a whole matrix of the model",
    ),
    "ranks": (_pair(PREFIXED, (5, DIM), (DIM, 4)), r"of shape \[5, 64\] and \[64, 4\] are no low-"),
    "convolution": (_pair(PREFIXED, (5, DIM, 3), (DIM, 5, 1)), "no low-rank update of a linear"),
    "empty": (_pair(PREFIXED, (0, DIM), (DIM, 0)), "no low-rank update of a linear layer"),
    "outputs": (_pair(PREFIXED, (5, DIM), (2 * DIM, 5)), "changes a matrix of 128 rows and 64 col"),
    "heads": (_pair(PREFIXED, (5, DIM), (DIM - 1, 5)), "63 rows are no whole heads.*another model"),
    "inputs": (_pair(PREFIXED, (5, 32), (DIM, 5)), r"none of 64 x 64 \(blk.0.attn_q.weight\)"),
    "layer": (
        _pair(PREFIXED.replace(".0.", ".9."), (5, DIM), (DIM, 5)),
        "has no matrix of module 'model.layers.9.self_attn.q_proj'; the adapter is for another",
    ),
    "norm": (
        _pair(f"{PREFIX}model.norm", (5, 1), (DIM, 5)),
        "module 'model.norm' is 'output_norm.weight', which takes no update",
    ),
    "tied": (
        _pair(f"{PREFIX}lm_head", (5, DIM), (100, 5)),
        "module 'lm_head' is the embedding in this model, which takes no update",
    ),
    "nan": (
        {**GOOD, f"{PREFIXED}.lora_B.weight": np.full((DIM, 5), np.nan, np.float32)},
        "lora_B.weight' has NaN or infinite weights; fetch it again",
    ),
    "overflow": (
        {**GOOD, f"{PREFIXED}.lora_B.weight": np.full((DIM, 5), 3e38, np.float32)},
        r"'blk.0.attn_q.weight': what is added has numbers that are too large, times 2\.4; fetch",
    ),
    "type": (
        {**GOOD, f"{PREFIXED}.lora_A.weight": np.zeros((5, DIM), np.uint8)},
        "lora_A.weight' is of dtype U8; only F32, F16, BF16 can be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_refused(model: Path, tmp_path: Path, case: str, is_folder: bool) -> None:
    tensors, problem = TENSORS[case]
    adapter = write_adapter(tmp_path / "adapter", {}, more=tensors)
    base = write_folder(model, tmp_path / "base") if is_folder else model
    with pytest.raises(FormatError, match=problem) as raised:
        load(base, adapter)
    assert str(raised.value).startswith(str(adapter))


def _edit(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


FILES: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "no_settings": (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config"),
    "no_weights": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "no adapter_model.safetensors in the folder; fetch all files of the adapter",
    ),
    "pickled": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        "adapter_model.bin is a program as much as data .* safe_serialization=True",
    ),
    "not_json": (_edit("adapter_config.json", b"{r: 8"), "adapter_config.json is not valid JSON"),
    "deep": (_edit("adapter_config.json", b'{"a":' * 10**5), "adapter_config.json is not valid"),
    "a_list": (_edit("adapter_config.json", b"[]"), "adapter_config.json holds no JSON object"),
    "bytes": (_edit("adapter_config.json", b"\xff"), "adapter_config.json is not UTF-8 text"),
    "short": (_edit("adapter_model.safetensors", b"\x01\0\0\0\0\0\0\0{"), "not JSON|truncated"),
    "lfs": (_edit("adapter_model.safetensors", b"version https://git-lfs.github.com"), "lfs pull"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_missing_or_damaged(model: Path, tmp_path: Path, case: str) -> None:
    edit, problem = FILES[case]
    adapter = write_adapter(tmp_path / "adapter", random_modules({Q_PROJ: (DIM, DIM)}))
    edit(adapter)
    with pytest.raises(FormatError, match=problem) as raised:
        load(model, adapter)
    assert str(raised.value).count(str(adapter)) in (1, 2)


def test_what_is_there_is_bounded(model: Path, tmp_path: Path) -> None:
    """Sizes are checked against the file before anything is read."""
    adapter = write_adapter(tmp_path / "adapter", random_modules({Q_PROJ: (DIM, DIM)}))
    header = {"a": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}
    write_raw(adapter / "adapter_model.safetensors", header, b"")
    with pytest.raises(FormatError, match=r"incomplete|takes"):
        load(model, adapter)
    with pytest.raises(ResourceError, match="no such file"):
        load(model, tmp_path / "missing")


def test_models_that_take_none_by_these_names(
    tiny_model: TinyModelFactory, tokenizer_folder: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", random_modules({Q_PROJ: (DIM, DIM)}))
    with pytest.raises(FormatError, match=r"architecture 'gpt2' in PEFT are not known; make a GG"):
        load(tiny_model(architecture="gpt2"), adapter)
    # Gates of one row are vectors in GGUF, and keys of latent attention are held turned around.
    model = tiny_model(architecture="qwen2moe", shared_ffn_dim=64, tensor_type="F32")
    gate = {"model.layers.0.mlp.shared_expert_gate": (1, DIM)}
    with pytest.raises(FormatError, match=r"'blk.0.ffn_gate_inp_shexp.weight', which takes no up"):
        load(model, write_adapter(tmp_path / "gate", random_modules(gate)))
    case = read_published("minicpm3")
    write_case(tmp_path / "minicpm3", case, tokenizer_folder)
    name = "model.layers.0.self_attn.kv_b_proj"
    latent = {name: case.shapes[f"{name}.weight"]}
    adapter = write_adapter(tmp_path / "latent", random_modules(latent))  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"'blk.0.attn_kv_b.weight' is a tensor whose adapters"):
        load(tmp_path / "minicpm3", adapter)


def test_multipliers_that_a_gguf_file_does_not_have(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    model = tiny_model(architecture="falcon-h1")
    adapter = write_adapter(tmp_path / "adapter", random_modules({Q_PROJ: (DIM, DIM)}))
    with pytest.raises(FormatError, match=r"multiplied by a number of config.json, which a GGUF"):
        load(model, adapter)


def test_the_model_that_it_was_trained_on_is_named(model: Path, tmp_path: Path) -> None:
    modules = random_modules({"model.layers.40.self_attn.q_proj": (DIM, DIM)})
    adapter = write_adapter(tmp_path / "a", modules, base_model_name_or_path="big/model-70b")
    with pytest.raises(FormatError, match=r"\(trained on 'big/model-70b'\): the model has no matr"):
        load(model, adapter)


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_config: bool
) -> None:
    """Trainers write the config.json of the model beside it."""
    adapter = write_adapter(tmp_path / "adapter", random_modules({Q_PROJ: (DIM, DIM)}))
    if has_config:
        (adapter / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FormatError, match="it is an adapter of PEFT; name its model, and this wi"):
        LLM(adapter)
    assert main(["run", str(adapter), "-p", "a"]) == 1
    assert "name its model, and this with --lora" in capsys.readouterr().err
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(FormatError, match="it is an adapter of PEFT"):
        LLM(adapter)


def test_a_whole_model_may_have_settings_of_an_adapter(model: Path, tmp_path: Path) -> None:
    """As it was merged where it lay."""
    folder = write_folder(model, tmp_path / "base")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    with LLM(folder) as llm:
        assert llm.model.config.architecture == "llama"


def test_models_of_other_kinds_take_none(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(EdgeH2OError, match="are for GGUF files and folders of safetensors on the "):
        LLM(tmp_path / "model.onnx", lora=tmp_path)
