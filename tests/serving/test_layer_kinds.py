"""Layers of every kind, served: neighbours and what is kept change no answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from edgeh2o import DenseConfig, H2OConfig
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.serving.requests import GenerationRequest
from tests.serving.answering import answer, request_of, tokens_of
from tests.serving.conftest import open_engine
from tests.tiny_models import TinyModelFactory

KINDS: dict[str, dict[str, object]] = {
    "lfm2": {"n_layers": 4},
    "qwen35": {"n_layers": 4},
    "qwen4exp": {"n_layers": 4},
    "bailingmoe3": {"n_layers": 4},
    "kimi-linear": {"n_layers": 4, "q_rank": 0},
    "granitehybrid": {"n_layers": 4},
    "falcon-h1": {"n_layers": 2},
    "nemotron_h": {"n_layers": 4},
    "plamo2": {"n_layers": 4},
    "rwkv6": {"n_layers": 2},
    "rwkv6qwen2": {"n_layers": 2},
    "rwkv7": {"n_layers": 2},
    "arwkv7": {"n_layers": 2, "wkv_gate_rank": 0},
    "deepseek2": {"n_layers": 3, "n_experts": 4, "n_experts_used": 2},
    "minicpm3": {"n_layers": 2},
    "glm-dsa": {"n_layers": 3, "indexer_period": 2, "n_experts": 0},
}
INDEXED = ("glm-dsa", "qwen4exp")
CONTEXT = 1024
H2O = H2OConfig(local=24, heavy=24)


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tiny_model: TinyModelFactory) -> Path:
    options = KINDS[request.param]
    return tiny_model(architecture=request.param, context_length=CONTEXT, **options)


@pytest.fixture
def rule(request: pytest.FixtureRequest) -> SparseAttentionConfig:
    """A sparse one, where no indexer is the rule."""
    return DenseConfig() if request.node.callspec.params["model"] in INDEXED else H2O


def requests(evicts: bool) -> list[GenerationRequest]:
    """Questions on a document, one with a changed middle, short ones, and one past the context."""
    document = tokens_of(500, seed=1)
    changed = [*document[:250], 9, *document[251:]]
    prompts = [document + tokens_of(20, seed=seed) for seed in (2, 3)]
    prompts += [changed + tokens_of(20, seed=4), tokens_of(5, seed=5), tokens_of(130, seed=6)]
    made = [request_of(prompt, 12 + 3 * i) for i, prompt in enumerate(prompts)]
    past = request_of(tokens_of(CONTEXT - 30, seed=7), 60)
    full = "evict" if evicts else "shift"
    made.append(replace(past, sampling=replace(past.sampling, context_full=full)))
    return made


def test_neighbours_and_kept_prompts_change_nothing(
    model: Path, rule: SparseAttentionConfig
) -> None:
    wanted = requests(evicts=rule is H2O)
    with open_engine(model, attention=rule, prefix_ram_bytes=0) as engine:
        expected = [answer(engine, request) for request in wanted]
        assert all(each.stats.cached_tokens == 0 for each in expected)
    last = expected[-1].stats
    assert last.evicted_tokens > 0 if rule is H2O else last.context_shifts > 0
    with (
        open_engine(model, attention=rule) as engine,
        ThreadPoolExecutor(len(wanted)) as threads,
    ):
        for _ in range(2):
            got = list(threads.map(lambda request: answer(engine, request), wanted))
            for one, other in zip(got, expected, strict=True):
                assert (one.text, one.logprobs) == (other.text, other.logprobs)
        assert engine.scheduler.n_step_rows > 1.2 * engine.scheduler.n_steps
        assert got[0].stats.cached_tokens >= 400
