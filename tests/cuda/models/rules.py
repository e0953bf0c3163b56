"""A sparse rule on the host device beside the same on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeh2o import _core
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model
from tests.cuda.host_library import SMALL
from tests.cuda.models.greedy import LOGIT_TOLERANCE
from tests.model.model_pair import (
    CHUNK_SIZE,
    MAX_CONTEXT,
    load_pair,
    prefill,
    relative_error,
    split,
)
from tests.tiny_models import TinyModelFactory


def check_rule(
    tiny_model: TinyModelFactory,
    make_policy: Callable[[], _core.SparsePolicy],
    tokens: NDArray[np.int32],
    lengths: list[int],
    model_options: Mapping[str, object] = SMALL,
    chunk_size: int = CHUNK_SIZE,
) -> None:
    """A prompt in calls of these lengths, then three tokens: positions, pairs and logits."""
    with open_model(tiny_model(**model_options), open_device(0)) as file:
        on_device = file.load()._core_model
        layers = enumerate(file.config.layers)
        slots = [
            (i, head)
            for i, layer in layers
            if "attention" in layer.mixer
            for head in range(layer.n_kv_heads)
        ]
    on_cpu = load_pair(tiny_model, **model_options).core
    sizes = {"max_context": MAX_CONTEXT, "chunk_size": chunk_size, "all_rows": True}
    results = []
    for make, model in ((_core.Sequence, on_cpu), (_core.DeviceSequence, on_device)):
        policy = make_policy()
        batch_size = MAX_CONTEXT // chunk_size * chunk_size
        session = make(model, policy, batch_size=batch_size, **sizes)
        rows = prefill(session, *split(tokens, lengths))
        decoded = [np.array(session.decode(int(token))) for token in tokens[:3]]
        chosen = [policy.memory_set(*slot) for slot in slots]
        results.append((np.concatenate((rows, np.stack(decoded))), chosen, session))
    for ours, theirs in zip(results[1][1], results[0][1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert relative_error(results[1][0], results[0][0]) < LOGIT_TOLERANCE
    assert results[1][2].pairs_computed == results[0][2].pairs_computed
    assert results[1][2].pairs_dense == results[0][2].pairs_dense


class Loudest:
    """Positions with large keys, seen from the chunk's first query; a mean row for the others."""

    def _choose(self, chunk: tuple[int, int], queries: Any, keys: Any) -> NDArray[np.intp]:
        assert queries.shape[::2] == (chunk[1] - chunk[0], keys.shape[1])
        seen = np.abs(keys.astype(np.float32) @ queries[0, 0])
        return np.sort(np.argsort(-seen, kind="stable")[:20])

    def select_memory(
        self, layer: int, kv_head: int, chunk: tuple[int, int], q: Any, k: Any, v: Any
    ) -> tuple[Any, ...]:
        rows = (part.mean(0, dtype=np.float32, keepdims=True) for part in (k, v))
        return (self._choose(chunk, q, k), *rows, np.array([np.log(chunk[0])], np.float32))

    def select_decode(
        self, layer: int, kv_head: int, chunk: tuple[int, int], q: Any, k: Any, v: Any
    ) -> NDArray[np.intp]:
        return self._choose(chunk, q, k)
