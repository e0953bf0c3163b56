"""The table of speed targets: which file a type takes, and when an aim is met."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import load, targets
from bench.errors import LlamaCppError
from bench.targets import (
    SPEED_TARGETS,
    Row,
    build_parser,
    find_model,
    format_rows,
    measure_targets,
    run_contest,
)
from edgeh2o.evaluation.throughput import Workload
from tests.bench.programs import BACKEND_LINE, install


def make_row(ours: list[float], theirs: list[float], **aim: float) -> Row:
    return Row(name="t", file="f", isa="avx2", unit="s", ours=ours, theirs=theirs, **aim)


def test_files_are_found_by_their_type(tmp_path: Path) -> None:
    for name in ("model-Q4_0.gguf", "model-q4_k_m.gguf"):
        (tmp_path / name).touch()
    assert find_model(tmp_path, "q4_0") == tmp_path / "model-Q4_0.gguf"
    assert find_model(tmp_path, "q8_0") is None
    (tmp_path / "other-q4_0.gguf").touch()
    with pytest.raises(LlamaCppError, match="more than one file of type q4_0"):
        find_model(tmp_path, "q4_0")


@pytest.mark.parametrize(
    ("ours", "aim", "is_met"),
    [
        ([30.0, 20.0, 90.0], {"least_ratio": 3.0}, True),
        ([29.0, 20.0, 90.0], {"least_ratio": 3.0}, False),
        ([9.0], {"greatest_ratio": 1.0}, True),
        ([11.0], {"greatest_ratio": 1.0}, False),
    ],
)
def test_an_aim_is_on_one_side_of_the_ratio_of_medians(
    ours: list[float], aim: dict[str, float], is_met: bool
) -> None:
    row = make_row(ours, [5.0, 10.0, 70.0], **aim)
    assert row.is_met is is_met
    assert format_rows([row]).splitlines()[2].strip("| ").endswith("yes" if is_met else "no")


def test_every_target_asks_more_of_the_wider_instruction_set() -> None:
    for target in SPEED_TARGETS:
        assert target.aim("avx512vnni") >= target.aim("avx2") > 1
        assert target.aim("avxvnni") == target.aim("avx2")


@pytest.mark.parametrize(
    ("speeds", "rounds"),
    [
        ({"sparse": 9.0, "fa off": 1.9, "fa on": 3.0}, {"sparse": 4, "fa off": 1, "fa on": 4}),
        ({"sparse": 1.0, "fa off": 3.0, "fa on": 2.0}, {"sparse": 4, "fa off": 4, "fa on": 4}),
        ({"sparse": 1.0, "fa off": 3.0, "fa on": 0.5}, {"sparse": 4, "fa off": 4, "fa on": 1}),
    ],
)
def test_the_peer_runs_on_in_the_way_that_is_not_far_behind(
    speeds: dict[str, float], rounds: dict[str, int]
) -> None:
    runs = {name: lambda _, speed=speed: speed for name, speed in speeds.items()}
    samples = run_contest(runs, Workload(n_prompt=1), 4, "test")
    assert samples == {name: [speeds[name]] * n for name, n in rounds.items()}


def test_start_and_memory_are_measured_with_the_flags_of_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model-q4_0.gguf").touch()
    install(tmp_path, "llama-completion", "echo token")
    install(tmp_path, "llama-bench", f"echo {BACKEND_LINE}")
    commands = []

    def run(command: list[str], _: object) -> load.ProcessCost:
        commands.append(command)
        return load.ProcessCost(float(len(commands)), 2**20)

    monkeypatch.setattr(load, "run_to_first_byte", run)
    monkeypatch.setattr(targets, "SPEED_TARGETS", ())
    monkeypatch.setattr(targets, "cut_prompt", lambda *_: "text")
    args = build_parser().parse_args(
        [str(tmp_path), "--llama-cpp", str(tmp_path), "-r", "1", "--isa", "avx2"]
    )
    start, memory = measure_targets(tmp_path, args)
    assert (start.ours, start.theirs) == ([3.0], [4.0])
    assert (memory.ours, memory.theirs) == ([1.0], [1.0])
    ours = [command for command in commands if "edgeh2o" in command]
    assert len(ours) == 4
    assert all(command[command.index("--packed-weights") + 1] == "off" for command in ours)


@pytest.mark.parametrize("missing", ["llama-completion", "llama-tokenize"])
def test_a_missing_program_ends_the_comparison_before_its_long_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    (tmp_path / "model-q4_0.gguf").touch()
    for program in {"llama-bench", "llama-completion", "llama-tokenize"} - {missing}:
        install(tmp_path, program, f"echo {BACKEND_LINE}")

    def run_contest(*_: object) -> None:
        raise AssertionError("a contest ran")

    monkeypatch.setattr(targets, "run_contest", run_contest)
    args = build_parser().parse_args([str(tmp_path), "--llama-cpp", str(tmp_path), "--isa", "avx2"])
    with pytest.raises(LlamaCppError, match=f"has no {missing}"):
        list(measure_targets(tmp_path, args))
