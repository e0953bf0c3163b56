"""The guard of the sparse attention on the host device: the CPU's errors and decisions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edgeh2o import LLM, PrefillConfig, SamplingParams, _core
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model
from tests.cuda.host_library import SMALL
from tests.cuda.models.greedy import LOGIT_TOLERANCE
from tests.model.model_pair import (
    CHUNK_SIZE,
    HEAVY,
    LOCAL,
    decisive_prompt,
    load_pair,
    prefill,
    relative_error,
)
from tests.tiny_models import TinyModelFactory

pytestmark = pytest.mark.usefixtures("host_device")
N_LAYERS = 2
N_KV_HEADS = int(SMALL["n_kv_heads"])
MODEL = {**SMALL, "n_layers": N_LAYERS}


def test_layers_are_read_again_of_which_the_cpu_reads_sets_again(
    tiny_model: TinyModelFactory,
) -> None:
    """None of them, or both; generated tokens go on from either."""
    pair = load_pair(tiny_model, **MODEL)
    with open_model(tiny_model(**MODEL), open_device(0)) as file:
        on_device = file.load()._core_model
    tokens = decisive_prompt(pair, CHUNK_SIZE + 40)
    sizes: dict[str, Any] = {"max_context": 128, "chunk_size": CHUNK_SIZE, "batch_size": 128}

    def run(limit: float) -> tuple[Any, Any]:
        """Sessions of the CPU and of the device, which have read the prompt and a token."""
        sessions, rows = [], []
        for make, model in ((_core.Sequence, pair.core), (_core.DeviceSequence, on_device)):
            policy = _core.h2o_policy(LOCAL, HEAVY, tail=12)
            session = make(
                model, policy, all_rows=True, checked_rows=10, error_limit=limit, **sizes
            )
            logits = prefill(session, tokens)
            rows.append(np.concatenate((logits, np.array(session.decode(9)).reshape(1, -1))))
            sessions.append(session)
        cpu, device = sessions
        assert device.pairs_dense == cpu.pairs_dense
        if limit in (0, math.inf):  # else the CPU reads some of a layer's sets again
            assert relative_error(rows[1], rows[0]) < LOGIT_TOLERANCE
            np.testing.assert_allclose(device.error_sums, cpu.error_sums, rtol=2e-3)
            assert device.n_dense_reads == cpu.n_dense_reads
            assert device.pairs_computed == cpu.pairs_computed
        return cpu, device

    _, sparse = run(math.inf)
    assert sparse.n_dense_reads == 0
    errors = sparse.error_sums[:, 0] / sparse.error_sums[:, 1]
    assert errors.min() > 1e-3
    assert errors[0] > errors[1]
    assert run(1.01 * errors[0])[1].n_dense_reads == 0
    # The first layer is read again, and then the second, whose rows are others.
    cpu, device = run(0.99 * errors[0])
    assert 0 < cpu.n_dense_reads < device.n_dense_reads == N_LAYERS * N_KV_HEADS
    assert device.error_sums[0, 0] == 0 < cpu.error_sums[0, 0] < sparse.error_sums[0, 0]
    assert run(0)[1].n_dense_reads == N_LAYERS * N_KV_HEADS


def test_statistics_tell_of_it(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**SMALL)
    text = "the cat was on the mat and the dog is in the house that he has built " * 2
    once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    found = []
    for device in ("cpu", "cuda"):
        chunks = PrefillConfig(batch_size=64, chunk_size=16, max_error=0)
        rule = H2OConfig(local=4, heavy=4)
        with LLM(path, device=device, prefill=chunks, attention=rule, context_size=256) as llm:
            stats = llm.generate(text, once).stats
        found.append((stats.attention_error, stats.heads_read_densely))
    assert found[0] == found[1]
    assert found[0][0] == 0
    assert found[0][1] > 0
