"""Profiles in the cache folder: running means, several processes, the size of the folder."""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeh2o.attention import kept_profiles
from edgeh2o.attention.budget_table import BudgetTable
from edgeh2o.attention.kept_profiles import (
    ENOUGH_PROMPTS,
    MAX_PROFILES,
    PARTS,
    PROFILE_SUFFIX,
    find_profile,
    is_kept_by_newer,
    keep_profile,
    merge_profiles,
    profile_path,
)


def measured(*rows: tuple[float, float], fingerprint: str = "f" * 32) -> BudgetTable:
    """What one prompt says of three layers of one KV head."""
    return BudgetTable(
        model="tiny",
        fingerprint=fingerprint,
        n_layers=len(rows),
        n_kv_heads=1,
        chunk_size=128,
        length=1024,
        mean_past=64.0,
        levels=(8, 16),
        errors=rows,
        texts=("prompt",),
        prompts=1,
    )


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path))


def test_a_mean_by_hand() -> None:
    """The first prompt sums to 1: halves. The second is scaled from 20 to the 1 known, of all."""
    first = merge_profiles(None, measured((1.0, 0.5), (0.3, 0.1), (0.1, 0.0)))
    np.testing.assert_allclose(first.errors, [(0.5, 0.25), (0.15, 0.05), (0.05, 0.0)])
    second = merge_profiles(first, measured((2.0, 2.0), (8.0, 8.0), (0.0, 0.0)))
    expected = [(0.5, 0.25), (0.15, 0.05)]
    expected = [
        tuple(a + 0.5 * (0.95 / 20 * b - a) for a, b in zip(old, new, strict=True))
        for old, new in zip(expected, [(2.0, 2.0), (8.0, 8.0)], strict=True)
    ]
    np.testing.assert_allclose(second.errors, [*expected, (0.05, 0.0)])
    assert (second.prompts, second.texts) == (2, ("prompt", "prompt"))


def test_scale_does_not_matter_and_a_head_counts_its_measurements() -> None:
    """Equal prompts in any scale leave the mean; the weight falls once in ``PARTS`` prompts."""
    rows = ((1.0, 0.5), (0.3, 0.1), (0.2, 0.1))
    table = known = merge_profiles(None, measured(*rows))
    for i in range(1, 10):
        table = merge_profiles(table, measured(*[(10.0**i * a, 10.0**i * b) for a, b in rows]))
        np.testing.assert_allclose(table.errors, known.errors)
    odd = measured((0.0, 0.0), (0.0, 0.0), (1e9, 1e9))
    share = np.sum(merge_profiles(table, odd).errors[2]) / np.sum(table.errors[2])
    assert share == pytest.approx(1.0)
    odd = measured((0.0, 0.1), (0.0, 0.1), (1e9, 1e9))
    moved = np.sum(merge_profiles(table, odd).errors[2])
    own = np.sum(table.errors[2])
    assert moved == pytest.approx(own + (1.0 - own) / (2 + 9 // PARTS), rel=1e-3)


def test_what_does_not_agree_begins_anew() -> None:
    known = keep_profile(measured((1.0, 0.5), (0.3, 0.1)))
    other = replace(measured((1.0, 0.5), (0.3, 0.1)), chunk_size=64)
    assert merge_profiles(known, other).prompts == 1
    # Zeros have no scale.
    assert merge_profiles(None, measured((0.0, 0.0))).errors == ((0.0, 0.0),)


def test_what_is_kept_is_found() -> None:
    assert find_profile("f" * 32) is find_profile("") is None
    kept = keep_profile(measured((1.0, 0.5), (0.3, 0.1)))
    found = find_profile(kept.fingerprint)
    assert found is not None and found.prompts == 1
    np.testing.assert_allclose(found.errors, kept.errors, rtol=5e-3)
    profile_path("e" * 32).write_text(profile_path("f" * 32).read_text())
    assert find_profile("e" * 32) is None
    # Weights without a name are kept by nobody.
    assert keep_profile(measured((1.0, 0.5), fingerprint="")).prompts == 1
    assert len(list(profile_path("x").parent.glob(f"*{PROFILE_SUFFIX}"))) == 2


def _refine(_: int) -> int:
    return keep_profile(measured((1.0, 0.5), (0.3, 0.1))).prompts


def test_several_processes_refine_one_profile() -> None:
    with ProcessPoolExecutor(4) as pool:
        counts = list(pool.map(_refine, range(24)))
    assert sorted(counts) == list(range(1, 25))
    found = find_profile("f" * 32)
    assert found is not None and found.prompts == 24
    assert len(found.texts) == ENOUGH_PROMPTS


@pytest.mark.parametrize("name", [f"{'f' * 32}{PROFILE_SUFFIX}", "profiles.lock"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert find_profile("f" * 32) is None
    assert keep_profile(measured((1.0, 0.5))).prompts == 1


@pytest.mark.parametrize("change", [{"format": 2}, {"format": 3, "model": 1}, {"of_later": []}])
def test_what_a_later_version_keeps_stays(change: dict[str, object]) -> None:
    """It was written over, and what it had learnt was lost for the later version."""
    keep_profile(measured((1.0, 0.5), (0.3, 0.1)))
    path = profile_path("f" * 32)
    text = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text)
    assert is_kept_by_newer("f" * 32)
    known = 1 if find_profile("f" * 32) else 0  # what it added may be left out
    assert known == ("format" not in change)
    assert keep_profile(measured((1.0, 0.5), (0.3, 0.1))).prompts == known + 1
    assert path.read_text() == text
    assert not is_kept_by_newer("e" * 32) and not is_kept_by_newer("")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "2"}', '{"format": 0}', "\xff"])
def test_what_nobody_can_use_is_made_anew(text: str) -> None:
    path = profile_path("f" * 32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("latin-1"))
    assert not is_kept_by_newer("f" * 32)
    keep_profile(measured((1.0, 0.5), (0.3, 0.1)))
    found = find_profile("f" * 32)
    assert found is not None and found.prompts == 1


def test_the_folder_holds_so_many(tmp_path: Path) -> None:
    for i in range(MAX_PROFILES + 3):
        fingerprint = f"{i:032x}"
        keep_profile(measured((1.0, 0.5), fingerprint=fingerprint))
        os.utime(profile_path(fingerprint), (1000 + i, 1000 + i))
    kept = sorted(path.name for path in tmp_path.glob(f"*{PROFILE_SUFFIX}"))
    assert kept == [f"{i:032x}{PROFILE_SUFFIX}" for i in range(3, MAX_PROFILES + 3)]
    assert kept_profiles.find_profile("0" * 32) is None
