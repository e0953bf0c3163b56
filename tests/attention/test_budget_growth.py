"""Budgets of a table grow with the prompt; those that somebody has said do not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o import DenseConfig, H2OConfig
from edgeh2o.attention.budget_points import SHOWN_LENGTH, Points, budget_of_length
from edgeh2o.attention.budget_table import write_table
from edgeh2o.attention.decode_quality import DecodeQuality
from edgeh2o.attention.head_budgets import (
    DEFAULT_BUDGET,
    PROFILE_LENGTH,
    PROFILE_POINTS,
    TOO_LOSSY,
    grow_budgets,
    grow_limits,
)
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.errors import UsageError
from tests.attention.examples import SMOLLM2, TABLE, Model

LENGTHS = st.integers(0, 2**20)
DEFAULT_POINTS = ((SHOWN_LENGTH, DEFAULT_BUDGET),)
SMOLLM2_MODEL = Model(n_layers=30, n_kv_heads=3, n_heads=9, fingerprint=SMOLLM2)


@pytest.fixture(autouse=True)
def _nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path / "cache"))


def budget_at(config: HeadwiseConfig, n_tokens: int, model: Model = SMOLLM2_MODEL) -> int | None:
    return config.budget_for(config.resolved(model), n_tokens)


@pytest.mark.parametrize(
    ("n_tokens", "budget"),
    [
        *((0, 1024), (100, 1024), (4096, 1024), (4097, 1088), (6000, 1344), (8192, 1536)),
        *((12288, 1984), (16384, 2304), (32768, 3456)),
    ],
)
def test_half_as_many_keys_again_for_every_doubling(n_tokens: int, budget: int) -> None:
    assert budget_of_length(DEFAULT_POINTS, n_tokens) == budget


def test_a_profile_has_what_the_default_comes_to() -> None:
    for n_tokens in range(PROFILE_LENGTH, 8 * PROFILE_LENGTH, 777):
        grown = budget_of_length(PROFILE_POINTS, n_tokens)
        assert grown == budget_of_length(DEFAULT_POINTS, n_tokens)


def test_no_more_keys_than_the_prompt_has() -> None:
    assert budget_of_length(((SHOWN_LENGTH, 4096),), 4100) == 4100
    assert budget_of_length(((SHOWN_LENGTH, 5000),), 4100) == 5000  # the table's own


@given(budget=st.integers(1, 8192), n_tokens=LENGTHS, shown=st.integers(1, 2**16))
def test_of_one_length_alone(budget: int, n_tokens: int, shown: int) -> None:
    grown = budget_of_length(((shown, budget),), n_tokens)
    shown = max(shown, SHOWN_LENGTH)
    if n_tokens <= shown:
        assert grown == budget
    exact = budget * 1.5 ** math.log2(max(1.0, n_tokens / shown))
    assert grown in (budget, n_tokens) or (grown % 64 == 0 and -0.001 <= grown - exact < 64)


POINTS = st.lists(
    st.tuples(st.integers(1, 2**18), st.integers(1, 2**16)),
    min_size=1,
    max_size=4,
    unique_by=lambda point: point[0],
).map(lambda points: tuple(zip(*map(sorted, zip(*points, strict=True)), strict=True)))


@given(points=POINTS, first=LENGTHS, second=LENGTHS)
def test_longer_prompts_get_no_fewer_keys(points: Points, first: int, second: int) -> None:
    short, long = sorted((first, second))
    few, many = (budget_of_length(points, n) for n in (short, long))
    assert points[0][1] <= few <= many <= max(points[-1][1], long)


@given(points=POINTS)
def test_prompts_of_known_lengths_get_what_is_known(points: Points) -> None:
    for length, keys in points:
        assert budget_of_length(points, length) == keys


@given(points=POINTS, share=st.floats(0, 1))
def test_every_doubling_between_two_lengths_counts_the_same(points: Points, share: float) -> None:
    for (start, least), (end, most) in pairwise(points):
        n_tokens = round(start * (end / start) ** share)
        part = math.log(n_tokens / start) / math.log(end / start)
        exact = least * (most / least) ** part
        assert -0.001 <= budget_of_length(points, n_tokens) - exact < 64


@given(n_tokens=LENGTHS)
def test_a_point_on_the_way_changes_nothing(n_tokens: int) -> None:
    """So tables that say what two lengths need are read as one that says the growth of both."""
    assert budget_of_length(
        ((4096, 1024), (8192, 1536), (16384, 2304)), n_tokens
    ) == budget_of_length(DEFAULT_POINTS, n_tokens)


def test_budgets_of_the_packaged_table_grow() -> None:
    config = HeadwiseConfig()
    resolved = config.resolved(SMOLLM2_MODEL)
    lengths = (0, 4096, 6000, 8192, 16384)
    assert [budget_at(config, n) for n in lengths] == [1024, 1024, 1344, 1536, 2304]
    larger = config.with_budget(resolved, SMOLLM2_MODEL, 1536)
    assert resolved.found is not None and resolved.found.table is not None
    assert larger.budgets == grow_budgets(resolved.found.table, 1024, 1536)
    asked_for = HeadwiseConfig(budget=1536).resolved(SMOLLM2_MODEL)
    others = {"budgets": larger.budgets, "decode_budgets": larger.decode_budgets}
    assert larger == replace(asked_for, **others)
    assert larger.report(SMOLLM2_MODEL)["budget"] == 1536
    # Generated tokens go by no fewer keys than were measured.
    assert larger.decode_attention == resolved.decode_attention == "headwise"
    # From any of them to any other.
    assert config.with_budget(larger, SMOLLM2_MODEL, 1024) == resolved


BUDGETS = st.lists(st.none() | st.integers(1, 4096), min_size=1).map(tuple)


@given(budgets=BUDGETS, factor=st.floats(0.5, 64))
def test_every_limit_grows_as_the_mean_does(budgets: tuple[int | None, ...], factor: float) -> None:
    grown = grow_limits(budgets, factor)
    for before, now in zip(budgets, grown, strict=True):
        assert (before is None) == (now is None)
        if before is not None and now is not None:
            assert before * max(1.0, factor) <= now < before * max(1.0, factor) + 16
            assert factor <= 1 or now % 16 == 0


@given(factor=st.floats(0.5, 32), mean=st.integers(4, 40))
def test_a_few_more_heads_have_none(factor: float, mean: int) -> None:
    grown = max(1, round(mean * factor))
    kept = max(1.0, grown / mean) ** 0.3
    expected = grow_limits(TABLE.budgets(mean * kept), grown / mean)
    assert grow_budgets(TABLE, mean, grown) == expected
    assert grow_budgets(TABLE, mean, mean) == TABLE.budgets(mean)


def test_most_heads_of_long_prompts_still_have_limits() -> None:
    """By the table's budgets of that mean most would have none."""
    config = HeadwiseConfig()
    resolved = config.resolved(SMOLLM2_MODEL)
    assert resolved.found is not None and resolved.found.table is not None
    larger = config.with_budget(resolved, SMOLLM2_MODEL, budget_at(config, 32768) or 0)
    assert resolved.budgets is not None and larger.budgets is not None
    before, now = (budgets.count(None) for budgets in (resolved.budgets, larger.budgets))
    assert before < now < len(larger.budgets) / 2
    assert resolved.found.table.budgets(3456).count(None) > 3 / 4 * len(larger.budgets)
    limits = [budget for budget in larger.budgets if budget is not None]
    assert max(limits) == 3456  # 1,024 of the table, as its mean


def test_what_was_asked_for_stays(tmp_path: Path) -> None:
    write_table(TABLE, tmp_path / "table.json")
    table = str(tmp_path / "table.json")
    model = Model()
    fixed = [
        HeadwiseConfig(budget=10, budget_table=table),
        HeadwiseConfig(budgets=(4, None, 6)),
        HeadwiseConfig(budget=10),  # uniform
        HeadwiseConfig(),  # nothing is known
    ]
    for config in fixed:
        assert budget_at(config, 10**6, model) is None
    for other in (DenseConfig(), H2OConfig()):
        assert other.budget_for(other, 10**6) is None


def test_a_loss_that_is_asked_for_is_one_of_the_length_that_was_measured(tmp_path: Path) -> None:
    """And so is the default of a table that says what it was made of."""
    path = tmp_path / "table.json"
    write_table(replace(TABLE, losses={512: 0.4, 768: 0.1}, texts=("a",), length=8192), path)
    table = str(path)
    configs = {512: HeadwiseConfig(budget_table=table)}
    configs[768] = HeadwiseConfig(budget_table=table, max_loss=0.2)
    for own, config in configs.items():
        budgets = [budget_at(config, n, Model()) for n in (4096, 8192, 16384)]
        assert budgets == [own, own, own * 3 // 2]
    write_table(replace(TABLE, losses={512: 0.4}, texts=("a",), length=100), path)
    assert budget_at(configs[512], SHOWN_LENGTH, Model()) == 512
    write_table(replace(TABLE, losses={512: 0.9}, texts=("a",)), path)
    assert configs[512].resolved(Model()).source == TOO_LOSSY
    assert budget_at(configs[512], 10**6, Model()) is None


def test_a_profile_grows_beyond_its_length(tmp_path: Path) -> None:
    config = HeadwiseConfig(profile=replace(TABLE, prompts=1))
    resolved = config.resolved(Model())
    budgets = [config.budget_for(resolved, n) for n in (8192, 16384)]
    assert budgets == [1536, 2304]
    larger = config.with_budget(resolved, Model(), 2304)
    assert larger.report(Model())["table"] == "profile (1 prompt)"
    assert (larger.is_taught, larger.profiled_prompts) == (True, 1)


def test_generated_tokens_have_as_many_keys_as_were_measured(tmp_path: Path) -> None:
    """Whatever the prompt has, unless it has more or they are asked for."""
    quality = DecodeQuality(budget=20, length=8192, kl={"prose": 0.0})
    path = tmp_path / "table.json"
    table = replace(TABLE, losses={16: 0.4}, texts=("a",), decode=quality)
    write_table(table, path)
    for budget in (None, 12, 20, 60):
        config = HeadwiseConfig(budget_table=str(path), budget=budget)
        resolved = config.resolved(Model())
        assert resolved.decode_attention == "headwise"
        assert resolved.budgets == table.budgets(budget or 16)
        assert resolved.decode_budgets == table.budgets(max(budget or 16, 20))
    asked = HeadwiseConfig(budget_table=str(path), budget=12, decode_attention="headwise")
    assert asked.resolved(Model()).decode_budgets == table.budgets(12)


def test_generated_tokens_have_the_heads_that_were_measured(tmp_path: Path) -> None:
    """Whatever the prompt and its keys, unless they are asked for."""
    n_heads = TABLE.n_layers * TABLE.n_kv_heads
    heads = (None, *range(30, 29 + n_heads))
    quality = DecodeQuality(budget=30, length=8192, kl={"prose": 0.0}, heads=heads)
    path = tmp_path / "table.json"
    write_table(replace(TABLE, losses={16: 0.4}, texts=("a",), decode=quality), path)
    for budget in (None, 12, 60):
        config = HeadwiseConfig(budget_table=str(path), budget=budget)
        resolved = config.resolved(Model())
        assert resolved.decode_budgets == heads
    config = HeadwiseConfig(budget_table=str(path))
    assert config.with_budget(config.resolved(Model()), Model(), 60).decode_budgets == heads
    asked = replace(config, decode_attention="headwise")
    assert asked.resolved(Model()).decode_budgets == TABLE.budgets(16)
    lost = replace(quality, kl={"prose": 1.0})
    write_table(replace(TABLE, losses={16: 0.4}, texts=("a",), decode=lost), path)
    assert config.resolved(Model()).decode_budgets is None


def test_generated_tokens_have_limits_that_grow_with_the_prompt() -> None:
    config = HeadwiseConfig()
    resolved = config.resolved(SMOLLM2_MODEL)
    assert resolved.found is not None and resolved.found.table is not None
    measured = resolved.found.table.decode
    assert measured is not None and measured.is_harmless and measured.budget > 1024
    assert resolved.decode_budgets == resolved.found.table.of_kv_heads().budgets(measured.budget)
    larger = config.with_budget(resolved, SMOLLM2_MODEL, 1536)
    assert larger.decode_budgets == grow_limits(resolved.decode_budgets, 1536 / measured.budget)
    # A prompt that is longer, but has no more keys than were measured.
    shorter = config.with_budget(resolved, SMOLLM2_MODEL, measured.budget - 64)
    assert shorter.decode_budgets == resolved.decode_budgets
    dense = replace(config, decode_attention="dense")
    assert dense.with_budget(resolved, SMOLLM2_MODEL, 1536).decode_budgets is None
    # Those do not depend on how the prompt is read.
    assert larger.reading_all(saves_time=True).decode_budgets == larger.decode_budgets
    unknown = larger.reading_all()
    assert (unknown.decode_attention, unknown.decode_budgets) == ("dense", None)


def test_decode_was_measured_with_more_keys_than_a_short_prompt_gets(tmp_path: Path) -> None:
    decodes = []
    for measured in (40, 50):
        quality = DecodeQuality(budget=measured, length=8192, kl={"prose": 0.0})
        path = tmp_path / f"{measured}.json"
        write_table(replace(TABLE, losses={40: 0.4}, texts=("a",), decode=quality), path)
        config = HeadwiseConfig(budget_table=str(path))
        larger = config.with_budget(config.resolved(Model()), Model(), 60)
        decodes.append(larger.decode_budgets)
    assert decodes == [grow_limits(TABLE.budgets(40), 1.5), grow_limits(TABLE.budgets(50), 1.2)]


def test_a_session_holds_them() -> None:
    config = HeadwiseConfig()
    larger = config.with_budget(config.resolved(SMOLLM2_MODEL), SMOLLM2_MODEL, 1536)
    saved = json.loads(json.dumps(larger.to_dict()))
    assert config.holding(saved).decode_budgets == larger.decode_budgets
    assert config.holding(saved).resolved(SMOLLM2_MODEL).decode_budgets == larger.decode_budgets
    decode = saved.pop("decode")
    dense = config.holding(saved)
    assert (dense.budgets, dense.decode_attention) == (larger.budgets, "dense")
    for bad in ([0] * 90, ["1"] * 90, 5, {}):
        assert config.holding(saved | {"decode": decode | {"budgets": bad}}) is config
    assert config.holding(saved | {"decode": 5}).decode_budgets is None
    few = config.holding(saved | {"decode": decode | {"budgets": [1]}})
    assert not few.fits(SMOLLM2_MODEL)


def test_decode_budgets_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="decode_budgets need budgets"):
        HeadwiseConfig(decode_budgets=(None, 5, 7))
    with pytest.raises(UsageError, match="decode_budgets must be positive integers"):
        HeadwiseConfig(budgets=(5,), decode_budgets=(None, 0, 7))


def test_what_was_looked_up_is_no_setting() -> None:
    """Neither in files nor in comparisons nor in what is shown."""
    config = HeadwiseConfig()
    resolved = config.resolved(SMOLLM2_MODEL)
    assert resolved.found is not None
    assert "found" not in resolved.to_dict()
    assert json.loads(json.dumps(resolved.to_dict()))["budget"] == 1024
    assert replace(resolved, found=None) == resolved
    assert "found" not in repr(resolved)


def test_descriptions_name_the_budget() -> None:
    config = HeadwiseConfig()
    larger = config.with_budget(config.resolved(SMOLLM2_MODEL), SMOLLM2_MODEL, 1536)
    assert config.naming_budget(larger).describe() == "headwise budget 1536"
    asked_for = HeadwiseConfig(budget=700)
    assert asked_for.naming_budget(asked_for.resolved(SMOLLM2_MODEL)) == asked_for
    unknown = config.resolved(Model())
    assert config.naming_budget(unknown).describe() == "headwise"
