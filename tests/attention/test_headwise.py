"""The headwise configuration: where budgets come from, and bad settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeh2o.attention.budget_table import BudgetTable, find_table, write_table
from edgeh2o.attention.decode_quality import DecodeQuality
from edgeh2o.attention.head_budgets import (
    DEFAULT_BUDGET,
    PROFILE_BUDGET,
    SHARED_ERROR,
    TOO_LOSSY,
    UNKNOWN,
    HeadBudgets,
    default_budget,
)
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.attention.kept_profiles import find_profile, keep_profile
from edgeh2o.attention.registry import make_sparse_attention
from edgeh2o.errors import UsageError
from tests.attention.examples import SMOLLM2, TABLE, Model, UnequalModel


def test_without_a_table_every_head_reads_everything() -> None:
    chosen = HeadwiseConfig().choose_budgets(Model())
    assert chosen.per_head == (None,) * 3
    assert (chosen.source, chosen.prompts) == (UNKNOWN, 0)
    resolved = HeadwiseConfig().resolved(Model())
    assert (resolved.budgets, resolved.max_past) == ((None,) * 3, 0)
    assert HeadwiseConfig().report(Model()) == {"algorithm": "headwise", "table": UNKNOWN}


def test_without_a_table_a_given_budget_serves_every_head() -> None:
    assert HeadwiseConfig(budget=7).choose_budgets(Model()).per_head == (7, 7, 7)
    report = HeadwiseConfig(budget=7).report(Model())
    assert (report["table"], report["full_heads"]) == ("uniform", 0)


def test_a_profile_serves_where_there_is_no_table(tmp_path: Path) -> None:
    model = Model(fingerprint="f" * 32)
    assert HeadwiseConfig().choose_budgets(model).source == UNKNOWN
    keep_profile(replace(TABLE, losses={}))
    kept = find_profile(model.fingerprint)
    assert kept is not None
    chosen = HeadwiseConfig().choose_budgets(model)
    assert (chosen.source, chosen.mean) == ("profile (1 prompt)", PROFILE_BUDGET)
    assert chosen.per_head == kept.budgets(PROFILE_BUDGET)
    assert HeadwiseConfig(budget=16).choose_budgets(model).per_head == kept.budgets(16)
    assert HeadwiseConfig(budget_table="none").choose_budgets(model) == chosen
    other = Model(n_layers=4, fingerprint="f" * 32)
    assert HeadwiseConfig().choose_budgets(other).source == UNKNOWN
    with pytest.raises(UsageError, match="--max-loss needs the measured losses"):
        HeadwiseConfig(max_loss=1.0).choose_budgets(model)


def test_query_heads_have_budgets_of_their_own_where_they_may(tmp_path: Path) -> None:
    model = Model(fingerprint="f" * 32, splits_groups=True)
    rows = ((9.0, 8.0, 7.0), (0.01, 0.001, 0.0)) * 3
    keep_profile(replace(TABLE, n_heads=2, errors=rows, losses={}))
    kept = find_profile(model.fingerprint)
    assert kept is not None
    resolved = HeadwiseConfig(budget=20).resolved(model)
    assert resolved.by_query_head
    assert resolved.budgets == kept.smoothed(SHARED_ERROR).budgets(20)
    assert len(resolved.budgets) == 6
    assert resolved.report(model)["heads"] == "query"
    held = HeadwiseConfig(budget=20).holding(json.loads(json.dumps(resolved.to_dict())))
    assert (held.budgets, held.by_query_head) == (resolved.budgets, True)
    assert held.fits(model)
    assert not held.fits(replace(model, splits_groups=False))
    assert not replace(held, by_query_head=False).fits(model)
    # Where they may not, the same profile gives those of KV heads.
    shared = HeadwiseConfig(budget=20).resolved(replace(model, splits_groups=False))
    assert (shared.budgets, shared.by_query_head) == (kept.of_kv_heads().budgets(20), False)
    assert "by_query_head" not in shared.to_dict()
    # And generated tokens go by those.
    decode = HeadwiseConfig(budget=20, decode_attention="headwise").resolved(model)
    assert (decode.budgets, decode.by_query_head) == (resolved.budgets, True)
    own = kept.smoothed(SHARED_ERROR).of_kv_heads().budgets(20)
    assert decode.decode_budgets == own and len(own) == 3
    with pytest.raises(UsageError, match="several to a KV head"):
        resolved.choose_budgets(replace(model, splits_groups=False))
    with pytest.raises(UsageError, match=r"4 entries; the 3 layers of the model have 6 query"):
        replace(resolved, budgets=(4,) * 4).choose_budgets(model)


def test_a_profile_of_kv_heads_is_made_anew_for_query_heads() -> None:
    model = Model(fingerprint="f" * 32, splits_groups=True)
    keep_profile(replace(TABLE, losses={}))
    chosen = HeadwiseConfig().choose_budgets(model)
    assert (chosen.source, chosen.prompts) == (UNKNOWN, 0)
    learning = HeadwiseConfig().learning(model, 4096)
    assert learning is not None and learning.budgets is not None
    assert (len(learning.budgets), learning.by_query_head) == (6, True)


def test_only_what_was_looked_up_is_held_by_a_session() -> None:
    saved = HeadwiseConfig().resolved(Model()).to_dict()
    held = HeadwiseConfig().holding(saved | {"budgets": [4, None, 6], "is_taught": False})
    assert (held.budgets, held.source) == ((4, None, 6), "session")
    own = HeadwiseConfig(budgets=(1, 2, 3), decode_attention="dense")
    assert own.holding(saved) == own
    config = HeadwiseConfig()
    for bad in ([], [0, 1, 2], ["4"], "456", None):
        assert config.holding(saved | {"budgets": bad}) is config
    assert config.holding(saved | {"max_past": 7}) is config


@pytest.mark.parametrize("is_taught", [True, False])
def test_a_session_that_was_read_dense_says_so(*, is_taught: bool) -> None:
    """Its budgets name no limit, and the mean that a shorter prompt would have is not read."""
    config, model = HeadwiseConfig(), Model()
    for dense in (config.resolved(model), config.resolved(model).reading_all(saves_time=True)):
        saved = json.loads(json.dumps(dense.to_dict())) | {"is_taught": is_taught}
        held = config.holding(saved).resolved(model)
        said = {"algorithm": "headwise", "table": "dense: as the saved session was"}
        assert held.report(model) == said
        # Beyond so many positions those read pages.
        held = config.holding(saved | {"max_past": config.max_past})
        assert held.resolved(model).report(model)["full_heads"] == len(held.budgets or ())


@pytest.mark.parametrize(
    ("said", "percent"),
    [({"is_taught": False}, 4.5), ({"is_taught": True}, 1.0), ({}, 1.0), ({"is_taught": 0}, 1.0)],
)
def test_budgets_of_a_session_may_err_as_much_as_where_they_are_from(
    said: dict[str, object], percent: float
) -> None:
    config = HeadwiseConfig()
    values = config.resolved(Model()).to_dict() | {"budgets": [4, None, 6]} | said
    held = config.holding(values).resolved(Model())
    assert config.default_max_error(held) == percent
    # And so it goes on when that session is saved once more.
    assert held.is_taught is (percent == 1.0)


def test_the_packaged_table_is_found_by_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path))
    model = Model(n_layers=30, n_kv_heads=3, fingerprint=SMOLLM2)
    chosen = HeadwiseConfig(budget=512).choose_budgets(model)
    found = find_table(SMOLLM2)
    assert found is not None
    assert (chosen.source, chosen.mean) == ("package", 512)
    assert chosen.per_head == found[0].of_kv_heads().budgets(512)
    assert 0 < chosen.per_head.count(None) < 20
    split = replace(model, n_heads=9, splits_groups=True)
    chosen = HeadwiseConfig().choose_budgets(split)
    assert (chosen.source, chosen.mean, chosen.by_query_head) == ("package", DEFAULT_BUDGET, True)
    assert chosen.per_head == found[0].budgets(DEFAULT_BUDGET)


def test_a_file_and_a_loss(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_table(TABLE, path)
    chosen = HeadwiseConfig(budget_table=str(path), max_loss=0.6).choose_budgets(Model())
    assert (chosen.source, chosen.mean) == ("file", 16)
    assert chosen.per_head == TABLE.budgets(16)
    with pytest.raises(UsageError, match=r"no calibrated budget.*0.10 % at 32.*--attention dense"):
        HeadwiseConfig(budget_table=str(path), max_loss=0.0).choose_budgets(Model())
    with pytest.raises(UsageError, match=r"3 layers of 1 KV heads, the model has 4 of 1"):
        HeadwiseConfig(budget_table=str(path)).choose_budgets(Model(n_layers=4))


def test_the_default_loses_half_a_percent_or_is_dense(tmp_path: Path) -> None:
    def choose(table: BudgetTable) -> HeadBudgets:
        path = tmp_path / "table.json"
        write_table(table, path)
        return HeadwiseConfig(budget_table=str(path)).choose_budgets(Model())

    # One that does not say what it read promises nothing.
    assert choose(TABLE).mean == DEFAULT_BUDGET
    assert TABLE.losses == {8: 2.0, 16: 0.5, 32: 0.1}
    chosen = choose(replace(TABLE, texts=("a book: 4096 tokens",)))
    assert (chosen.mean, chosen.source) == (16, "file")
    chosen = choose(replace(TABLE, texts=("a book: 4096 tokens",), losses={8: 2.0, 32: 0.6}))
    assert (chosen.per_head, chosen.source) == ((None,) * 3, TOO_LOSSY)
    config = HeadwiseConfig(budget_table=str(tmp_path / "table.json"))
    assert config.report(Model()) == {"algorithm": "headwise", "table": TOO_LOSSY}
    assert config.resolved(Model()).max_past == 0
    packaged = find_table(SMOLLM2)
    assert packaged is not None and packaged[0].texts
    assert default_budget(packaged[0]) == DEFAULT_BUDGET
    lengths = [each.length for each in packaged[0].shown]
    assert lengths == [4096, 8192]


def test_a_short_description_leaves_out_what_is_not_set() -> None:
    assert HeadwiseConfig().describe() == "headwise"
    assert HeadwiseConfig(budget=640, sinks=8).describe() == "headwise budget 640 sinks 8"


def test_explicit_budgets_must_fit_the_model() -> None:
    config = HeadwiseConfig(budgets=(4, None, 6))
    assert config.choose_budgets(Model()).per_head == (4, None, 6)
    assert "1 of them the whole past" in repr(config.make_policy(Model()))
    with pytest.raises(UsageError, match=r"3 entries; the 2 layers of the model have 2 KV heads"):
        config.choose_budgets(Model(n_layers=2))


def test_layers_that_differ_in_kv_heads_have_no_table() -> None:
    model = UnequalModel(n_layers=30, n_kv_heads=3, fingerprint=SMOLLM2)
    chosen = HeadwiseConfig(budget=512).choose_budgets(model)
    assert (chosen.per_head, chosen.source, chosen.prompts) == ((512,) * 2, "uniform", None)
    assert HeadwiseConfig().choose_budgets(model).per_head == (None, None)
    assert HeadwiseConfig(budgets=(4, None)).choose_budgets(model).per_head == (4, None)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (UnequalModel(), "needs layers of equal numbers of KV heads"),
        (Model(is_recurrent=True, has_like_layers=False), "is for models without recurrent layers"),
        (Model(has_like_layers=False), "is for models whose layers attend alike"),
        (Model(index_top_k=4, has_like_layers=False), "is for models that have no indexer"),
        (Model(has_distance_bias=True), "is for models without a bias by distance"),
    ],
    ids=["unequal", "recurrent", "sinks", "indexer", "distances"],
)
def test_what_is_not_calibrated_has_no_table(model: Model, why: str, tmp_path: Path) -> None:
    """A table of another model of the same shape is refused, and none is recommended."""
    path = tmp_path / "table.json"
    write_table(replace(TABLE, losses={64: 0.1}), path)
    assert HeadwiseConfig(budget_table=str(path)).choose_budgets(Model()).source == "file"
    for config, what in (
        (HeadwiseConfig(budget_table=str(path)), "a budget table"),
        (HeadwiseConfig(max_loss=1.0), "--max-loss needs a budget table, which"),
    ):
        with pytest.raises(UsageError, match=f"^{what} {why}") as refusal:
            config.choose_budgets(model)
        assert "calibrate" not in str(refusal.value)
        is_others = model.index_top_k or model.has_distance_bias
        assert "prompts are read dense" in str(refusal.value) or is_others
    assert HeadwiseConfig(budget=7).choose_budgets(model).source == "uniform"


def test_a_loss_needs_a_table() -> None:
    with pytest.raises(UsageError, match="edgeh2o calibrate MODEL"):
        HeadwiseConfig(max_loss=1.0).choose_budgets(Model())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"budget": 0}, "--budget"),
        ({"budget": 1.5}, "--budget"),
        ({"budget": 640, "max_loss": 1.0}, "not both"),
        ({"max_loss": -1.0}, "--max-loss"),
        ({"max_loss": float("nan")}, "--max-loss"),
        ({"local": -1}, "--headwise-local"),
        ({"sinks": True}, "--headwise-sinks"),
        ({"decay": 1.5}, "--headwise-decay"),
        ({"decay": float("nan")}, "--headwise-decay"),
        ({"landmark_size": -64}, "--landmark-size"),
        ({"budgets": (0,)}, "budgets must be positive"),
        ({"budgets": ("4",)}, "budgets must be positive"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HeadwiseConfig(**values)


def test_settings_from_plain_values() -> None:
    config = make_sparse_attention({"algorithm": "headwise", "budget": 640, "budgets": [1, None]})
    assert config == HeadwiseConfig(budget=640, budgets=(1, None))
    for settings, message in (
        ({}, "entry 'algorithm'"),
        ({"algorithm": 3}, "entry 'algorithm'"),
        ({"algorithm": "magic"}, "'magic' is not known"),
        ({"algorithm": "h2o", "budget": 5}, "'h2o' has no setting 'budget'"),
        ({"algorithm": "dense", "x": 5}, "its settings are none"),
    ):
        with pytest.raises(UsageError, match=message):
            make_sparse_attention(settings)


def test_decode_attention() -> None:
    sparse = HeadwiseConfig(decode_attention="headwise")
    assert sparse.to_dict()["decode"]["attention"] == "headwise"
    assert sparse.decoding_densely() == HeadwiseConfig(decode_attention="dense")
    dense = HeadwiseConfig().resolved(Model())
    assert dense.decode_attention == "dense"
    assert "decode" not in dense.to_dict()  # as in older session files
    with pytest.raises(UsageError, match=r"decode_attention \(--decode-attention\) must be one"):
        HeadwiseConfig(decode_attention="quest")


HARMLESS = DecodeQuality(budget=16, length=4096, kl={"prose": 2e-3, "pairs": 5e-3})


def _with_decode(quality: DecodeQuality | None, folder: Path, **fields: Any) -> HeadwiseConfig:
    path = folder / "table.json"
    write_table(replace(TABLE, decode=quality, **fields), path)
    return HeadwiseConfig(budget_table=str(path), budget=16)


def test_decode_goes_by_budgets_that_were_measured(tmp_path: Path) -> None:
    auto = _with_decode(HARMLESS, tmp_path)
    assert auto.resolved(Model()).decode_attention == "headwise"
    assert auto.report(Model())["decode"] == "headwise"
    assert replace(auto, budget=32).resolved(Model()).decode_attention == "headwise"
    others = {
        "a GPU": (auto, Model(decodes_by_rule=False)),
        "asked for": (replace(auto, decode_attention="dense"), Model()),
        "budgets by hand": (HeadwiseConfig(budgets=(4, None, 6)), Model()),
    }
    for why, (config, model) in others.items():
        resolved = config.resolved(model)
        assert resolved.decode_attention == "dense", why
        assert "decode" not in config.report(model), why


@pytest.mark.parametrize("kl", [{"code": 3.1e-3}, {"prose": 1e-3, "table": 6.1e-3}])
def test_decode_stays_dense_where_it_would_lose(tmp_path: Path, kl: dict[str, float]) -> None:
    auto = _with_decode(replace(HARMLESS, kl=kl), tmp_path)
    assert auto.resolved(Model()).decode_attention == "dense"
    assert _with_decode(None, tmp_path).resolved(Model()).decode_attention == "dense"


def test_a_table_of_query_heads_serves_decode(tmp_path: Path) -> None:
    model = Model(splits_groups=True)
    auto = _with_decode(HARMLESS, tmp_path, n_heads=2, errors=TABLE.errors * 2)
    resolved = auto.resolved(model)
    assert (resolved.by_query_head, resolved.decode_attention) == (True, "headwise")
    assert resolved.decode_budgets == auto.resolved(Model()).decode_budgets
    assert resolved.decode_budgets is not None and len(resolved.decode_budgets) == 3
    held = HeadwiseConfig().holding(json.loads(json.dumps(resolved.to_dict())))
    assert held.fits(model) and held.resolved(model).to_dict() == resolved.to_dict()
    assert not replace(held, decode_budgets=(4, 4)).fits(model)
    alone = HeadwiseConfig(budgets=resolved.budgets, by_query_head=True)
    with pytest.raises(UsageError, match=r"decode_budgets\), which budgets of query heads"):
        replace(alone, decode_attention="headwise").make_policy(model)
    with pytest.raises(UsageError, match="decode_budgets has 2 entries"):
        replace(alone, decode_budgets=(4, 4)).resolved(model)


def test_a_session_decodes_as_it_did(tmp_path: Path) -> None:
    auto = _with_decode(HARMLESS, tmp_path)
    new = json.loads(json.dumps(auto.resolved(Model()).to_dict()))
    old = {name: value for name, value in new.items() if name != "decode"}
    for config in (auto, HeadwiseConfig()):
        assert config.holding(new).resolved(Model()).decode_attention == "headwise"
        assert config.holding(old).resolved(Model()).decode_attention == "dense"
    assert replace(auto, decode_attention="dense").holding(new).decode_attention == "dense"


def test_the_packaged_budgets_serve_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path))
    model = Model(n_layers=30, n_kv_heads=3, n_heads=9, fingerprint=SMOLLM2, splits_groups=True)
    assert HeadwiseConfig().resolved(model).decode_attention == "headwise"
    fewer = HeadwiseConfig(budget=768).resolved(model)
    assert fewer.decode_budgets == HeadwiseConfig().resolved(model).decode_budgets != fewer.budgets
