"""The fuzz loop finds what is planted, and the fuzz targets take their own seeds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edgeh2o.errors import FormatError
from edgeh2o.serving.api_error import ApiError
from tests.transformers.folders import MODEL_TYPES
from tools import fuzz_adapters, fuzz_loop, fuzz_requests, fuzz_safetensors, fuzz_tokenizer
from tools.fuzz_gguf import make_seeds, make_target


def _refuse_all_but_zero(content: bytes) -> None:
    """Accepts a first byte of 0, refuses others, and has a defect for short inputs."""
    if len(content) < 4:
        raise IndexError("a defect")
    if content[0]:
        raise FormatError(f"first byte is {content[0]}")


def _run(target: fuzz_loop.Target, folder: Path, *arguments: str) -> int:
    return fuzz_loop.run_fuzzer(
        target,
        [bytes(8)],
        name="fuzz_test",
        arguments=["--seconds", "5", "--corpus", str(folder), *arguments],
    )


@pytest.fixture(autouse=True)
def _no_limit_for_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_loop.resource, "setrlimit", lambda *_: None)
    monkeypatch.setitem(fuzz_loop.sys.modules, "atheris", None)


def test_an_unexpected_exception_ends_the_run_and_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(_refuse_all_but_zero, tmp_path) == 1
    (failure,) = tmp_path.glob("failure-*")
    assert f"the input is {failure}" in capsys.readouterr().err
    assert fuzz_loop.run_fuzzer(
        _refuse_all_but_zero, [], name="fuzz_test", arguments=[str(failure)]
    )


def test_refusals_are_no_failures_and_new_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(fuzz_loop.time, "monotonic", lambda: next(clock) / 100)

    def target(content: bytes) -> None:
        _refuse_all_but_zero(content + bytes(4))

    assert _run(target, tmp_path) == 0
    assert "2 different outcomes, no failure" in capsys.readouterr().out
    assert len(list(tmp_path.glob("seed-*"))) == 1
    assert len(list(tmp_path.glob("kept-*"))) == 1


def test_a_slow_input_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_loop, "MAX_INPUT_S", 0.01)

    def hang(content: bytes) -> None:
        while content != bytes(8):
            pass

    assert _run(hang, tmp_path) == 1


def test_mutations_are_reproducible_and_change_the_input() -> None:
    pool = [bytes(range(64)), b""]
    runs = [
        [fuzz_loop.mutate(generator, pool) for _ in range(200)]
        for generator in (random.Random(7), random.Random(7))
    ]
    assert runs[0] == runs[1]
    assert sum(content not in pool for content in runs[0]) > 150


def test_the_target_accepts_its_seeds(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    seeds = list(make_seeds())
    assert len(set(seeds)) == len(seeds)
    for content in seeds:
        target(content)


def test_the_safetensors_target_accepts_its_seeds(tmp_path: Path) -> None:
    target = fuzz_safetensors.make_target(tmp_path)
    seeds = list(fuzz_safetensors.make_seeds())
    assert len(set(seeds)) == len(seeds) == len(MODEL_TYPES)
    for content in seeds:
        target(content)


def test_the_adapter_target_accepts_its_seeds(tmp_path: Path) -> None:
    target = fuzz_adapters.make_target(tmp_path)
    seeds = list(fuzz_adapters.make_seeds())
    assert len(set(seeds)) == len(seeds) > len(fuzz_adapters.ARCHITECTURES)
    for content in seeds:
        target(content)


def test_the_tokenizer_target_accepts_its_seeds_and_passes_over_what_is_no_input() -> None:
    seeds = list(fuzz_tokenizer.make_seeds())
    assert len(set(seeds)) == len(seeds)
    for content in (*seeds, b"", b"[]", b'{"text": 1, "metadata": {}}'):
        fuzz_tokenizer.build_and_encode(content)
    with pytest.raises(FormatError, match="has no tokenizer"):
        fuzz_tokenizer.build_and_encode(b'{"text": "a", "metadata": {}}')


def test_the_request_target_accepts_its_seeds_and_wants_client_errors() -> None:
    target = fuzz_requests.RequestTarget()
    seeds = list(fuzz_requests.make_seeds())
    assert len(set(seeds)) == len(seeds)
    for content in seeds:
        target(content)
    for content in (b"", b"/v1/completions\n[]", b'x\n{"messages": []}'):
        with pytest.raises(ApiError):
            target(content)
