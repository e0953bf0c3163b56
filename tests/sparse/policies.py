"""Every built-in sparse policy with its oracle: a new algorithm is tested by one more row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from edgeh2o import _core
from tests.reference.dense import DenseLayer
from tests.reference.h2o import H2OLayer
from tests.reference.headwise import HeadwiseLayer
from tests.reference.quest import QuestLayer
from tests.reference.remembered import RememberedLayer
from tests.reference.rocketkv import RocketKvLayer
from tests.reference.ruvllm import RuvllmLayer
from tests.reference.softmax_state import Array


class Oracle(Protocol):
    def prefill(self, q: Array, k: Array, v: Array, *, is_last: bool = False) -> Array: ...

    def decode(self, q: Array, k: Array, v: Array) -> Array: ...


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """A policy and its oracle, for layers of as many KV heads as there are budgets.

    Attributes:
        name: shown in the test id.
        make_policy_for: the compiled policy, of a number of layers.
        make_layer: the oracle of a chunk size.
        budgets: positions of a full memory set, per KV head; None for the whole past.
        has_landmarks: a chunk reads more than itself and the memory set.
        max_past: where the past of a head without a budget begins to be cut.
        decodes_all: generated tokens read everything.
    """

    name: str
    make_policy_for: Callable[[int], _core.SparsePolicy]
    make_layer: Callable[[int], Oracle]
    budgets: tuple[int | None, ...]
    has_landmarks: bool = False
    max_past: int = 10**9
    decodes_all: bool = True

    def make_policy(self, n_layers: int = 1) -> _core.SparsePolicy:
        return self.make_policy_for(n_layers)

    def make_oracle(self, chunk_size: int) -> Oracle:
        """The oracle, which remembers what it answered in other tests."""
        return RememberedLayer((self.name, chunk_size), lambda: self.make_layer(chunk_size))

    def __str__(self) -> str:
        return self.name


def h2o_case(local: int, heavy: int, **options: Any) -> PolicyCase:
    budget = local + heavy + options.get("sinks", 0)
    return PolicyCase(
        "-".join(["h2o", str(local), str(heavy), *(f"{k}={v}" for k, v in options.items())]),
        lambda _: _core.h2o_policy(local, heavy, **options),
        lambda chunk_size: H2OLayer(chunk_size=chunk_size, local=local, heavy=heavy, **options),
        (budget, budget),
    )


def headwise_case(*budgets: int | None, **options: Any) -> PolicyCase:
    """options: local, sinks, decay, page_size, spread, max_past, decode_from, decode_budgets."""
    return PolicyCase(
        "-".join(["headwise", *map(str, budgets), *(f"{k}={v}" for k, v in options.items())]),
        lambda n_layers: _core.headwise_policy(
            list(budgets) * n_layers,
            **options | {k: list(v) * n_layers for k, v in options.items() if isinstance(v, tuple)},
        ),
        lambda chunk_size: HeadwiseLayer(chunk_size=chunk_size, budgets=budgets, **options),
        budgets,
        has_landmarks=options.get("page_size") != 0,
        max_past=options.get("max_past", 10**9),
        decodes_all="decode_from" not in options,
    )


def quest_case(tokens: int, page_size: int) -> PolicyCase:
    return PolicyCase(
        f"quest-{tokens}-{page_size}",
        lambda _: _core.quest_policy(tokens=tokens, page_size=page_size, dense_layers=0),
        lambda _: QuestLayer(tokens=tokens, page_size=page_size),
        (None, None),
        decodes_all=False,
    )


def rocketkv_case(**options: int) -> PolicyCase:
    return PolicyCase(
        "-".join(["rocketkv", *(f"{k}={v}" for k, v in options.items())]),
        lambda _: _core.rocketkv_policy(**options),
        lambda chunk_size: RocketKvLayer(chunk_size=chunk_size, **options),
        (None, None),
        decodes_all=False,
    )


def ruvllm_case(**options: Any) -> PolicyCase:
    return PolicyCase(
        "-".join(["ruvllm", *(f"{k}={v}" for k, v in options.items())]),
        lambda _: _core.ruvllm_policy(**options),
        lambda chunk_size: RuvllmLayer(chunk_size=chunk_size, **options),
        (None, None),
        has_landmarks=True,
        max_past=0,
        decodes_all=False,
    )


DENSE = PolicyCase(
    "dense", lambda _: _core.dense_policy(), lambda _: DenseLayer(), budgets=(None, None)
)
H2O_OPTIONS = [
    h2o_case(8, 12, sinks=3, score="mean", decay=0.9),
    h2o_case(8, 12, score="lift", by_values=True),
    h2o_case(4, 16, score="window", window=20),
]
HEADWISE = [
    headwise_case(24, None, local=8, sinks=3, page_size=16),
    headwise_case(1, 100, local=20, page_size=10),
    headwise_case(7, 40, local=4, sinks=0, decay=1.0, page_size=0),
    headwise_case(24, None, local=8, sinks=3, page_size=16, spread=0.4),
    headwise_case(7, 40, local=4, page_size=8, max_past=24, spread=1.0),
    headwise_case(24, None, local=8, sinks=3, page_size=32, max_past=70),
    headwise_case(24, None, local=8, sinks=3, page_size=16, decode_from=64),
    headwise_case(24, None, local=8, sinks=3, page_size=16, decode_from=64, decode_budgets=(9, 20)),
]
PAGED = [
    quest_case(20, 2),
    quest_case(30, 3),
    rocketkv_case(prompt_budget=90, window=8, kernel=5, page_size=1, topk=20, topr=16),
    rocketkv_case(prompt_budget=150, window=20, kernel=63, page_size=2, topk=7),
    rocketkv_case(prompt_budget=40, window=1, kernel=1, topk=3),
]
RUVLLM = [
    ruvllm_case(window=20, block_size=8, globals=3),
    ruvllm_case(window=9, block_size=1, strides=False),
    ruvllm_case(window=0, block_size=7, globals=0, landmarks=False),
]
POLICIES = [
    DENSE,
    h2o_case(16, 16),
    h2o_case(0, 20),
    h2o_case(20, 0),
    h2o_case(100, 70),
    *H2O_OPTIONS,
    *HEADWISE,
    *PAGED,
    *RUVLLM,
]
