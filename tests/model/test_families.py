"""What every architecture does beside computing logits: it is saved, goes back, is calibrated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.cli.main import main
from tests.budget_tables import calibrate_by_few_windows
from tests.model.model_pair import CHUNK_SIZE, load_pair, random_tokens
from tests.tiny_architectures import FAMILIES
from tests.tiny_models import TinyModelFactory

SHAPE = {"model_dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 96}
OPTIONS: dict[str, dict[str, object]] = {
    "dots3note": {"n_layers": 3, "sliding_window": 20},
    "exaone-moe": {"n_layers": 4, "sliding_window": 20},
    "exaone4": {"n_layers": 4, "sliding_window": 20},
    "gemma3n": {
        **{"n_layers": 6, "sliding_window": 20, "n_shared_kv": 3, "token_input_dim": 8},
        "n_cut_layers": 4,
    },
    "gemma4": {
        **{"n_layers": 6, "sliding_window": 20, "head_dim": 32, "head_dim_sliding": 16},
        **{"n_shared_kv": 3, "token_input_dim": 8},
    },
    "gpt-oss": {"n_layers": 4, "sliding_window": 20},
    "granite_swa": {"n_layers": 4, "sliding_window": 20, "shared_ffn_dim": 80},
    "granitemoe": {"shared_ffn_dim": 80},
    "hrm_text": {"n_layers": 1, "n_low_cycles": 2},
    "llama4": {"n_layers": 5, "sliding_window": 20, "temperature_length": 30},
    "mimo2": {"n_layers": 3, "sliding_window": 20, "value_dim": 8},
    "mistral3": {"original_context": 50},
    "nanbeige": {"n_layers": 2, "n_loops": 2},
    "qwen2moe": {"shared_ffn_dim": 80},
    "smollm3": {"n_layers": 4},
    "step35": {"n_layers": 3, "sliding_window": 20, "n_heads": (4, 2, 4)},
}
N_TOKENS = 3 * CHUNK_SIZE


def rule_of(architecture: str) -> _core.SparsePolicy:
    """A sparse one, where there may be one."""
    if FAMILIES[architecture].reads_all:
        return _core.dense_policy()
    return _core.h2o_policy(12, 4)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_session_is_saved_and_goes_back(tiny_model: TinyModelFactory, architecture: str) -> None:
    options = {**SHAPE, **OPTIONS.get(architecture, {}), "architecture": architecture}
    pair = load_pair(tiny_model, **options)
    tokens = random_tokens(N_TOKENS)

    def go_on(session: _core.Sequence) -> np.ndarray:
        logits = session.prefill(tokens[2 * CHUNK_SIZE :], is_last=True)
        return np.stack([logits, session.decode(5), session.decode(6)])

    session = pair.session(rule_of(architecture), all_rows=False)
    session.prefill(tokens[: 2 * CHUNK_SIZE], is_last=False)
    assert session.mark()
    other = pair.session(rule_of(architecture), all_rows=False)
    other.load_state(session.save_state(), tokens[: 2 * CHUNK_SIZE])
    for rows, copy in zip(session.cached_rows(), other.cached_rows(), strict=True):
        copy[:] = rows
    expected = go_on(session)
    np.testing.assert_array_equal(go_on(other), expected)
    session.rewind(2 * CHUNK_SIZE)
    np.testing.assert_array_equal(go_on(session), expected)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_decode_steps_of_several_sequences_are_those_alone(
    tiny_model: TinyModelFactory, architecture: str
) -> None:
    options = {**SHAPE, **OPTIONS.get(architecture, {}), "architecture": architecture}
    pair = load_pair(tiny_model, **options)
    workspace = _core.Workspace(pair.core, 2)
    sizes = {"max_context": 4 * N_TOKENS, "batch_size": N_TOKENS, "chunk_size": CHUNK_SIZE}
    # Prompts of other lengths, which end at other places of windows and rules.
    shared, alone = (
        [
            _core.Sequence(pair.core, policy, workspace=workspace, **sizes)
            for policy in (_core.dense_policy(), rule_of(architecture), _core.dense_policy())
        ]
        for _ in range(2)
    )
    for i, pair_of_one in enumerate(zip(shared, alone, strict=True)):
        for sequence in pair_of_one:
            sequence.prefill(random_tokens(11 + 30 * i, seed=i), is_last=True)
    for token in (5, 6, 7):
        steps = [(each, np.array([token + i], np.int32), None) for i, each in enumerate(shared)]
        together = workspace.forward(steps)
        for i, logits in enumerate(together):
            assert logits is not None
            np.testing.assert_array_equal(logits, [alone[i].decode(token + i)])
    for n_kept in (0, 3, 1):  # of the guesses of each; the last of a step has none
        calls = [random_tokens(n, seed=n + n_kept) for n in (4, 6, 1)]
        together = workspace.forward(list(zip(shared, calls, [None] * 3, strict=True)))
        for one, own, tokens, logits in zip(shared, alone, calls, together, strict=True):
            n_right = min(n_kept, len(tokens) - 1)
            one.accept(n_right)
            wanted = [own.decode(int(token)) for token in tokens[: n_right + 1]]
            assert logits is not None and len(logits) == len(tokens)
            np.testing.assert_array_equal(logits[: n_right + 1], wanted)
    for one, other in zip(shared, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.save_state() == other.save_state()


@pytest.mark.parametrize(
    ("architecture", "what"),
    [
        ("gemma3n", "several residual streams (AltUp)"),
        ("gemma4", "layers that share keys and values"),
        ("gpt-oss", "a mixture of experts"),
    ],
)
def test_layers_that_attend_unlike_others_have_no_table(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
    what: str,
) -> None:
    options = {**SHAPE, **OPTIONS[architecture], "context_length": 4096}
    path = str(tiny_model(architecture=architecture, **options))
    assert main(["calibrate", path, "-o", str(tmp_path / "table.json")]) == 2
    assert "calibration is for models whose layers attend alike" in capsys.readouterr().err
    assert main(["run", path, "-p", "x", "-n", "1", "--max-loss", "1"]) == 2
    assert "--max-loss needs a budget table, which is for models" in capsys.readouterr().err
    assert main(["export-onnx", path, str(tmp_path / "folder")]) == 1
    assert f"{what} cannot be written" in capsys.readouterr().err
    flags = ["-p", "the " * 600, "-n", "2", "--temp", "0"]
    for attention in (["headwise", "--budget", "64"], ["h2o"], ["dense"]):
        assert main(["run", path, *flags, "--attention", *attention]) == 0
    flags[1] = "the art of war " * 400
    capsys.readouterr()
    assert main(["run", path, *flags, "--json"]) == 0
    note = json.loads(capsys.readouterr().out)["note"]
    assert "cannot be profiled: --budget lets it" in note


@pytest.mark.parametrize(
    "architecture", ["mistral3", "qwen2moe", "smollm3", "hunyuan-dense", "minicpm3"]
)
def test_a_table_is_made(
    tiny_model: TinyModelFactory,
    architecture: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calibrate_by_few_windows(monkeypatch)
    options = {**SHAPE, **OPTIONS.get(architecture, {}), "architecture": architecture}
    text, table = tmp_path / "text.txt", tmp_path / "table.json"
    text.write_text("the thing is that the art is there and the hen is in the pen " * 120)
    path = str(tiny_model(context_length=4096, **options))
    arguments = ["calibrate", path, "--text", str(text), "--length", "2048", "-o", str(table)]
    assert main([*arguments, "--quiet"]) == 0
    assert table.stat().st_size > 0
