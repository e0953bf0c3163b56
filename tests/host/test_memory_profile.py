"""The memory timeline: phases, files, the picture."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import psutil
import pytest

from edgeh2o import LLM, PrefillConfig, ResourceError, SamplingParams, UsageError
from edgeh2o.engine.stats import GenerationStats
from edgeh2o.memory import MemoryProfile, draw_memory_profile
from tests.evaluation.pictures import png_size
from tests.tiny_models import TinyModelFactory

BLOCK_BYTES = 64 * 2**20


def _fill() -> np.ndarray:
    return np.ones(BLOCK_BYTES, np.uint8)


def test_samples_see_what_a_phase_allocates() -> None:
    with MemoryProfile(interval_s=0.001) as profile:
        profile.mark("full")
        block = _fill()
        profile.mark("freed")
        del block
        profile.mark("end")
    peaks = {phase.name: phase.peak_rss_bytes for phase in profile.phases}
    assert list(peaks) == ["start", "full", "freed", "end"]
    assert peaks["full"] - peaks["start"] > 0.9 * BLOCK_BYTES
    assert peaks["full"] - peaks["end"] > 0.9 * BLOCK_BYTES
    unique = [s.uss_bytes for s in profile.samples if s.uss_bytes is not None]
    assert max(unique) - unique[0] > 0.9 * BLOCK_BYTES


def test_phases_follow_each_other_without_gaps() -> None:
    with MemoryProfile(interval_s=0.001) as profile:
        for name in ("a", "a", "b"):
            profile.mark(name)
    names = [phase.name for phase in profile.phases]
    assert names == ["start", "a", "b"]
    for earlier, later in zip(profile.phases, profile.phases[1:], strict=False):
        assert earlier.stop_s == later.start_s
    times = [sample.time_s for sample in profile.samples]
    assert times == sorted(times)


def test_a_background_thread_samples_by_itself() -> None:
    with MemoryProfile(interval_s=0.001, uss_interval_s=0.0) as profile:
        while len(profile.samples) < 10:
            pass
    assert all(sample.uss_bytes is not None for sample in profile.samples)


@pytest.fixture
def run(tiny_model: TinyModelFactory) -> tuple[MemoryProfile, GenerationStats]:
    prefill = PrefillConfig(batch_size=64, chunk_size=32)
    with (
        MemoryProfile(batch_size=64) as profile,
        LLM(
            tiny_model(tensor_type="Q4_0"), prefill=prefill, on_progress=profile.on_progress
        ) as llm,
    ):
        prompt = np.full(150, 5, np.int32)
        sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        result = llm.generate(prompt, sampling)
    return profile, result.stats


@pytest.mark.filterwarnings("ignore:local . heavy")
def test_a_run_is_profiled_by_batch(
    run: tuple[MemoryProfile, GenerationStats], tmp_path: Path
) -> None:
    profile, stats = run
    names = [phase.name for phase in profile.phases]
    assert names == ["start", "load", "prefill 1", "prefill 2", "prefill 3", "decode"]
    assert stats.memory_bytes.keys() == {
        "weights",
        "kv_cache",
        "activations",
        "scratch",
        "scores",
    }

    profile.write(tmp_path / "profile.json", stats.memory_bytes)
    content = json.loads((tmp_path / "profile.json").read_text())
    assert content["allocated_bytes"] == stats.memory_bytes
    assert [phase["name"] for phase in content["phases"]] == names
    assert len(content["samples"]) == len(profile.samples)

    profile.write(tmp_path / "profile.csv", stats.memory_bytes)
    with (tmp_path / "profile.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["quantity"] for row in rows} == {"rss", "uss", *stats.memory_bytes}
    allocated = {r["quantity"]: int(r["bytes"]) for r in rows if r["phase"] == "allocated"}
    assert allocated == stats.memory_bytes
    resident = [int(row["bytes"]) for row in rows if row["quantity"] == "rss"]
    assert resident == [sample.rss_bytes for sample in profile.samples]

    draw_memory_profile(profile, stats.memory_bytes, tmp_path / "profile.png")
    assert png_size(tmp_path / "profile.png") == (1430, 715)


def test_a_profile_that_still_runs_is_drawn_as_far_as_it_is(tmp_path: Path) -> None:
    with MemoryProfile(interval_s=0.001) as profile:
        profile.mark("now")
        draw_memory_profile(profile, {"weights": 2**20}, tmp_path / "profile.png")
    assert png_size(tmp_path / "profile.png") == (1430, 715)


@pytest.mark.parametrize(
    ("name", "error", "problem"),
    [
        ("profile.txt", UsageError, "name it profile.csv or profile.json"),
        ("profile.png", UsageError, "its picture profile.png beside it; name it profile.csv"),
        ("nowhere/profile.csv", UsageError, "there is no folder .*nowhere"),
        ("folder.csv", UsageError, "folder.csv cannot be written: it is a folder"),
        ("full.csv", ResourceError, "cannot write the memory profile .*No space left on device"),
    ],
)
def test_files_that_cannot_be_written(
    tmp_path: Path, name: str, error: type[Exception], problem: str
) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "full.csv").symlink_to("/dev/full")
    with MemoryProfile() as profile:
        pass
    with pytest.raises(error, match=problem):
        profile.write(tmp_path / name, {})


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    with MemoryProfile() as profile:
        pass
    with pytest.raises(ResourceError, match=r"cannot write the picture .*free some space"):
        draw_memory_profile(profile, {}, tmp_path / "nowhere" / "profile.png")


def test_without_proc_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil.Process, "memory_full_info", fail)
    with pytest.raises(ResourceError, match="needs /proc, leave it out here"), MemoryProfile():
        pass
