"""Models whose positions are rows of a table: nothing goes beyond it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError
from tests.model.model_pair import load_pair, random_tokens
from tests.models.tiny_file import read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors

SMALL = {"architecture": "gpt2", "model_dim": 64, "n_heads": 4, "n_kv_heads": 4, "head_dim": 16}


def test_the_table_is_as_long_as_the_context(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    config = read_tiny(tiny_model, "gpt2", context_length=96)
    assert config.n_positions == config.most_positions == 96
    assert not any(layer.has_rope for layer in config.layers)
    assert read_tiny(tiny_model, "llama").most_positions == 0

    def cut(tensors: Tensors) -> None:
        tensors["position_embd.weight"] = tensors["position_embd.weight"][:-1]

    path = write_tiny(tmp_path, "gpt2", edit=cut, context_length=96)
    with pytest.raises(FormatError, match=r"'position_embd\.weight' has shape \[32, 95\]"):
        read(path)


def test_prompts_of_several_calls_get_their_rows(tiny_model: TinyModelFactory) -> None:
    """Also rows of more than pass the linear layers at a time."""
    pair = load_pair(tiny_model, **SMALL, ffn_dim=96, context_length=512)
    tokens = random_tokens(450)
    sizes = {"max_context": 512, "batch_size": 448, "chunk_size": 64, "cache_type": "f32"}
    session = _core.Sequence(pair.core, _core.dense_policy(), **sizes)
    expected = session.prefill(tokens[:448], is_last=True)
    decoded = [session.decode(int(token)) for token in tokens[448:]]
    session.reset()
    session.prefill(tokens[:200], is_last=False)
    np.testing.assert_allclose(session.prefill(tokens[200:448], is_last=True), expected, atol=2e-4)
    both = session.decode_batch(tokens[448:])
    np.testing.assert_allclose(both, np.stack(decoded), atol=2e-4)


def test_the_core_refuses_positions_beyond_the_table(tiny_model: TinyModelFactory) -> None:
    pair = load_pair(tiny_model, **SMALL, ffn_dim=96, context_length=96)
    session = _core.Sequence(
        pair.core, _core.dense_policy(), max_context=128, batch_size=64, chunk_size=64
    )
    session.prefill(random_tokens(64), is_last=False)
    with pytest.raises(ValueError, match="position 64 plus 33 tokens exceeds the 96 positions"):
        session.prefill(random_tokens(33), is_last=True)
    session.prefill(random_tokens(32), is_last=True)
    with pytest.raises(ValueError, match="position 96 plus 1 tokens exceeds the 96 positions"):
        session.decode(5)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["-c", "97"], "a context of 97 is longer than the table of 96 positions"),
        (["-p", "the " * 300], "shorten it: the model has a table of 96 positions"),
        (["--rope-freq-base", "5000"], "it has no rotary embedding"),
    ],
)
def test_commands_refuse_what_goes_beyond(
    tiny_model: TinyModelFactory,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    problem: str,
) -> None:
    path = str(tiny_model(**SMALL, ffn_dim=96, context_length=96))
    assert main(["run", path, "-p", "the", "-n", "2", *flags]) == 2
    assert problem in capsys.readouterr().err


def test_answers_go_on_within_the_table(
    tiny_model: TinyModelFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the context is full the oldest rows go."""
    path = str(tiny_model(**SMALL, ffn_dim=96, context_length=96))
    flags = ["-p", "the ", "-n", "120", "--temp", "0", "--ignore-eos"]
    assert main(["run", path, *flags, "--context-full", "shift"]) == 0
    assert main(["run", path, *flags]) == 0
