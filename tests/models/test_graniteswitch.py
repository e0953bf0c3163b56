"""Granite Switch: adapters in the model's own file, which tokens of a text choose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError, UsageError
from edgeh2o.llm import LLM
from edgeh2o.runners.core_config import core_config
from edgeh2o.runners.native import NativeModelFile
from tests.model.model_pair import (
    CHUNK_SIZE,
    layers_of,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
)
from tests.models.tiny_file import changed_key, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors

SHAPE = {"model_dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 96}
FIRST, SECOND, THIRD = 60, 70, 80


def test_adapters_of_graniteswitch(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "graniteswitch")
    assert config.adapter_tokens == ((60, 61), (70, 71), (80, 80)) and config.adapter_gain == 15.0
    assert config.update_rank == 3 * 4 and config.adapter_scales == ()
    assert read_tiny(tiny_model, "graniteswitch", adapter_gain=8.0).adapter_gain == 8.0
    with NativeModelFile(tiny_model(architecture="graniteswitch", **SHAPE)) as file:
        assert file._own_adapters is not None
        assert len(file._own_adapters.updates) == 3 * 7 * 3


def test_which_adapter_counts(tiny_model: TinyModelFactory) -> None:
    """None before the first token that chooses one; of two the mean; in calls of any kind."""
    pair = load_pair(tiny_model, architecture="graniteswitch", **SHAPE)
    n = 3 * CHUNK_SIZE
    tokens = np.where(np.isin(random_tokens(n), (FIRST, SECOND, THIRD)), 5, random_tokens(n))
    tokens[20], tokens[90], tokens[130] = SECOND, SECOND, THIRD
    run = pair.reference.start(layers_of("dense")[0])
    expected = run.prefill(tokens)
    assert run.rows.adapters is not None
    numbers = run.rows.adapters.tolist()
    assert numbers == [0] * 20 + [2] * (n - 20)
    session = pair.session(_core.dense_policy(), cache_type="f32")
    for lengths in ([n], [20, 1, n - 21], [CHUNK_SIZE] * 3):
        batches = np.split(tokens, np.cumsum(lengths)[:-1])
        assert relative_error(prefill(session, *batches), expected) < 2e-5
    session.reset()
    session.prefill(tokens[:15], is_last=True)
    found = []
    for first in range(15, 111, 8):
        found.append(session.decode_batch(tokens[first : first + 8]))
        session.accept(7)
    assert relative_error(np.concatenate(found), expected[15:111]) < 2e-5
    tokens[20] = FIRST  # the mean of 1, 2 and 3 is 2, that of 1 and 2 is rounded up
    run = pair.reference.start(layers_of("dense")[0])
    expected = run.prefill(tokens)
    assert run.rows.adapters is not None
    assert run.rows.adapters.tolist() == [0] * 20 + [1] * 70 + [2] * (n - 90)
    assert relative_error(prefill(session, tokens), expected) < 2e-5


def test_keys_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value, problem in (
        ("count", 4, r"token_ids_activate' has 3 items, but must have 4"),
        ("count", None, r"adapters\.count' .* is missing"),
        ("lora_rank", 0, r"adapters\.lora_rank' is 0"),
        ("lora_rank", 3, r"lora_a' is F32 of shape \[32, 4, 4\]"),
        ("token_ids_activate", [60, 70, 60], r"names a token twice"),
        ("token_ids_substitute", [60, 70, 320], r"names token 320, but the vocab"),
        ("token_ids_substitute", [60, 70, -1], r"names token -1, but the vocabulary"),
    ):
        with changed_key(monkeypatch, f"graniteswitch.adapters.{key}", value):
            path = write_tiny(tmp_path, "graniteswitch")
        with pytest.raises(FormatError, match=problem), NativeModelFile(path):
            pass


def test_tensors_that_cannot_be(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors["blk.1.ffn_up.lora_b"]

    def cut(tensors: Tensors) -> None:
        tensors["blk.1.attn_k.lora_b"] = tensors["blk.1.attn_k.lora_b"][:, :-8]

    def add(tensors: Tensors) -> None:
        tensors["output.lora_a"] = np.zeros((4, 4, 32), np.float32)

    def spoil(tensors: Tensors) -> None:
        tensors["blk.1.attn_k.lora_b"][1, 0, 0] = np.nan

    for edit, problem in (
        (drop, "'blk.1.ffn_up.lora_b' of an adapter is missing"),
        (cut, r"'blk.1.attn_k.lora_b' is F32 of shape \[4, 8, 4\], but must be .* \[4, 16, 4\]"),
        (add, "'output.lora_a' is of an adapter of no matrix"),
        (spoil, "'blk.1.attn_k.lora_b' has NaN or infinite weights"),
    ):
        path = write_tiny(tmp_path, "graniteswitch", edit=edit)
        with pytest.raises(FormatError, match=problem), NativeModelFile(path) as file:
            file.load()


def test_sizes_that_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "graniteswitch")
    core_config(config)
    for changes, problem in (
        ({"adapter_tokens": ((320, 1),)}, "token 320, which is read as 1"),
        ({"adapter_gain": 0.0}, "by a gain of 0"),
        ({"activation": "xielu", "has_head_gains": True}, "."),
    ):
        with pytest.raises(FormatError, match=problem):
            core_config(replace(config, **changes))


def test_answers(
    tiny_model: TinyModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget, a quantised file, and no adapters beside."""
    options = {**SHAPE, "context_length": 4096, "tied": False}
    path = tiny_model(architecture="graniteswitch", **options)
    flags = ["-p", "the art of war " * 200, "-n", "3", "--temp", "0"]
    for rule in (["headwise", "--budget", "64"], ["h2o"], ["dense"]):
        assert main(["run", str(path), *flags, "--attention", *rule]) == 0
    quantised = str(tmp_path / "q.gguf")
    assert main(["quantize", str(path), quantised, "q8_0"]) == 0
    assert main(["run", quantised, *flags]) == 0
    assert main(["export-onnx", str(path), str(tmp_path / "folder")]) == 1
    assert "adapters that tokens choose cannot be written" in capsys.readouterr().err
    with pytest.raises(UsageError, match="has adapters of its own, which tokens choose"):
        LLM(path, lora=tmp_path / "adapter.gguf")
