"""Driving llama.cpp: recorded output is parsed, and stand-in programs see the right call."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.errors import LlamaCppError
from bench.llama_cpp import ISA_OF_BACKEND, LlamaCpp, parse_bench, parse_perplexity, parse_token_ids
from edgeh2o.evaluation.throughput import Workload
from tests.bench.programs import BACKEND_LINE, install

# Output of llama-bench -p 64 -n 0 -r 1 -o json, without the fields that nothing reads.
BENCH_JSON = """[
  {
    "build_number": 1,
    "backends": "CPU",
    "n_prompt": 64,
    "n_gen": 0,
    "avg_ts": 74.858100,
    "samples_ns": [ 854950588 ],
    "samples_ts": [ 74.8581 ]
  }
]
"""
ARM_BACKEND_LINE = "load_backend: loaded CPU backend from /opt/llama/libggml-cpu-armv8.2_1.so"


def test_reads_the_ids_after_other_lines() -> None:
    assert parse_token_ids("a note\n[19556, 905, 28]\n") == [19556, 905, 28]
    assert parse_token_ids("[]\n") == []


def test_says_what_was_printed_instead_of_ids() -> None:
    with pytest.raises(LlamaCppError, match="no list of ids\nfailed to load"):
        parse_token_ids("failed to load\n")


def test_reads_the_final_perplexity() -> None:
    output = "[1]20.1421,[2]19.0,\nFinal estimate: PPL = 19.5021 +/- 1.25341\n"
    assert parse_perplexity(output) == 19.5021
    with pytest.raises(LlamaCppError, match="no estimate\nout of memory"):
        parse_perplexity("out of memory\n")


def test_reads_the_sample_of_a_bench_run() -> None:
    assert parse_bench(BENCH_JSON) == 74.8581


@pytest.mark.parametrize(
    "output", ["", "[]", '[{"avg_ts": 1.0}]', BENCH_JSON.replace("74.8581 ", "74.8, 75.2 ")]
)
def test_a_bench_run_without_exactly_one_sample_is_an_error(output: str) -> None:
    with pytest.raises(LlamaCppError, match="no single test"):
        parse_bench(output)


@pytest.mark.parametrize(
    ("line", "backend", "isa"),
    [(BACKEND_LINE, "haswell", "avx2"), (ARM_BACKEND_LINE, "armv8.2_1", "neon_dotprod")],
)
def test_the_backend_gives_the_instruction_set(
    tmp_path: Path, line: str, backend: str, isa: str
) -> None:
    install(tmp_path, "llama-bench", f"echo '{line}' >&2")
    peer = LlamaCpp(tmp_path, threads=1)
    assert (peer.backend(), peer.isa()) == (backend, isa)


def test_a_backend_without_a_counterpart_names_the_ways_out(tmp_path: Path) -> None:
    assert "skylakex" not in ISA_OF_BACKEND
    line = BACKEND_LINE.replace("haswell", "skylakex")
    install(tmp_path, "llama-bench", f"echo '{line}' >&2")
    with pytest.raises(LlamaCppError, match=r"skylakex, which has no counterpart.*--isa"):
        LlamaCpp(tmp_path, threads=1).isa()


def test_a_build_without_loadable_backends_is_an_error(tmp_path: Path) -> None:
    install(tmp_path, "llama-bench", "true")
    with pytest.raises(LlamaCppError, match="GGML_CPU_ALL_VARIANTS"):
        LlamaCpp(tmp_path, threads=1).backend()


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match="has no llama-tokenize"):
        LlamaCpp(tmp_path, threads=1).tokenize(Path("model.gguf"), "text")


def test_a_failing_program_shows_its_last_lines(tmp_path: Path) -> None:
    install(tmp_path, "llama-tokenize", "echo 'no such model' >&2; exit 3")
    with pytest.raises(LlamaCppError, match="llama-tokenize ended with code 3\nno such model"):
        LlamaCpp(tmp_path, threads=1).tokenize(Path("model.gguf"), "text")


def test_programs_get_the_bytes_of_the_prompt_and_the_folders_libraries(tmp_path: Path) -> None:
    """The stand-in answers with the size of the prompt file and of the library path."""
    script = """while [ "$1" != -f ]; do shift; done
    echo "[$(wc -c < "$2"), ${#LD_LIBRARY_PATH}]" """
    install(tmp_path, "llama-tokenize", script)
    peer = LlamaCpp(tmp_path, threads=1)
    text = "line\r\n\\n literal\n"
    n_bytes, n_path = peer.tokenize(Path("model.gguf"), text)
    assert n_bytes == len(text.encode())
    assert n_path == len(peer.environment()["LD_LIBRARY_PATH"])
    assert peer.environment()["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path.resolve())


def test_a_text_shorter_than_the_windows_is_refused(tmp_path: Path) -> None:
    """llama-perplexity itself would end with code 0 and half a file."""
    install(tmp_path, "llama-tokenize", "echo '[1, 2, 3, 4, 5]'")
    peer = LlamaCpp(tmp_path, threads=1)
    with pytest.raises(LlamaCppError, match="5 tokens and 1 windows of 3 need 6"):
        peer.log_probabilities(Path("m.gguf"), "text", context_size=3, n_windows=1)


def test_a_bench_run_asks_for_one_repetition_of_one_test(tmp_path: Path) -> None:
    log = tmp_path / "arguments"
    (tmp_path / "output.json").write_text(BENCH_JSON)
    install(tmp_path, "llama-bench", f'echo "$@" > "{log}"; cat "{tmp_path}/output.json"')
    speed = LlamaCpp(tmp_path, threads=2).time(
        Path("m.gguf"),
        Workload(n_prompt=64),
        batch_size=4096,
        chunk_size=1024,
        flash_attention=True,
    )
    assert speed == 74.8581
    arguments = log.read_text().split()
    for pair in (("-p", "64"), ("-n", "0"), ("-t", "2"), ("-r", "1"), ("-fa", "1")):
        at = arguments.index(pair[0])
        assert tuple(arguments[at : at + 2]) == pair
    assert "-d" not in arguments  # which ik_llama.cpp has not got
