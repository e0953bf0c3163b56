"""A rotary embedding other than the file's: equal to that of a file which says so itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, RopeConfig, SamplingParams
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.engine.opening import open_model
from edgeh2o.errors import UsageError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.model_config import DecoderConfig
from edgeh2o.models import read_model
from edgeh2o.models.rope import (
    RopeScaling,
    attention_factor,
    changed_scaling,
    inverse_frequencies,
)
from tests.models.llama_file import Change, float32, read, string, uint32
from tests.tiny_models import TinyModelFactory

SHAPE = {"n_layers": 6, "model_dim": 32, "n_heads": 4, "head_dim": 8, "ffn_dim": 16}
YARN = RopeConfig(scaling="yarn", scale=4.0, original_context=128)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def changed(tmp_path: Path, rope: RopeConfig, said: Change | None = None) -> DecoderConfig:
    read(tmp_path, said or Change())
    with open_gguf(tmp_path / "llama.gguf") as file:
        return read_model(file, rope)[0]


def keys(**values: tuple[int, bytes]) -> Change:
    return Change(keys={f"llama.rope.{name.replace('__', '.')}": v for name, v in values.items()})


@pytest.mark.parametrize(
    ("rope", "said", "reached"),
    [
        (
            YARN,
            keys(
                scaling__type=string("yarn"),
                scaling__factor=float32(4.0),
                scaling__original_context_length=uint32(128),
            ),
            2048,
        ),
        (
            RopeConfig(scaling="linear", freq_scale=0.5),
            keys(scaling__type=string("linear"), scaling__factor=float32(2.0)),
            1024,
        ),
        (RopeConfig(scale=2.0), keys(scaling__factor=float32(2.0)), 1024),
        (RopeConfig(freq_base=4e5), keys(freq_base=float32(4e5)), 512),
        (RopeConfig(scaling="none"), Change(), 512),
    ],
)
def test_a_change_equals_a_file_that_says_so(
    tmp_path: Path, rope: RopeConfig, said: Change, reached: int
) -> None:
    ours, theirs = changed(tmp_path, rope), read(tmp_path, said)[0]
    assert ours.rope_inv_freq == theirs.rope_inv_freq
    assert ours.rope_attention_factor == theirs.rope_attention_factor
    assert (ours.context_length, theirs.context_length) == (reached, 512)
    assert ours.fingerprint == theirs.fingerprint  # the weights are the same


def test_what_a_file_says_can_be_undone_and_stretched_further(tmp_path: Path) -> None:
    said = keys(scaling__type=string("linear"), scaling__factor=float32(2.0))
    undone = changed(tmp_path, RopeConfig(scaling="none"), said)
    assert (undone.rope_inv_freq, undone.context_length) == ((1.0, 0.01), 256)
    further = changed(tmp_path, RopeConfig(scale=8.0), said)
    assert (further.rope_inv_freq, further.context_length) == ((0.125, 0.00125), 2048)


def test_betas_say_which_pairs_are_stretched() -> None:
    """As in the paper's example, 128 pairs over 4,096 positions: 16 turns are at pair 25.7."""
    scaling, _ = changed_scaling(
        RopeScaling(original_context=4096), 4096, RopeConfig(scaling="yarn", scale=4, beta_fast=16)
    )
    ratio = np.divide(inverse_frequencies(128, 1e4), inverse_frequencies(128, 1e4, scaling))
    np.testing.assert_allclose(ratio[:26], 1.0)
    assert ratio[26] > 1.0
    assert attention_factor(scaling) == pytest.approx(1.1386, abs=1e-4)


def test_windows_keep_what_the_file_says(tiny_model: TinyModelFactory) -> None:
    """Distances within a window are those of the training, as in llama.cpp."""
    path = tiny_model(architecture="gemma2", **SHAPE)
    with open_gguf(path) as file:
        plain, stretched = (
            read_model(file, rope)[0]
            for rope in (RopeConfig(), RopeConfig(scaling="linear", scale=2.0))
        )
    assert stretched.sliding_rope_inv_freq == plain.rope_inv_freq
    np.testing.assert_allclose(stretched.rope_inv_freq, np.divide(plain.rope_inv_freq, 2.0))


@pytest.mark.parametrize(
    ("architecture", "options", "rope", "problem"),
    [
        ("gemma2", {}, YARN, "sliding window would change too; use --rope-scaling linear"),
        ("llama", {}, RopeConfig(scaling="yarn"), "yarn needs --rope-scale"),
        ("llama", {}, RopeConfig(beta_fast=16), r"\(--yarn-beta-fast\) is of YaRN, .*; leave it"),
        (
            "phi3",
            {"rope_scaling": "longrope", "original_context": 64},
            RopeConfig(scale=2.0),
            "tables of its own",
        ),
    ],
)
def test_what_a_model_cannot_have(
    tiny_model: TinyModelFactory,
    architecture: str,
    options: dict[str, object],
    rope: RopeConfig,
    problem: str,
) -> None:
    path = tiny_model(architecture=architecture, **{**SHAPE, **options})
    with pytest.raises(UsageError, match=problem), open_model(path, rope=rope):
        pass


def test_onnx_models_hold_their_angles(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(UsageError, match="an ONNX model holds the angles"):
        open_model(tmp_path, rope=YARN)


def test_a_session_belongs_to_its_rotary_embedding(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    model, saved = tiny_model(**SHAPE, context_length=64), tmp_path / "s"
    rope = RopeConfig(scaling="linear", scale=2.0)
    with LLM(model, attention=DenseConfig(), rope=rope) as llm:
        assert llm.config.context_length == 128
        answer = llm.generate("some text", GREEDY, keep_cache=True).token_ids
        llm.save_session(saved)
    with LLM(model, attention=DenseConfig(), rope=rope) as llm:
        llm.load_session(saved)
        assert llm.has_open_prompt
    with LLM(model, attention=DenseConfig()) as llm:
        assert llm.generate("some text", GREEDY).token_ids != answer
        with pytest.raises(UsageError, match=r'with rope {"scaling": "linear", .*run has null'):
            llm.load_session(saved)
