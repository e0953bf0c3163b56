"""Records drafts of llama-server for tiny models, in tests/golden/drafters.json.

    python -m tools.update_drafter_goldens path/to/llama.cpp/build/bin

Of every case the tokens of a greedy answer, and of every draft the first candidates of each of its
tokens with their probabilities, as they stand in the log.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from bench.errors import LlamaCppError
from bench.llama_cpp import LlamaCpp
from tests.drafter_cases import CASES, FILE, N_DRAFTED, N_TOKENS, PROMPT

PORT = 18437
WAIT_S = 60.0
_CANDIDATE = re.compile(rb"draft candidate +(\d+), pos +(\d+): +(\d+) \( *([\d.]+)\)")


def record(llama_cpp: LlamaCpp, case: str) -> dict[str, object]:
    """The answer and the drafts of a case. Raises LlamaCppError if llama.cpp does not run it."""
    with tempfile.TemporaryDirectory(prefix="edgeh2o-golden-") as scratch:
        model, drafter = CASES[case].write_both(Path(scratch))
        log = Path(scratch) / "log"
        types = [f"{flag} f32" for flag in ("-ctk", "-ctv", "-ctkd", "-ctvd")]
        flags = f"--port {PORT} -t 1 -c 512 -np 1 -fa off --no-warmup -lv 5 {' '.join(types)}"
        flags += f" --spec-type {CASES[case].spec_type} --spec-draft-n-max {N_DRAFTED}"
        arguments = ["-m", str(model), "-md", str(drafter), *flags.split()]
        command = llama_cpp.command("llama-server", arguments)
        with log.open("wb") as out:
            server = subprocess.Popen(command, stdout=out, stderr=out, env=llama_cpp.environment())
            try:
                tokens = _ask(server)
            finally:
                server.terminate()
                server.wait()
        return {"tokens": tokens, "drafts": _read_drafts(log.read_bytes())}


def _ask(server: subprocess.Popen[bytes]) -> list[int]:
    request = {
        "prompt": PROMPT,
        "n_predict": N_TOKENS,
        "temperature": 0,
        "return_tokens": True,
        "ignore_eos": True,
    }
    body = json.dumps(request).encode()
    ends_at = time.monotonic() + WAIT_S
    while time.monotonic() < ends_at and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://localhost:{PORT}/completion", body) as answer:
                tokens: list[int] = json.load(answer)["tokens"]
                return tokens
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise LlamaCppError("llama-server gave no answer")


def _read_drafts(log: bytes) -> list[list[list[list[float]]]]:
    """By draft, token and candidate: its id and its probability."""
    drafts: list[list[list[list[float]]]] = []
    for rank, place, token, probability in _CANDIDATE.findall(log):
        if int(rank) == 0 and int(place) == 0:
            drafts.append([])
        if int(rank) == 0:
            drafts[-1].append([])
        drafts[-1][-1].append([int(token), float(probability)])
    return drafts


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="update_drafter_goldens", description=__doc__.split("\n")[0]
    )
    parser.add_argument("llama_cpp", type=Path, help="folder of llama.cpp's programs")
    options = parser.parse_args(arguments)
    llama_cpp = LlamaCpp(options.llama_cpp, threads=1)
    try:
        golden: dict[str, object] = {case: record(llama_cpp, case) for case in CASES}
        golden["version"] = llama_cpp.version()
    except (OSError, LlamaCppError) as error:
        print(f"update_drafter_goldens: error: {error}", file=sys.stderr)
        return 1
    FILE.write_text(json.dumps(golden) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
