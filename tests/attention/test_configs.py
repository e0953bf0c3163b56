"""Settings of the attention algorithms: checks, clamping, registry."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest

from edgeh2o.attention import registry
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.attention.registry import (
    find_sparse_attention,
    register_sparse_attention,
    sparse_attention_algorithms,
)
from edgeh2o.errors import UsageError


@dataclass(frozen=True)
class Model:
    n_layers: int = 2
    n_kv_heads: int = 3
    n_slots: int = 6


@pytest.mark.parametrize("value", [-1, 1.5, "256", True, None, 2**31])
@pytest.mark.parametrize("name", ["local", "heavy"])
def test_budgets_must_be_counts(name: str, value: object) -> None:
    message = rf"{name} \(--h2o-{name}\) must be an integer (>= 0|from 0 to)"
    with pytest.raises(UsageError, match=message):
        H2OConfig(**{name: value})


@pytest.mark.parametrize(
    ("local", "heavy", "chunk_size", "expected"),
    [
        (256, 256, 512, (255, 256)),
        (300, 900, 512, (127, 384)),
        (64, 0, 16, (15, 0)),
        (0, 64, 16, (0, 15)),
        (1, 1, 2, (0, 1)),
        (5, 5, 1, (0, 0)),
    ],
)
def test_budgets_are_clamped_below_the_chunk(
    local: int, heavy: int, chunk_size: int, expected: tuple[int, int]
) -> None:
    with pytest.warns(UserWarning, match=f"must stay below the chunk size {chunk_size}"):
        clamped = H2OConfig(local=local, heavy=heavy).clamped(chunk_size)
    assert (clamped.local, clamped.heavy) == expected


@pytest.mark.parametrize(
    "config",
    [H2OConfig(), H2OConfig(local=0, heavy=1023), H2OConfig(local=0, heavy=0), DenseConfig()],
)
def test_budgets_that_fit_stay(config: SparseAttentionConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.clamped(1024) is config


@pytest.mark.parametrize(
    ("config", "description"),
    [
        (H2OConfig(local=8, heavy=4), "h2o, local 8, heavy 4, sinks 0, score sum"),
        (H2OConfig(local=0, heavy=0), "dense"),
        (DenseConfig(), "dense"),
    ],
)
def test_policies(config: SparseAttentionConfig, description: str) -> None:
    first, second = config.make_policy(Model()), config.make_policy(Model())
    assert repr(first) == f"<SparsePolicy: {description}>"
    assert first is not second


def test_algorithms_are_found_by_name() -> None:
    algorithms = sparse_attention_algorithms()
    assert algorithms["dense"] is DenseConfig and algorithms["h2o"] is H2OConfig
    assert find_sparse_attention("h2o") is H2OConfig
    assert H2OConfig().algorithm == "h2o"
    with pytest.raises(UsageError, match="'topk' is not known; use one of dense, h2o"):
        find_sparse_attention("topk")


def test_a_name_is_taken_once() -> None:
    assert register_sparse_attention("dense")(DenseConfig) is DenseConfig
    with pytest.raises(ValueError, match="two sparse attention algorithms are named 'dense'"):
        register_sparse_attention("dense")(H2OConfig)


def test_the_order_does_not_depend_on_what_was_imported_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order is shown by --help and docs/."""
    backwards = dict(reversed(sparse_attention_algorithms().items()))
    monkeypatch.setattr(registry, "_ALGORITHMS", backwards)
    assert list(sparse_attention_algorithms())[:3] == ["dense", "h2o", "headwise"]
