"""Speed over the prompt length: results of several runs, how flat they are, and the picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.context_length import (
    DepthResult,
    LengthResult,
    Results,
    build_parser,
    draw,
    extend_context,
    format_tables,
    load_results,
    measure_length,
    merge,
    read_depths,
)
from bench.llama_cpp import LlamaCpp
from edgeh2o import isa
from edgeh2o.errors import EdgeH2OError
from edgeh2o.evaluation.throughput import Workload
from edgeh2o.formats.fingerprint import fingerprint_weights
from edgeh2o.formats.gguf import open_gguf
from tests.bench.tables import cells_of
from tests.evaluation.pictures import checked_picture, png_size
from tools.make_tiny_model import write_tiny_model


def make_results() -> Results:
    return Results(
        model="model-q4_0.gguf",
        isa="avx2",
        threads=2,
        lengths=[
            LengthResult(
                n_tokens=8192,
                samples={"sparse": [1100, 1000], "fa off": [90.0], "fa on": [100.0]},
            ),
            LengthResult(n_tokens=16384, samples={"sparse": [1000.0], "dense": [300.0]}),
        ],
        depths=[
            DepthResult(end=end, keys_per_query=900, seconds=[seconds, seconds + 1])
            for end, seconds in ((4096, 1.0), (8192, 2.0), (12288, 3.5), (16384, 4.3))
        ],
    )


def test_flatness_is_that_of_tokens_beyond_8192() -> None:
    header, lengths, depths, *flatness = format_tables(make_results())
    assert header == "model-q4_0.gguf, avx2, 2 threads"
    first, second = map(cells_of, lengths.splitlines()[2:])
    assert first == [
        "8,192",
        "1,050 (1,000 to 1,100)",
        "-",
        "100 (100 to 100)",
        "10.5x",
    ]
    assert second[2:] == ["300 (300 to 300)", "-", "-"]
    assert "| 4,096 to 8,192" in depths and "2.50 (2.00 to 3.00)" in depths
    assert "between 8,192 and 16,384 cost 20 % more" in flatness[0]
    assert "23 % by the fastest rounds" in flatness[0]
    assert "differ by 5 %" in flatness[1]


def test_short_prompts_say_nothing_about_flatness() -> None:
    results = make_results()
    short = replace(results, lengths=results.lengths[:1], depths=results.depths[:2])
    assert len(format_tables(short)) == 3
    assert len(format_tables(replace(short, depths=[]))) == 2


def test_runs_come_together(tmp_path: Path) -> None:
    results = make_results()
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"machine": {}, "results": asdict(results)}))
    loaded = load_results(path)
    assert loaded == results
    more = replace(
        results,
        lengths=[LengthResult(n_tokens=1024, samples={"dense": [5.0]}), results.lengths[1]],
        depths=results.depths[:1],
    )
    merged = merge([loaded, more])
    assert [length.n_tokens for length in merged.lengths] == [1024, 8192, 16384]
    assert merged.lengths[2].samples == {"sparse": [1000, 1000], "dense": [300, 300]}
    assert [len(depth.seconds) for depth in merged.depths] == [4, 2, 2, 2]
    with pytest.raises(EdgeH2OError, match="do not fit"):
        merge([results, replace(results, isa="avx512vnni")])


@pytest.mark.parametrize("text", ["", "[]", '{"results": {}}', '{"results": {"lengths": [1]}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(EdgeH2OError, match=r"results\.json is no result"):
        load_results(path)


def test_a_longer_context_keeps_the_weights(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf", context_length=512, rope_base=10000.0)
    assert extend_context(model, 512, tmp_path) == model
    longer = extend_context(model, 2048, tmp_path)
    assert longer != model
    with open_gguf(model) as before, open_gguf(longer) as after:
        assert after.metadata["llama.context_length"] == 2048
        # 32 rotated elements: the slowest pair turns 4 times as slowly.
        base = after.metadata["llama.rope.freq_base"]
        assert base == pytest.approx(10000.0 * 4 ** (32 / 30), rel=1e-6)
        assert fingerprint_weights(before) == fingerprint_weights(after)
        changed = {
            key for key in before.metadata if str(before.metadata[key]) != str(after.metadata[key])
        }
        assert changed == {"llama.context_length", "llama.rope.freq_base"}


def test_slow_contestants_run_once_without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, bool]] = []

    def fake_run(
        name: str, _model: Path, _peer: object, _isa: str, options: argparse.Namespace
    ) -> Callable[[Workload], float]:
        def run(workload: Workload) -> float:
            calls.append((name, workload.n_prompt, not options.no_warmup))
            return 1.0

        return run

    monkeypatch.setattr("bench.context_length.make_run", fake_run)
    args = build_parser().parse_args([__file__, "--isa", "x", "-r", "2", "--fa-off-up-to", "4096"])
    peer = LlamaCpp(Path(), 2)
    short = measure_length(4096, Path(), peer, args)
    names = ["sparse", "dense", "fa off", "fa on"]
    assert calls == [(name, 4096, True) for name in names * 2]
    assert short.samples == {name: [1.0, 1.0] for name in names}
    calls.clear()
    measure_length(16384, Path(), peer, args)
    once = [("dense", 16384, False), ("fa on", 16384, False)]
    assert calls == [("sparse", 16384, True), *once, ("sparse", 16384, True)]
    calls.clear()
    args.contestants = "dense,fa on"
    measure_length(16384, Path(), None, args)
    assert calls == [("dense", 16384, False)]


def test_every_depth_is_timed_and_its_keys_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.context_length.DEPTH_STEP", 64)
    model = write_tiny_model(tmp_path / "tiny.gguf", context_length=512)
    text = tmp_path / "text.txt"
    text.write_text("a short text ")
    arguments = [model, "--isa", isa.active(), "-r", "2", "--depth-tokens", "200", "--text", text]
    depths = [
        DepthResult(**depth)
        for depth in read_depths(build_parser().parse_args([*map(str, arguments)]))
    ]
    assert [len(depth.seconds) for depth in depths] == [2, 2, 2]
    # Below its budget a query reads everything before it.
    assert [depth.keys_per_query for depth in depths] == [32.5, 96.5, 160.5]


def test_the_picture_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("bench.context_length.picture", checked_picture)
    path = tmp_path / "lengths.png"
    draw(make_results(), path)
    width, height = png_size(path)
    assert width > 1000 and height > 500
