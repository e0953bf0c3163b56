"""With sparsity on an ONNX model reads what the native runner reads on the same weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edgeh2o import LLM, H2OConfig, HeadwiseConfig, PrefillConfig, SamplingParams
from edgeh2o.engine import payoff
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.reading import make_tokens, open_llm, read_all
from tests.onnx.variants import GroupQuery, HeadMajorAttention, Packed
from tests.tiny_models import TinyModelFactory

POLICIES = {
    "h2o": H2OConfig(local=6, heavy=8),
    "h2o window": H2OConfig(local=4, heavy=8, score="window", window=4),
    "headwise": HeadwiseConfig(budget=14, local=6, sinks=1, landmark_size=8),
}


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("variant", [GroupQuery, Packed, HeadMajorAttention])
def test_memory_sets_and_logits_equal(
    onnx_model: OnnxModelFactory,
    tiny_model: TinyModelFactory,
    variant: Any,
    policy: str,
    cache_type: str,
) -> None:
    tokens = make_tokens(157)
    sets, logits, pairs = [], [], []
    for path in (onnx_model(variant), tiny_model()):
        with open_llm(path, attention=POLICIES[policy], cache_type=cache_type) as llm:
            runner = llm.start_runner(200, all_rows=True)
            for first in (0, 64, 128):
                part = tokens[first : first + 64]
                last = runner.prefill(part, is_last=first == 128)
            sets.append(
                [
                    runner.policy.memory_set(layer, head)
                    for layer in range(llm.config.n_layers)
                    for head in range(llm.config.n_kv_heads)
                ]
            )
            logits.append([last, runner.decode(7), runner.decode(8)])
            pairs.append((runner.pairs_computed, runner.pairs_dense))
    assert pairs[0] == pairs[1] and pairs[0][0] < pairs[0][1]
    # Scores that differ by rounding may swap the last of two equals.
    n_equal = sum(np.array_equal(a, b) for a, b in zip(*sets, strict=True))
    assert n_equal >= len(sets[0]) - 1
    tolerance = 2e-4 if cache_type == "f32" else 2e-2
    if n_equal == len(sets[0]):
        np.testing.assert_allclose(logits[0], logits[1], atol=tolerance)


def test_windows_stay_exact_under_a_policy(
    onnx_model: OnnxModelFactory, tiny_model: TinyModelFactory
) -> None:
    options: dict[str, object] = {"architecture": "gemma2", "sliding_window": 24}
    tokens = make_tokens(120)
    rows = []
    for path in (onnx_model(**options), tiny_model(**options)):
        with open_llm(path, attention=POLICIES["h2o"]) as llm:
            rows.append(read_all(llm, tokens, 110))
    np.testing.assert_allclose(*rows, atol=2e-4)


def test_a_cache_that_is_kept_goes_on(onnx_model: OnnxModelFactory, tmp_path: Any) -> None:
    """Turns of a chat, growth of the context, and session files."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    text, more = "the heart of the matter is that ", "all of it was in the end"
    with open_llm(onnx_model(), attention=POLICIES["h2o"]) as llm:
        first = llm.generate(text, greedy, keep_cache=True)
        llm.save_session(tmp_path / "session")
        whole = llm.generate(text + first.text + more, greedy, keep_cache=True)
        assert whole.stats.cached_tokens > 0
    with open_llm(onnx_model(), attention=POLICIES["h2o"]) as llm:
        llm.load_session(tmp_path / "session")
        resumed = llm.generate(text + first.text + more, greedy, keep_cache=True)
        assert resumed.stats.cached_tokens == whole.stats.cached_tokens
    assert resumed.token_ids == whole.token_ids


def test_an_interrupted_prefill_needs_a_reset(onnx_model: OnnxModelFactory) -> None:
    tokens = make_tokens(40)
    with open_llm(onnx_model()) as llm:
        runner = llm.start_runner(64, all_rows=True)
        expected = runner.prefill(tokens, is_last=True)
        runner.reset()

        def interrupt(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            runner.prefill(tokens, is_last=True, on_layer=interrupt)
        with pytest.raises(ValueError, match="reset"):
            runner.decode(3)
        runner.reset()
        np.testing.assert_array_equal(runner.prefill(tokens, is_last=True), expected)


def test_runner_rewinds_and_refuses(onnx_model: OnnxModelFactory) -> None:
    tokens = make_tokens(30)
    with open_llm(onnx_model()) as llm:
        runner = llm.start_runner(33)
        runner.prefill(tokens, is_last=True)
        first = runner.decode(5)
        runner.rewind(30)
        np.testing.assert_array_equal(runner.decode(5), first)
        assert list(runner.token_ids) == [*tokens.tolist(), 5]
        with pytest.raises(ValueError, match="outside the vocabulary"):
            runner.decode(320)
        with pytest.raises(ValueError, match="exceeds the context"):
            runner.prefill(tokens[:3], is_last=True)
        with pytest.raises(ValueError, match="1 to 48 tokens"):
            runner.prefill(tokens[:0], is_last=True)
        with pytest.raises(ValueError, match="latest prefill"):
            runner.row_logits(0, 1)


def test_what_prompts_taught_serves_the_file_of_the_weights(
    onnx_model: OnnxModelFactory, tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other way round: the profile is that of the weights."""
    monkeypatch.setattr(payoff, "LEAST_SAVING", -math.inf)  # however short
    options = {"context_length": 4096, "tensor_type": "F32"}
    prompt, one_token = make_tokens(2100), SamplingParams(temperature=0, max_tokens=1)
    found = []
    for path in (onnx_model(**options), tiny_model(**options)):
        # What random weights attend to no memory set keeps.
        with LLM(path, prefill=PrefillConfig(max_error=100)) as llm:
            stats = llm.generate(prompt, one_token).stats
            found.append((stats.attention["table"], stats.pairs_computed < stats.pairs_dense))
            assert ("dense and profiled" in stats.note) == (len(found) == 1)
    assert found == [("profile (1 prompt)", True)] * 2
