"""Runs the programs of a llama.cpp build in a folder that the caller names.

The folder holds the programs and their shared libraries. The library path is set for the child
processes only, so several builds can be driven side by side.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeh2o.evaluation.throughput import Workload

from .errors import LlamaCppError
from .log_probabilities import WindowLogProbabilities, read_log_probabilities
from .saved_session import read_saved_tokens

# CPU backend of llama.cpp -> our instruction set with the same integer dot product. Backends
# without a counterpart here (skylakex: AVX-512 without VNNI) need an explicit choice.
ISA_OF_BACKEND = {
    "haswell": "avx2",
    "alderlake": "avxvnni",
    "cascadelake": "avx512vnni",
    "icelake": "avx512vnni",
    "cooperlake": "avx512vnni",
    "zen4": "avx512bf16",
    "armv8.0_1": "neon",
    "armv8.2_1": "neon_dotprod",
    "armv8.2_2": "neon_dotprod",
    "armv8.6_1": "neon_i8mm",
    "armv8.6_2": "neon_i8mm",
}
MOST_TRIES = 30
_VERSION_LINE = re.compile(r"^version: (.+)$", re.MULTILINE)
_BACKEND_LINE = re.compile(r"libggml-cpu-([\w.]+?)\.(?:so|dylib|dll)")


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """One folder of llama.cpp programs, run with a fixed number of threads."""

    folder: Path
    threads: int

    def backend(self) -> str:
        """Name of the CPU backend that this build loads here, such as ``haswell``.

        Raises LlamaCppError for a build without loadable backends.
        """
        result = self._run("llama-bench", ["--list-devices"])
        match = _BACKEND_LINE.search(result.stderr) or _BACKEND_LINE.search(result.stdout)
        if match is None:
            raise LlamaCppError(
                f"{self.folder} names no CPU backend; build it with GGML_BACKEND_DL and "
                "GGML_CPU_ALL_VARIANTS, or say with --isa which instruction set it uses"
            )
        return match.group(1)

    def version(self) -> str:
        """What ``llama-completion --version`` says: version, build and commit."""
        result = self._run("llama-completion", ["--version"])
        match = _VERSION_LINE.search(result.stdout + result.stderr)
        if match is None:
            raise LlamaCppError(f"llama-completion of {self.folder} names no version")
        return match.group(1)

    def isa(self) -> str:
        """Our instruction set that matches the backend. Raises LlamaCppError if none does."""
        backend = self.backend()
        if backend not in ISA_OF_BACKEND:
            raise LlamaCppError(
                f"{self.folder} uses the backend {backend}, which has no counterpart here; leave "
                f"one of {', '.join(ISA_OF_BACKEND)} in the folder, or give --isa"
            )
        return ISA_OF_BACKEND[backend]

    def tokenize(self, model: Path, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``, with the BOS token where the model asks for it."""
        options = [] if parse_special else ["--no-parse-special"]
        with _prompt_file(text) as prompt:
            result = self._run(
                "llama-tokenize",
                ["-m", str(model), "-f", str(prompt), "--no-escape", "--ids", *options],
            )
        return parse_token_ids(result.stdout)

    def embed(
        self, model: Path, text: str, *, pooling: str | None = None, power: int = -1
    ) -> list[list[float]]:
        """Vectors of a text of one line, with 7 digits behind the point: one, or one per token.

        ``pooling`` None: as the file says. ``power`` is that of the norm, -1 none.
        """
        n_tokens = len(self.tokenize(model, text)) + 1  # perhaps that which ends a text
        size = str(max(512, n_tokens))  # no less than the sequences that it has room for
        with _prompt_file(text) as prompt:
            arguments = [
                *("-m", str(model), "-f", str(prompt), "-c", size, "-b", size, "-ub", size),
                *("-t", str(self.threads), "--no-warmup", "-ctk", "f32", "-ctv", "f32"),
                *("-fa", "off", "--embd-output-format", "raw", "--embd-normalize", str(power)),
                *([] if pooling is None else ["--pooling", pooling]),
            ]
            for _ in range(MOST_TRIES):
                printed = self._run("llama-embedding", arguments).stdout
                if printed.endswith("\n\n"):  # it does not wait for its log, and may lose the end
                    return parse_vectors(printed)
        raise LlamaCppError(f"llama-embedding never printed all vectors\n{_tail(printed)}")

    def generate_greedily(
        self,
        model: Path,
        text: str,
        n_tokens: int,
        *,
        context_size: int,
        flash_attention: bool = False,
    ) -> list[int]:
        """The ``n_tokens`` most likely tokens after ``text``, end-of-generation tokens excluded.

        The ids are read from the session that llama.cpp saves, so that nothing depends on how
        text is printed. The last sampled token is not in it, hence one token more is asked for.
        """
        n_prompt_tokens = len(self.tokenize(model, text))
        with _prompt_file(text) as prompt:
            session = prompt.with_name("session.bin")
            arguments = [
                *self.completion_arguments(model, prompt, n_tokens + 1, context_size=context_size),
                *("-fa", "on" if flash_attention else "off"),
                *("--prompt-cache", str(session), "--prompt-cache-all", "--ignore-eos"),
            ]
            result = self._run("llama-completion", arguments)
            if not session.is_file():
                raise LlamaCppError(f"llama-completion saved no session\n{_tail(result.stderr)}")
            tokens = read_saved_tokens(session)
        return tokens[n_prompt_tokens : n_prompt_tokens + n_tokens]

    def completion_arguments(
        self, model: Path, prompt: Path, n_tokens: int, *, context_size: int
    ) -> list[str]:
        """Arguments of llama-completion for the bytes of the file ``prompt``, greedy."""
        return [
            *("-m", str(model), "-bf", str(prompt), "--no-escape", "-no-cnv"),
            *("-n", str(n_tokens), "--temp", "0", "-c", str(context_size)),
            *("-t", str(self.threads), "--no-display-prompt", "--no-warmup"),
        ]

    def log_probabilities(
        self,
        model: Path,
        text: str,
        *,
        context_size: int,
        n_windows: int,
        flash_attention: bool = False,
        cache_type: str = "f16",
    ) -> WindowLogProbabilities:
        """Log-probabilities of the whole vocabulary over the second half of each window.

        Raises LlamaCppError when ``text`` is shorter than ``n_windows``, or than the two windows
        that llama-perplexity asks for.
        """
        with tempfile.TemporaryDirectory(prefix="edgeh2o-bench-") as folder:
            saved = Path(folder) / "log_probabilities.bin"
            options = ["--save-all-logits", str(saved), "-ctk", cache_type, "-ctv", cache_type]
            options += ["-fa", "on" if flash_attention else "off"]
            result = self._run_perplexity(model, text, options, context_size, n_windows)
            if not saved.is_file() or not saved.stat().st_size:
                raise LlamaCppError(f"llama-perplexity saved nothing\n{_tail(result.stderr)}")
            return read_log_probabilities(saved)

    def perplexity(self, model: Path, text: str, *, context_size: int, n_windows: int) -> float:
        """Perplexity over the second half of each window. Errors as ``log_probabilities``."""
        options = ["-fa", "off"]
        result = self._run_perplexity(model, text, options, context_size, n_windows)
        return parse_perplexity(result.stdout + result.stderr)

    def dequantize(self, model: Path, output: Path) -> None:
        """Writes ``model`` with every weight as F32, 4 bytes per parameter, to ``output``."""
        arguments = ["--allow-requantize", str(model), str(output), "F32", str(self.threads)]
        self._run("llama-quantize", arguments)

    def time(
        self,
        model: Path,
        workload: Workload,
        *,
        batch_size: int,
        chunk_size: int,
        flash_attention: bool,
        warm_up: bool = True,
        more_arguments: Sequence[str] = (),
    ) -> float:
        """Tokens/s of one run of a workload on random tokens, by llama-bench."""
        arguments = [
            *self.bench_arguments(model, workload, flash_attention=flash_attention),
            *("-b", str(batch_size), "-ub", str(chunk_size)),
            *([] if warm_up else ["--no-warmup"]),
            *more_arguments,
        ]
        return parse_bench(self._run("llama-bench", arguments).stdout)

    def bench_arguments(
        self, model: Path, workload: Workload, *, flash_attention: bool
    ) -> list[str]:
        """Arguments of llama-bench for one run, which takes a test of prefill and one of decode
        where the workload names both."""
        return [
            *("-m", str(model), "-p", str(workload.n_prompt), "-n", str(workload.n_decode)),
            *(["-d", str(workload.depth)] if workload.depth else []),  # forks may lack it
            *("-t", str(self.threads), "-r", "1", "-o", "json"),
            *("-fa", "1" if flash_attention else "0"),
        ]

    def command(self, program: str, arguments: Sequence[str]) -> list[str]:
        """The command line of ``program``. Raises LlamaCppError if the folder has none."""
        path = self.folder / program
        if not path.is_file():
            raise LlamaCppError(f"{self.folder} has no {program}; build it as bench/README.md says")
        return [str(path.resolve()), *arguments]

    def environment(self) -> dict[str, str]:
        """The environment of child processes: this one's, with the folder's libraries first."""
        libraries = str(self.folder.resolve())
        paths = [libraries, os.environ.get("LD_LIBRARY_PATH", "")]
        return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}

    def _run_perplexity(
        self, model: Path, text: str, options: Sequence[str], context_size: int, n_windows: int
    ) -> subprocess.CompletedProcess[str]:
        n_tokens = len(self.tokenize(model, text, parse_special=False))
        n_needed = context_size * max(2, n_windows)
        if n_tokens < n_needed:
            raise LlamaCppError(
                f"the text has {n_tokens} tokens and {n_windows} windows of {context_size} need "
                f"{n_needed}; give a longer text or smaller windows"
            )
        size = str(context_size)
        with _prompt_file(text) as prompt:
            arguments = [
                *("-m", str(model), "-bf", str(prompt), "--no-escape"),
                *("-c", size, "-b", size, "-ub", size, "--chunks", str(n_windows)),
                *("-t", str(self.threads), "--no-warmup", *options),
            ]
            return self._run("llama-perplexity", arguments)

    def _run(self, program: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            self.command(program, arguments),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if result.returncode:
            raise LlamaCppError(
                f"{program} ended with code {result.returncode}\n{_tail(result.stderr)}"
            )
        return result


def parse_token_ids(stdout: str) -> list[int]:
    """Ids from the ``[1, 2, 3]`` line of ``llama-tokenize --ids``."""
    for line in reversed(stdout.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            return [int(field) for field in line[1:-1].split(",") if field.strip()]
    raise LlamaCppError(f"llama-tokenize printed no list of ids\n{_tail(stdout)}")


def parse_vectors(stdout: str) -> list[list[float]]:
    """The lines of numbers of ``llama-embedding --embd-output-format raw``."""
    rows = []
    for line in filter(None, map(str.strip, stdout.splitlines())):
        try:
            rows.append([float(field) for field in line.split()])
        except ValueError:
            continue
    if not rows or len({len(row) for row in rows}) > 1:
        raise LlamaCppError(f"llama-embedding printed no vectors\n{_tail(stdout)}")
    return rows


def parse_bench(stdout: str) -> float:
    """Tokens/s from the JSON of a llama-bench run with one test and one repetition."""
    try:
        tests: list[dict[str, Any]] = json.loads(stdout)
        (test,) = tests
        (tokens_per_second,) = test["samples_ts"]
        return float(tokens_per_second)
    except (ValueError, KeyError, TypeError) as error:
        raise LlamaCppError(
            f"llama-bench printed no single test: {error}\n{_tail(stdout)}"
        ) from None


def parse_perplexity(output: str) -> float:
    """The estimate over all windows that llama-perplexity prints at its end."""
    match = re.search(r"Final estimate: PPL = ([\d.]+)", output)
    if match is None:
        raise LlamaCppError(f"llama-perplexity printed no estimate\n{_tail(output)}")
    return float(match.group(1))


@contextmanager
def _prompt_file(text: str) -> Iterator[Path]:
    """A file with exactly the bytes of ``text`` in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="edgeh2o-bench-") as folder:
        path = Path(folder) / "prompt.txt"
        path.write_bytes(text.encode())
        yield path


def _tail(output: str, n_lines: int = 12) -> str:
    return "\n".join(output.rstrip().splitlines()[-n_lines:])
