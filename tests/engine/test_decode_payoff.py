"""Tokens after a prompt read all of it where reading less would not save enough of their time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, H2OConfig, HeadwiseConfig, PrefillConfig, SamplingParams
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.budget_table import write_table
from edgeh2o.attention.decode_quality import DecodeQuality
from edgeh2o.attention.headwise_settings import DECODE_FROM, DECODES_ALL, NOT_MEASURED
from edgeh2o.config import RuntimeConfig
from edgeh2o.engine import payoff
from edgeh2o.engine.calibration import LEVELS
from edgeh2o.engine.payoff import choose_decode, choose_reading, count_weight_bytes, decode_saving
from edgeh2o.engine.payoff_lengths import describe_lengths
from edgeh2o.engine.plan import RunPlan
from edgeh2o.engine.saved_plan import fingerprint_of, plan_of_fingerprint
from edgeh2o.model_config import DecoderConfig
from tests.budget_tables import harmless_table

FEW_TOKENS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
# Where the conversations of these tests turn to headwise decode.
SWITCH = 3008
# Tokens of the longest prompt by which the table says that this is harmless.
MEASURED = 6016
# Of attention alone, at these lengths and far beyond.
LENGTHS = (2048, 2500, 3000, 4096, 6000, 8192, 20_000, 100_000)


@pytest.fixture
def by_table(path: Path, tmp_path: Path) -> HeadwiseConfig:
    """By a table with 64 keys, which says that decode may go by them."""
    with LLM(path) as llm:
        made = harmless_table(llm.config, 64, (0.0,) * len(LEVELS))
    quality = DecodeQuality(budget=64, length=MEASURED, kl={"prose": 0.0})
    write_table(replace(made, decode=quality), tmp_path / "decode.json")
    return HeadwiseConfig(budget_table=str(tmp_path / "decode.json"))


@pytest.fixture
def switches(
    path: Path, by_table: HeadwiseConfig, monkeypatch: pytest.MonkeyPatch
) -> HeadwiseConfig:
    """The same, where so much is asked for that it is saved from ``SWITCH`` tokens on."""
    with LLM(path) as llm:
        saving = saving_of(llm, by_table)
    monkeypatch.setattr(payoff, "LEAST_DECODE_SAVING", saving(SWITCH))
    return by_table


def plan_of(llm: LLM, attention: HeadwiseConfig, **runtime: object) -> RunPlan:
    settings = RuntimeConfig(**runtime)  # type: ignore[arg-type]
    return RunPlan.of(llm.config, attention, PrefillConfig(), settings)


def saving_of(
    llm: LLM, attention: HeadwiseConfig, weight_bytes: int | None = None, **runtime: object
) -> Callable[[int], float]:
    plan = plan_of(llm, attention, **runtime)
    assert isinstance(llm.config, DecoderConfig)
    config, held = llm.config, llm.weight_bytes if weight_bytes is None else weight_bytes
    weights = count_weight_bytes(config, held)
    return lambda n: decode_saving(config, plan.attention, plan.cache_type, weights, n)


def prompt_of(llm: LLM, n_tokens: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(3, llm.config.vocab_size, n_tokens).astype(np.int32)


def test_longer_prompts_save_more(path: Path, by_table: HeadwiseConfig) -> None:
    with LLM(path) as llm:
        savings = [saving_of(llm, by_table)(n) for n in LENGTHS]
        assert savings == sorted(savings)
        assert savings[-1] > 0.9
        all_full = replace(by_table, decode_attention="dense")
        assert saving_of(llm, all_full)(100_000) == 0.0


def test_weights_and_small_rows_leave_less_to_save(path: Path, by_table: HeadwiseConfig) -> None:
    with LLM(path) as llm:
        by_weights = [saving_of(llm, by_table, 10**power)(4096) for power in (5, 6, 7, 8)]
        assert by_weights == sorted(by_weights, reverse=True)
        by_type = [
            saving_of(llm, by_table, 10**6, cache_type=name)(4096)
            for name in ("f32", "f16", "q8_0")
        ]
        assert by_type == sorted(by_type, reverse=True)
        halves = {"cache_type_k": "f16", "cache_type_v": "q8_0"}
        assert by_type[2] < saving_of(llm, by_table, 10**6, **halves)(4096) < by_type[1]


def test_pages_save_of_heads_without_budgets(path: Path, by_table: HeadwiseConfig) -> None:
    with LLM(path) as llm:
        plan = plan_of(llm, by_table)
    attention = plan.attention
    assert isinstance(attention, HeadwiseConfig) and attention.decode_budgets
    n_full = plan.config.n_slots - 1
    full = replace(attention, decode_budgets=(64, *[None] * n_full))

    def rows_of_full(attention: HeadwiseConfig, n_tokens: int) -> list[float]:
        rows = attention.decode_rows(n_tokens)
        assert rows is not None
        return [*rows[1:]]

    for n_tokens, rows in ((8191, 8191), (8192, 4096 + 2048), (16384, 4096 + 4096)):
        assert rows_of_full(full, n_tokens) == [rows] * n_full
    assert rows_of_full(replace(full, decode_pages=0), 16384) == [16384] * n_full
    # 64 keys, as many recent ones as it holds besides, landmarks.
    assert attention.decode_rows(6400) == [64 + 256 + 100] * plan.config.n_slots
    assert attention.decode_rows(300) == [300] * plan.config.n_slots


def test_where_no_head_has_a_budget_everything_is_read(
    path: Path, by_table: HeadwiseConfig
) -> None:
    """And nothing is kept in fewer bits, which would save something too."""
    with LLM(path) as llm:
        plan = plan_of(llm, by_table)
        budgets = (None,) * plan.config.n_slots
        everything = replace(plan.attention, decode_budgets=budgets)
        assert everything.decode_rows(4096) is None
        chosen = choose_decode(replace(plan, attention=everything), llm.model).attention
        assert "decode" not in chosen.report(llm.config, 4096)


@pytest.mark.parametrize(
    ("cache_type", "cached", "kept"),
    [("f16", 2, 34 / 32), ("q8_0", 34 / 32, 34 / 32), ("f32", 4, 4)],
)
def test_what_is_kept_of_a_prompt_is_counted_by_its_own_type(
    cache_type: str, cached: float, kept: float, path: Path, by_table: HeadwiseConfig
) -> None:
    with LLM(path) as llm:
        plan = plan_of(llm, by_table, cache_type=cache_type)
        assert isinstance(llm.config, DecoderConfig)
        config, attention = llm.config, plan.attention
        rows = attention.decode_rows(4096)
        assert rows is not None
        saving = decode_saving(config, attention, plan.cache_type, 10**6, 4096)
    dims, group = 2 * config.head_dim, config.n_heads / config.n_kv_heads

    def cost(number: float) -> float:
        return dims * (payoff.CACHED_BYTE_COST * number + payoff.CACHED_PRODUCT_COST * group)

    dense = 10**6 + cost(cached) * 4096 * config.n_slots
    sparse = 10**6 + payoff.SPARSE_COST * cost(kept) * sum(rows)
    assert saving == pytest.approx(1 - sparse / dense)


def test_weights_are_those_that_a_token_reads(path: Path) -> None:
    with LLM(path) as llm:
        config = llm.config
    assert isinstance(config, DecoderConfig)
    tied = replace(config, tied_embeddings=True)
    assert count_weight_bytes(tied, 1000) == pytest.approx(1000)
    untied = replace(config, tied_embeddings=False)
    embedding = config.vocab_size * config.model_dim
    rest = payoff.count_products(config)[0]
    share = (embedding + rest) / (2 * embedding + rest)
    assert count_weight_bytes(untied, 1000) == pytest.approx(1000 * share)
    layers = tuple(replace(layer, is_dense=False) for layer in tied.layers)
    experts = replace(tied, layers=layers, n_experts=8, n_experts_used=2)
    network = 3 * config.model_dim * sum(layer.ffn_dim for layer in config.layers)
    share = (embedding + rest + network) / (embedding + rest + 7 * network)
    assert count_weight_bytes(experts, 1000) == pytest.approx(1000 * share)


def test_the_length_is_the_first_that_saves_enough(path: Path, switches: HeadwiseConfig) -> None:
    with LLM(path) as llm:
        saving = saving_of(llm, switches)
        plans = [
            choose_reading(plan_of(llm, switches, threads=threads), llm.model, 1000)
            for threads in (1, 2)
        ]
        least = plans[0].attention
        assert isinstance(least, HeadwiseConfig) and least == plans[1].attention
        assert least.decode_from == SWITCH
        assert saving(least.decode_from) >= payoff.LEAST_DECODE_SAVING
        assert saving(least.decode_from - payoff.DECODE_STEP) < payoff.LEAST_DECODE_SAVING


def test_the_length_is_said_in_words(path: Path, switches: HeadwiseConfig) -> None:
    with LLM(path) as llm:

        def said(attention: SparseAttentionConfig, **runtime: object) -> str | None:
            plan = plan_of(llm, attention, **runtime)
            return describe_lengths(plan, llm.model).get("generated_tokens")

        within = f"read less of prompts of {SWITCH:,} to {MEASURED:,} tokens: from there on it"
        assert str(said(switches)).startswith(within)
        assert " tokens and more: from there on it" in str(said(switches, context_size=MEASURED))
        beyond = f"read everything: less would pay from {SWITCH:,} tokens on, beyond the context"
        assert said(switches, context_size=SWITCH - 64) == beyond
        asked = replace(switches, decode_attention="headwise")
        assert said(asked) == f"read less of prompts of {DECODE_FROM:,} tokens and more"
        assert said(replace(switches, decode_attention="dense")) is None
        assert said(H2OConfig()) is None


def test_what_never_pays_takes_no_memory(
    path: Path, by_table: HeadwiseConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "LEAST_DECODE_SAVING", 1.0)
    with LLM(path) as llm:
        plan = choose_decode(plan_of(llm, by_table), llm.model)
        assert plan.attention.decode_rows(4096) is None
        assert plan.attention.report(llm.config, 4096).get("decode") is None
        said = describe_lengths(plan_of(llm, by_table), llm.model)
        assert said["generated_tokens"] == "read everything"


def test_what_was_asked_for_stays(path: Path, switches: HeadwiseConfig) -> None:
    with LLM(path, attention=replace(switches, decode_attention="headwise")) as llm:
        stats = llm.generate(prompt_of(llm, 2500), FEW_TOKENS).stats
        assert stats.attention["decode"] == "headwise"
        assert stats.attention["decode_from"] == DECODE_FROM
        sparse = stats.cache_bytes_per_token
    with LLM(path, attention=replace(switches, decode_attention="dense")) as llm:
        stats = llm.generate(prompt_of(llm, 4000), FEW_TOKENS).stats
        assert "decode" not in stats.attention
        assert stats.note == ""
        dense = stats.cache_bytes_per_token
    assert sparse is not None and dense is not None and sparse < dense / 4


def test_a_conversation_turns_once_it_is_long(path: Path, switches: HeadwiseConfig) -> None:
    """And back, where its end is taken away; it is not read again for that."""
    row = 0.0
    with LLM(path, attention=switches) as llm:
        prompt = prompt_of(llm, 6000)
        for n_tokens, n_cached in ((2200, 0), (2900, 2200), (3500, 2900), (5000, 3500)):
            stats = llm.generate(prompt[:n_tokens], FEW_TOKENS, keep_cache=True).stats
            assert stats.cached_tokens == n_cached
            assert stats.attention["decode_from"] == SWITCH
            n_bytes = stats.cache_bytes_per_token
            assert n_bytes is not None
            if n_tokens < SWITCH:
                assert stats.attention["decode"] == DECODES_ALL
                assert f"before {SWITCH:,} tokens" in stats.note
                row = max(row, n_bytes / (n_tokens + 1.5))
                assert n_bytes > 0.95 * row * n_tokens
            else:
                assert stats.attention["decode"] == "headwise"
                assert "generated tokens" not in stats.note
                assert n_bytes < 0.3 * row * n_tokens
        assert stats.context_size > 4096  # it has grown
        stats = llm.generate(prompt[:1500], FEW_TOKENS).stats
        assert stats.attention["decode"] == DECODES_ALL
        assert stats.note == ""  # no prompt so short has another decode
        assert "dense: reading less" in stats.format_table()


def test_longer_prompts_than_those_measured_are_read_whole(
    path: Path, switches: HeadwiseConfig
) -> None:
    """Unless less is asked for."""
    with LLM(path, attention=switches) as llm:
        prompt = prompt_of(llm, MEASURED + 200)
        for n_tokens, n_cached in ((MEASURED - 6, 0), (MEASURED + 40, MEASURED - 6)):
            stats = llm.generate(prompt[:n_tokens], FEW_TOKENS, keep_cache=True).stats
            assert stats.cached_tokens == n_cached
            reads_less = n_tokens <= MEASURED
            assert stats.attention["decode"] == ("headwise" if reads_less else NOT_MEASURED)
            assert ("calibrate --length" in stats.note) != reads_less
            assert stats.cache_bytes_per_token is not None
            if reads_less:
                less = stats.cache_bytes_per_token
            else:
                assert stats.cache_bytes_per_token > 2 * less
        alone = llm.generate(prompt, FEW_TOKENS).stats
        assert alone.attention["decode"] == NOT_MEASURED
        said = describe_lengths(plan_of(llm, switches), llm.model)["generated_tokens"]
        assert said.startswith(f"read less of prompts of {SWITCH:,} to {MEASURED:,} tokens")
    asked = replace(switches, decode_attention="headwise")
    with LLM(path, attention=asked) as llm:
        assert llm.generate(prompt, FEW_TOKENS).stats.attention["decode"] == "headwise"


def test_a_saved_conversation_goes_on_as_it_was_made(
    path: Path, switches: HeadwiseConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(path, attention=switches) as llm:
        prompt = prompt_of(llm, 3600)
        llm.generate(prompt[:2900], FEW_TOKENS, keep_cache=True)
        llm.save_session(tmp_path / "saved")
        expected = llm.generate(prompt, FEW_TOKENS, keep_cache=True)
        assert expected.stats.attention["decode"] == "headwise"
    monkeypatch.setattr(payoff, "LEAST_DECODE_SAVING", 0.99)
    with LLM(path, attention=switches) as llm:
        llm.load_session(tmp_path / "saved")
        result = llm.generate(prompt, FEW_TOKENS, keep_cache=True)
        assert result.stats.cached_tokens == expected.stats.cached_tokens == 2900
        assert result.stats.attention == expected.stats.attention
        assert result.token_ids == expected.token_ids
        # What begins anew goes by what is so here.
        stats = llm.generate(prompt, FEW_TOKENS).stats
        assert stats.attention["decode"] == DECODES_ALL


def test_plans_of_files_have_the_length_that_they_were_made_with(
    path: Path, switches: HeadwiseConfig
) -> None:
    with LLM(path) as llm:
        plan = plan_of(llm, switches)
        for made in (plan, choose_decode(plan, llm.model)):
            saved = json.loads(json.dumps(fingerprint_of(made, llm.model)))
            assert saved["attention"]["decode"].get("from") == (None if made is plan else SWITCH)
            assert plan_of_fingerprint(plan, saved, llm.model) == made
        for wrong in (0, "x", 2**40):
            decode = {**saved["attention"]["decode"], "from": wrong}
            other = {**saved, "attention": {**saved["attention"], "decode": decode}}
            assert plan_of_fingerprint(plan, other, llm.model) is None
