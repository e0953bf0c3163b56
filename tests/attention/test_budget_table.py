"""Budget tables: the greedy choice, the file format, and where tables are found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeh2o.attention.budget_table import (
    Budget,
    BudgetTable,
    find_table,
    parse_table,
    read_table,
    table_path,
    write_table,
)
from edgeh2o.attention.decode_quality import DecodeQuality
from edgeh2o.attention.rounding_quality import RoundingQuality
from edgeh2o.errors import FormatError, ResourceError
from tests.attention.examples import LEVELS, TABLE, make_table


def cost(table: BudgetTable, budgets: tuple[Budget, ...]) -> float:
    return sum(table.mean_past if budget is None else budget for budget in budgets)


def total_error(table: BudgetTable, budgets: tuple[Budget, ...]) -> float:
    return sum(
        0.0 if budget is None else row[table.levels.index(budget)]
        for row, budget in zip(table.errors, budgets, strict=True)
    )


def test_keys_go_where_they_remove_most_error() -> None:
    """By hand: room 3 * 26 - 12 = 66 keys. 9.0 -> 0 costs 60, the 6 left give 1.0 -> 0.5 for 4."""
    assert TABLE.budgets(26) == (8, 4, None)
    assert TABLE.budgets(4) == TABLE.budgets(1) == (4, 4, 4)
    assert TABLE.budgets(1000) == (None, 16, None)  # the second head has no error left at 16


def test_more_keys_than_the_past_are_never_given() -> None:
    table = make_table([[1.0, 0.5, 0.25]], mean_past=16.0)
    assert table.budgets(16) == (None,)  # as dear as 16 keys, and without error


curves = st.lists(
    st.lists(st.floats(0, 1), min_size=3, max_size=3).map(lambda row: sorted(row, reverse=True)),
    min_size=1,
    max_size=4,
)


@given(errors=curves, mean=st.floats(4, 70))
@settings(max_examples=60, deadline=None)
def test_budgets_keep_the_mean_and_are_nearly_the_best(
    errors: list[list[float]], mean: float
) -> None:
    table = make_table(errors)
    budgets = table.budgets(mean)
    room = mean * len(errors)
    assert cost(table, budgets) <= room + 1e-9
    choices = [*product((*LEVELS, None), repeat=len(errors))]
    best = min(total_error(table, c) for c in choices if cost(table, c) <= room + 1e-9)
    # A greedy fill of a knapsack misses at most what its last step would have brought.
    largest_step = max(row[0] for row in errors)
    assert best - 1e-9 <= total_error(table, budgets) <= best + largest_step + 1e-9


def test_an_error_that_grows_with_the_budget_is_noise() -> None:
    table = make_table([[0.5, 0.6, 0.4]])
    assert table.budgets(8) == (4,)
    assert table.budgets(16) == (16,)


@pytest.mark.parametrize(
    ("loss", "budget"), [(5.0, 8), (2.0, 8), (1.0, 16), (0.1, 32), (0.05, None)]
)
def test_the_smallest_budget_below_a_loss(loss: float, budget: int | None) -> None:
    assert TABLE.smallest_budget(loss) == budget


def test_a_budget_below_which_a_larger_one_fails_is_not_taken() -> None:
    assert replace(TABLE, losses={8: 0.1, 16: 0.9, 32: 0.1}).smallest_budget(0.5) == 32


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "table.json"
    decode = DecodeQuality(budget=8, length=4096, kl={"prose": 0.001, "pairs": 0.0})
    rounding = RoundingQuality(length=4096, kl={"prose": 0.0004}, loss=-0.02)
    by_head = replace(decode, heads=(None, 8, 16))
    decodes = (decode, by_head)
    for table in (*(replace(TABLE, decode=d, rounding=rounding) for d in decodes), TABLE):
        write_table(table, path)
        assert read_table(path) == table
    assert [item.name for item in path.parent.iterdir()] == ["table.json"]


DECODE = {"budget": 8, "length": 9, "kl": {"code": 0}}


def changed(**values: object) -> str:
    return json.dumps(json.loads(TABLE.to_json()) | values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a budget table"),
        ("[" * 100000, "not a budget table"),
        ("[]", "JSON object"),
        ("{}", "'format' is missing"),
        (changed(format=2), "format is 2, this version reads 1; update edgeh2o, or make it again"),
        (changed(format=0), "format is 0, this version reads 1; make it again"),
        (changed(levels=[8, 4, 16]), "levels must be positive and ascend"),
        (changed(levels=[]), "levels"),
        (changed(levels=[0, 8, 16]), "levels"),
        (changed(levels="abc"), "invalid literal"),
        (changed(mean_past=3), "mean_past"),
        (changed(mean_past=math.inf), "mean_past"),
        (changed(n_layers=4), "3 rows of errors do not fit"),
        (changed(errors=[[1, 2], [1, 2], [1, 2]]), "one entry per level"),
        (changed(errors=[[1, 2, -1]] * 3), "finite and not negative"),
        (changed(errors=[[1, 2, math.nan]] * 3), "finite and not negative"),
        (changed(errors=None), "not a usable budget table"),
        (changed(losses={"8": math.inf}), "losses must be finite"),
        (changed(losses=[1]), "not a usable budget table"),
        (changed(length=math.inf), "not a usable budget table"),
        (changed(decode=[1]), "decode is no object"),
        (changed(decode={"budget": 8, "length": 9, "kl": {}}), "decode is no object"),
        (changed(decode={"length": 9, "kl": {"code": 1}}), "'budget' is missing"),
        (changed(decode={"budget": 8, "length": 9, "kl": {"code": -1}}), "divergences must be"),
        (changed(decode={"budget": 8, "length": 9, "kl": {"code": math.nan}}), "divergences must"),
        (changed(decode=DECODE | {"heads": [8, None]}), "2 budgets of decode do not fit"),
        (changed(decode=DECODE | {"heads": [8, None, 0]}), "budgets of decode must be positive"),
        (changed(decode=DECODE | {"heads": [8, None, "8"]}), "budgets of decode must be positive"),
        (changed(decode=DECODE | {"heads": {}}), "budgets of decode must be positive"),
        (changed(rounding={"length": 9, "loss": 0}), "rounding is no object"),
        (changed(rounding_error=-1), "rounding_error must be"),
        (changed(rounding_error=math.nan), "rounding_error must be"),
        (changed(rounding={"length": 9, "kl": {"code": 0}}), "'loss' is missing"),
        (changed(rounding={"length": 9, "kl": {"code": 0}, "loss": math.inf}), "losses must"),
        (changed(rounding={"length": 9, "kl": {"code": -1}, "loss": 0}), "losses must"),
    ],
)
def test_unusable_tables_are_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        parse_table(text, "table.json")
    assert "table.json" in str(caught.value)


def test_rounding_is_harmless_below_both_limits() -> None:
    """Texts that look things up may differ twice as much."""
    for kl, loss, expected in ((1e-3, 0.1, True), (1.1e-3, 0.0, False), (0.0, 0.11, False)):
        for text, factor in (("prose", 1), ("text 1", 1), ("pairs", 2), ("facts", 2), ("table", 2)):
            quality = RoundingQuality(length=4096, kl={"code": 0.0, text: factor * kl}, loss=loss)
            assert quality.is_harmless == expected


def test_a_profile_says_what_rounding_is_off_by() -> None:
    table = replace(TABLE, prompts=1)
    assert not table.may_round_products
    for error, expected in ((1.9, True), (1.91, False)):
        read = parse_table(replace(table, rounding_error=error).to_json(), "t")
        assert read.rounding_error == error and read.may_round_products == expected
    measured = RoundingQuality(length=4096, kl={"prose": 2e-3}, loss=0.0)
    assert not replace(table, rounding_error=0.1, rounding=measured).may_round_products


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read the budget table"):
        read_table(tmp_path / "missing.json")
    with pytest.raises(ResourceError, match="cannot write the budget table"):
        write_table(TABLE, tmp_path / "missing.json" / ("x" * 300))


@pytest.mark.parametrize(
    ("fingerprint", "points"),
    [
        ("033526a135499773639407b17479d51b", ((4096, 1024), (8192, 1536))),
        ("a27e6c5d850473174e98420806e2e112", ((4096, 1024), (8192, 2304))),
    ],
    ids=["SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct"],
)
def test_packaged_tables_were_shown_to_lose_nothing(
    fingerprint: str,
    points: tuple[tuple[int, int], ...],
    request: pytest.FixtureRequest,
) -> None:
    packaged = find_table(fingerprint)
    assert packaged is not None and packaged[1] == "package"
    table = packaged[0]
    assert table.model in request.node.name and table.texts and table.shown == table.prefill
    assert tuple((each.length, each.budget) for each in table.shown) == points
    assert table.decode is not None and table.decode.length == 8192
    assert table.decode.is_harmless


def test_a_cache_folder_that_cannot_be_looked_into_has_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path / ("x" * 300)))  # by root too: no such name
    assert find_table("0" * 32) is None


def test_the_cache_comes_before_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path))
    packaged = find_table("033526a135499773639407b17479d51b")
    assert packaged is not None and packaged[1] == "package"
    table = packaged[0]
    assert (table.n_layers, table.n_kv_heads, table.length) == (30, 3, 4096)
    assert find_table("") is find_table("0" * 32) is None
    own = replace(table, model="mine")
    write_table(own, table_path(table.fingerprint))
    found = find_table(table.fingerprint)
    assert found is not None and found[0].model == "mine" and found[1] == "cache"
    write_table(replace(own, fingerprint="0" * 32), table_path(table.fingerprint))
    with pytest.raises(FormatError, match="of other weights"):
        find_table(table.fingerprint)


OF_QUERY_HEADS = replace(
    make_table([[4.0, 2.0, 1.0], [0.0, 0.0, 0.0], [2.0, 1.0, 0.5], [1.0, 1.0, 1.0]]),
    n_layers=1,
    n_kv_heads=2,
    n_heads=4,
)


def test_a_table_of_query_heads_survives_its_file_and_serves_kv_heads(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_table(OF_QUERY_HEADS, path)
    assert read_table(path) == OF_QUERY_HEADS
    assert len(OF_QUERY_HEADS.budgets(8)) == 4
    shared = OF_QUERY_HEADS.of_kv_heads()
    assert (shared.n_heads, shared.losses) == (0, {})
    assert shared.errors == ((4.0, 2.0, 1.0), (3.0, 2.0, 1.5))
    assert TABLE.of_kv_heads() is TABLE


def test_errors_of_query_heads_can_be_mixed_with_those_of_their_group() -> None:
    mixed = OF_QUERY_HEADS.smoothed(0.5).errors
    assert mixed[0] == (3.0, 1.5, 0.75)
    assert mixed[1] == (1.0, 0.5, 0.25)
    assert mixed[3] == (1.25, 1.0, 0.875)
    assert OF_QUERY_HEADS.smoothed(0.0).errors == OF_QUERY_HEADS.errors
    assert TABLE.smoothed(0.5) is TABLE


@pytest.mark.parametrize("n_heads", [-4, 3, 8])
def test_query_heads_that_do_not_fit_are_refused(n_heads: int) -> None:
    text = json.dumps(json.loads(OF_QUERY_HEADS.to_json()) | {"n_heads": n_heads})
    with pytest.raises(FormatError, match=r"query heads cannot share|do not fit its layers"):
        parse_table(text, "table.json")
