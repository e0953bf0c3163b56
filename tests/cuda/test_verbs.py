"""Verbs on the host device give what they give on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeh2o import LLM, PrefillConfig, SamplingParams
from edgeh2o.cli.main import main
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model
from tests.cuda.host_library import SMALL
from tests.tiny_models import TinyModelFactory

pytestmark = pytest.mark.usefixtures("host_device")
SIZES = ["-b", "32", "-ub", "16"]
H2O = ["--attention", "h2o", "--h2o-local", "4", "--h2o-heavy", "4", *SIZES]
# The default rule, with pages recalled and landmarks.
# A device counts the keys of a landmark as equal.
HEADWISE = ["--budget", "12", "--headwise-max-past", "24", "--landmark-size", "8", *SIZES]
HEADWISE += ["--landmark-spread", "0"]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> str:
    return str(tiny_model(**SMALL))


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    values: dict[str, Any] = json.loads(captured.out)
    return values


@pytest.mark.parametrize("attention", [H2O, HEADWISE], ids=["h2o", "headwise"])
def test_perplexity(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], attention: list[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("the cat was on the mat and the dog is in the house that he has built " * 9)
    sizes = ["--ctx", "64", "--windows", "1", "--skip", "16", "-o", "json"]
    command = ["perplexity", model, "-f", str(text), *sizes, *attention]
    command += ["--quiet", "--attention-precision", "f32"]
    on_cpu, on_device = (report(capsys, *command, "--device", device) for device in ("cpu", "cuda"))
    for ours, theirs in zip(on_device["ranges"], on_cpu["ranges"], strict=True):
        assert ours["range"] == theirs["range"]
        assert ours["loss_percent"] == pytest.approx(theirs["loss_percent"], abs=0.05)
        assert ours["kl"] == pytest.approx(theirs["kl"], rel=0.02, abs=1e-5)


@pytest.mark.parametrize("attention", [H2O, HEADWISE, ["--attention", "dense", *SIZES]])
def test_a_session_goes_on_from_its_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], attention: list[str]
) -> None:
    """On the device that made it, and on the other."""
    words = ["--temp", "0", "--ignore-eos", "-n", "4", "--json", "--quiet", "-c", "128"]
    prompt = "the cat was on the mat and the dog"
    answers = []
    for first, second in (("cpu", "cpu"), ("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")):
        session = str(tmp_path / f"{first}-{second}")
        command = ["run", model, *words, *attention, "--session", session]
        report(capsys, *command, "-p", prompt, "--device", first)
        values = report(capsys, *command, "-p", prompt + " is in the house", "--device", second)
        assert values["cached_tokens"] > 0
        answers.append(values["text"])
    assert len(set(answers)) == 1


def test_needle(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """How probable the needle is, after a sparse and after a dense prefill."""
    sizes = ["--lengths", "200", "--depths", "0.4", "--places", "start", *H2O]
    command = ["needle", model, *sizes, "-o", "json", "--quiet", "--attention-precision", "f32"]
    on_cpu, on_device = (report(capsys, *command, "--device", device) for device in ("cpu", "cuda"))
    (ours,), (theirs,) = on_device["results"], on_cpu["results"]
    assert ours["dense_logprob"] == pytest.approx(theirs["dense_logprob"], abs=2e-3)
    assert ours["sparse_logprob"] == pytest.approx(theirs["sparse_logprob"], abs=2e-3)


def test_bench(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["-p", "40", "-n", "2", "-r", "1", "--budget", "8", *SIZES]
    rows = report(capsys, "bench", model, *sizes, "--device", "cuda", "-o", "json", "--quiet")[
        "results"
    ]
    assert {row["test"] for row in rows} == {"pp40", "tg2"}
    assert all(row["isa"].startswith("cuda:0") for row in rows)


@pytest.mark.parametrize("architecture", ["llama", "lfm2", "minicpm3"])
def test_a_prompt_goes_on_from_what_it_shares_with_the_last(
    tiny_model: TinyModelFactory, architecture: str
) -> None:
    """Tokens of a kept prompt are not read again: all of them, or those before they differ.

    With recurrent layers those before a mark.
    """
    model = tiny_model(**SMALL, architecture=architecture)
    text = "the cat was on the mat and the dog is in the house"
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    chunks = PrefillConfig(batch_size=32, chunk_size=16)
    found = []
    for device in ("cpu", "cuda"):
        with LLM(model, device=device, context_size=192, prefill=chunks, attention="dense") as llm:
            first = llm.generate(text, greedy, keep_cache=True)
            prompts = [text + first.text + " that he has", text + first.text, text[:30] + "hat"]
            results = [llm.generate(prompt, greedy, keep_cache=True) for prompt in prompts]
        found.append([(result.token_ids, result.stats.cached_tokens) for result in results])
    assert found[0] == found[1]
    assert found[0][0][1] > first.stats.prompt_tokens


def test_inspect_shows_what_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights in the formats of the GPU, cache and buffers; the host's part by itself."""
    sizes = ["-c", "4096", "--device", "cuda", "-b", "512", "--json"]
    memory = report(capsys, "inspect", model, *sizes)["memory_bytes"]
    assert memory["device"].startswith("cuda:0 (host device")
    with open_model(Path(model), open_device(0)) as file:
        loaded = file.load()
    # Blocks hold pieces at multiples of 256 bytes, and vectors too.
    assert 0 <= loaded.weight_bytes - memory["weights"] < 64 * 1024
    parts = ("weights", "kv_cache", "activations")
    assert memory["total"] == sum(memory[part] for part in parts)
    assert memory["available"] < 8 * 2**30
    assert memory["largest_context_that_fits"] == 4096
    assert memory["on_the_host"] > 0
