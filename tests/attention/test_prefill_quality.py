"""What a table says of prompts: whether that is harmless, and what follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeh2o.attention.budget_points import Points
from edgeh2o.attention.budget_table import BudgetTable, parse_table, write_table
from edgeh2o.attention.head_budgets import (
    HeadBudgets,
    default_budget,
    find_budgets,
    known_points,
)
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.attention.prefill_quality import PrefillQuality
from edgeh2o.config import PrefillConfig, RuntimeConfig
from edgeh2o.engine.plan import RunPlan
from edgeh2o.errors import FormatError
from tests.budget_tables import harmless_table
from tests.engine.fakes import CONFIG

GOOD = PrefillQuality(
    budget=256,
    length=8192,
    loss={"prose": 0.3, "pairs": 0.6},
    loss_error={"prose": 0.1, "pairs": 0.1},
    kl={"prose": 4e-3, "pairs": 8e-3},
)


def _table(*prefill: PrefillQuality, budget: int = 256) -> BudgetTable:
    return replace(harmless_table(CONFIG, budget), prefill=prefill)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"kl": {"prose": 4.1e-3, "pairs": 0.0}}, False),
        ({"kl": {"prose": 0.0, "pairs": 8.1e-3}}, False),
        ({"loss": {"prose": 0.4, "pairs": 0.6}}, True),
        ({"loss": {"prose": 0.41, "pairs": 0.6}}, False),  # 0.5 in the mean
        ({"loss": {"prose": -2.0, "pairs": 0.7}}, True),
        ({"loss": {"prose": -2.0, "pairs": 0.71}}, False),  # more than its error explains
    ],
)
def test_what_is_harmless(changes: dict[str, Any], expected: bool) -> None:
    assert replace(GOOD, **changes).is_harmless is expected


def test_a_table_holds_it() -> None:
    longer = replace(GOOD, length=16384, budget=700)
    for prefill in ((GOOD,), (GOOD, longer), ()):
        table = _table(*prefill)
        assert parse_table(table.to_json(), "a table").prefill == prefill


@pytest.mark.parametrize(
    ("budget", "length", "table_length", "points"),
    [
        (256, 8192, 4096, ((4096, 256), (8192, 384))),
        (1024, 8192, 4096, ((4096, 1024), (8192, 1536))),  # the packaged one
        (256, 4096, 4096, ((4096, 256),)),
        (256, 4096, 2048, ((4096, 256),)),
        (256, 6000, 3000, ((4096, 256), (6000, 384))),
        (256, 16384, 8192, ((8192, 256), (16384, 384))),
    ],
)
def test_earlier_tables_have_one_of_all_lengths(
    budget: int, length: int, table_length: int, points: Points
) -> None:
    quality = replace(GOOD, budget=budget, length=length)
    data = json.loads(replace(_table(quality), length=table_length).to_json())
    (data["prefill"],) = data["prefill"]
    table = parse_table(json.dumps(data), "a table")
    assert tuple((each.length, each.budget) for each in table.prefill) == points
    assert all(each.loss == GOOD.loss and each.kl == GOOD.kl for each in table.prefill)
    assert table.shown == table.prefill
    assert known_points(table, budget) == points


def test_shown_is_what_lies_below_the_first_that_loses() -> None:
    bad, longest = replace(GOOD, length=16384, kl={"prose": 1.0}), replace(GOOD, length=32768)
    assert _table(GOOD, bad, longest).shown == (GOOD,)
    assert _table(bad, longest).shown == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"kl": {}},
        {"kl": {"prose": -1.0, "pairs": 0.0}},
        {"kl": {"prose": 0.0}},
        {"loss": {"prose": float("inf"), "pairs": 0.0}},
        {"loss": 3},
        {"loss_error": {"prose": float("nan"), "pairs": 0.0}},
        {"budget": None},
        {"budget": 0},
        {"length": -1},
        {"length": 10**12},
        {"length": 16384},  # no shorter than the next
        {"budget": 701},  # more keys than the next
    ],
)
def test_a_measurement_that_cannot_be(changes: dict[str, Any]) -> None:
    table = _table(GOOD, replace(GOOD, length=16384, budget=700))
    data = json.loads(table.to_json())
    assert parse_table(json.dumps(data), "a file").prefill == table.prefill
    data["prefill"][0].update(changes)
    with pytest.raises(FormatError, match="a file is not a usable budget table"):
        parse_table(json.dumps(data), "a file")


def test_the_default_budget_is_the_one_that_was_measured() -> None:
    table = replace(_table(GOOD, replace(GOOD, length=16384, budget=700)), losses={128: 0.4})
    assert default_budget(table) == 256
    assert default_budget(replace(table, prefill=())) == 128
    assert default_budget(replace(table, prefill=(replace(GOOD, kl={"prose": 1.0}),))) == 128
    assert default_budget(replace(table, losses={128: 0.9})) is None
    assert default_budget(replace(table, losses={})) == 1024


SHORT = replace(GOOD, length=4096)


@pytest.mark.parametrize(
    ("prefill", "n_tokens", "percent"),
    [
        ((SHORT, replace(GOOD, budget=384)), 4096, 4.5),
        ((SHORT, replace(GOOD, budget=384)), 8192, 4.5),
        ((SHORT, replace(GOOD, budget=384)), 9000, 1.0),  # longer than those that were measured
        ((SHORT, replace(GOOD, budget=600)), 6000, 4.5),
        ((SHORT, replace(GOOD, budget=600)), 8192, 4.5),
        ((SHORT, replace(GOOD, budget=600)), 9000, 1.0),
        ((SHORT,), 4096, 4.5),
        ((SHORT,), 8192, 1.0),
        ((replace(SHORT, budget=320),), 4096, 4.5),  # more than the mean losses ask for
        ((replace(GOOD, kl={"prose": 1.0, "pairs": 0.0}),), 4096, 1.0),
        ((), 4096, 1.0),
    ],
)
def test_the_guard_of_what_was_measured(
    tmp_path: Path, prefill: tuple[PrefillQuality, ...], n_tokens: int, percent: float
) -> None:
    path = tmp_path / "table.json"
    write_table(_table(*prefill), path)
    attention = HeadwiseConfig(budget_table=str(path))
    plan = RunPlan.of(CONFIG, attention, PrefillConfig(), RuntimeConfig()).for_length(n_tokens)
    assert plan.shape(64).error_limit == pytest.approx((percent / 100) ** 2)
    assert plan.attention.is_taught is (percent == 1.0)
    # A strict guard reads more than the budgets say, which is counted.
    keys = plan.settings.expected_keys(plan.attention, n_tokens, [True] * CONFIG.n_layers)
    again = replace(plan.attention, is_shown=not plan.attention.is_shown)
    other = plan.settings.expected_keys(again, n_tokens, [True] * CONFIG.n_layers)
    assert keys is not None and other is not None
    assert (keys > other) is (percent == 1.0)


def test_layers_with_windows_are_not_counted(tmp_path: Path) -> None:
    """They read the same anyhow, and a table leaves what they need to the others."""
    path = tmp_path / "table.json"
    heads, levels = CONFIG.n_layers * CONFIG.n_kv_heads, _table().levels
    errors = tuple(tuple((i == 0) / level for level in levels) for i in range(heads))
    write_table(replace(_table(), errors=errors), path)
    attention = HeadwiseConfig(budget_table=str(path))
    resolved = attention.resolved(CONFIG)
    assert resolved.budgets is not None and resolved.budgets[0] != resolved.budgets[-1]
    n_layers = CONFIG.n_layers
    first, last = (
        attention.expected_keys(resolved, 4096, [i == layer for i in range(n_layers)])
        for layer in (0, n_layers - 1)
    )
    both = attention.expected_keys(resolved, 4096, [True] * n_layers)
    assert first is not None and last is not None and both is not None
    assert first > both > last > 0
    assert attention.expected_keys(resolved, 4096, [False] * n_layers) is None


def test_a_measurement_of_query_heads_says_nothing_of_kv_heads() -> None:
    table = _table(GOOD)
    assert table.of_kv_heads().prefill == (GOOD,)  # it is of KV heads
    by_query_head = replace(table, n_heads=2 * CONFIG.n_kv_heads, errors=2 * table.errors)
    assert by_query_head.of_kv_heads().prefill == ()


@pytest.mark.parametrize(
    ("budget", "points", "is_shown"),
    [
        (256, ((4096, 256), (8192, 600)), True),
        # More than was measured: the longer prompts have at least what that grows to.
        (320, ((4096, 320), (8192, 600)), True),
        (512, ((4096, 512), (8192, 768)), True),
        (128, ((4096, 128),), False),
    ],
)
def test_other_budgets_than_the_measured_one(budget: int, points: Points, is_shown: bool) -> None:
    table = _table(SHORT, replace(GOOD, budget=600))
    assert known_points(table, budget) == points
    found = HeadBudgets(table.budgets(budget), budget, "file", table=table, points=points)
    for n_tokens in (100, 4096, 8192):
        mean = found.mean_for(n_tokens)
        assert mean is not None and found.is_shown(mean) is is_shown
    assert not found.is_shown(found.mean_for(9000) or 0)


def test_budgets_given_by_hand_are_of_no_measurement() -> None:
    found = find_budgets(
        CONFIG,
        budget=256,
        max_loss=None,
        budget_table=None,
        profile=replace(_table(GOOD), prompts=1),
    )
    assert not replace(found, table=None).is_shown(256)
