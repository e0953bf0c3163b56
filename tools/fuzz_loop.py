"""What the fuzz targets share: their command line, their mutations, what counts as a failure.

    python -m tools.fuzz_gguf --seconds 60 --corpus build/fuzz_gguf
    python -m tools.fuzz_gguf build/fuzz_gguf/failure-0123456789ab

With the ``atheris`` package libFuzzer drives the target by coverage. Without it a loop mutates
the seeds; an input whose outcome is new (the error message without its numbers and names) joins
them. A target may raise ``EdgeH2OError``; any other exception, an input that takes longer than
``MAX_INPUT_S`` or one that needs more than ``MAX_MEMORY_BYTES`` is a failure and ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from edgeh2o.errors import EdgeH2OError

MAX_INPUT_S = 10.0
MAX_MEMORY_BYTES = 2**30
MAX_MUTATIONS = 4
MAX_POOL = 2000
# Most of a file is data of which no value is wrong; most mutations go to its start.
HEAD_BYTES = 16 * 2**10
HEAD_SHARE = 0.9
EDGES = (0, 1, 2, 3, 31, 32, 33, 63, 64, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**31 - 1)
EDGES += (2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)

Target = Callable[[bytes], None]


def instrumented_imports() -> contextlib.AbstractContextManager[object]:
    """Modules imported inside are watched by atheris, where it is installed."""
    try:
        import atheris
    except ImportError:
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[object] = atheris.instrument_imports(
        include=["edgeh2o"]
    )
    return manager


def run_fuzzer(
    target: Target, seeds: Iterable[bytes], *, name: str, arguments: Sequence[str] | None = None
) -> int:
    """The command line of a fuzz target; returns the exit code.

    ``seeds`` are correct inputs. ``name`` is that of the tool.
    """
    options = _parse_arguments(name, arguments)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space_limit(), resource.RLIM_INFINITY))
    if options.inputs:
        return max(_run_one(target, path.read_bytes(), path.parent) for path in options.inputs)
    pool = list(seeds)
    folder = options.corpus or Path(f"build/{name}")
    folder.mkdir(parents=True, exist_ok=True)
    for content in pool:
        (folder / f"seed-{_fingerprint(content)}").write_bytes(content)
    try:
        import atheris
    except ImportError:
        pool += [path.read_bytes() for path in sorted(folder.glob("kept-*"))]
        return _mutate_until(target, pool, folder, options)
    command = [name, f"-max_total_time={options.seconds}", f"-seed={options.seed}", str(folder)]
    atheris.Setup(command, lambda content: _judge(target, content))
    atheris.Fuzz()  # ends the process
    return 0


def _parse_arguments(name: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    parser.add_argument("inputs", nargs="*", type=Path, help="run these files only")
    parser.add_argument("--seconds", type=int, default=60, help="how long to go on")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="inputs and failures")
    parser.add_argument("--seed", type=int, default=1, help="seed of the mutations")
    return parser.parse_args(arguments)


def _mutate_until(
    target: Target, pool: list[bytes], folder: Path, options: argparse.Namespace
) -> int:
    generator = random.Random(options.seed)
    outcomes = {_judge(target, content) for content in pool}
    end_at = time.monotonic() + options.seconds
    n_inputs = 0
    while time.monotonic() < end_at:
        content = mutate(generator, pool)
        n_inputs += 1
        try:
            outcome = _judge(target, content)
        except Exception:
            return _report_failure(content, folder)
        if outcome not in outcomes and len(pool) < MAX_POOL:
            outcomes.add(outcome)
            pool.append(content)
            if options.corpus is not None:
                (folder / f"kept-{_fingerprint(content)}").write_bytes(content)
    print(f"{n_inputs} inputs, {len(outcomes)} different outcomes, no failure")
    return 0


def _run_one(target: Target, content: bytes, folder: Path) -> int:
    try:
        print(_judge(target, content) or "accepted")
    except Exception:
        return _report_failure(content, folder)
    return 0


def _judge(target: Target, content: bytes) -> str:
    """The outcome of one input: empty when accepted, else the message without its details."""
    try:
        with _time_limit():
            target(content)
    except EdgeH2OError as error:
        return re.sub(r"'[^']*'|\d+|/\S+", "_", str(error))
    return ""


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"the input takes more than {MAX_INPUT_S:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_INPUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _report_failure(content: bytes, folder: Path) -> int:
    path = folder / f"failure-{_fingerprint(content)}"
    path.write_bytes(content)
    traceback.print_exc()
    print(f"the input is {path}", file=sys.stderr)
    return 1


def _fingerprint(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _address_space_limit() -> int | float:
    """What is in use now and ``MAX_MEMORY_BYTES``; no limit under a sanitizer, which maps TiBs."""
    import psutil

    used = int(psutil.Process().memory_info().vms)
    return resource.RLIM_INFINITY if used > 2**42 else used + MAX_MEMORY_BYTES


def mutate(generator: random.Random, pool: Sequence[bytes]) -> bytes:
    """One of ``pool`` with 1 to ``MAX_MUTATIONS`` changes."""
    content = bytearray(generator.choice(pool))
    for _ in range(generator.randint(1, MAX_MUTATIONS)):
        generator.choice(_MUTATIONS)(generator, content, pool)
    return bytes(content)


def _position(generator: random.Random, content: bytearray) -> int:
    is_head = generator.random() < HEAD_SHARE
    return generator.randrange(max(1, min(len(content), HEAD_BYTES if is_head else len(content))))


def _change_byte(generator: random.Random, content: bytearray, _: Sequence[bytes]) -> None:
    if content:
        content[_position(generator, content)] = generator.randrange(256)


def _flip_bit(generator: random.Random, content: bytearray, _: Sequence[bytes]) -> None:
    if content:
        content[_position(generator, content)] ^= 1 << generator.randrange(8)


def _write_edge(generator: random.Random, content: bytearray, _: Sequence[bytes]) -> None:
    """An integer of 1 to 8 bytes that programs get wrong, or one next to it."""
    width = generator.choice((1, 2, 4, 8))
    value = (generator.choice(EDGES) + generator.randint(-1, 1)) % 2 ** (8 * width)
    at = _position(generator, content)
    content[at : at + width] = value.to_bytes(width, "little")


def _cut(generator: random.Random, content: bytearray, _: Sequence[bytes]) -> None:
    del content[_position(generator, content) :]


def _remove(generator: random.Random, content: bytearray, _: Sequence[bytes]) -> None:
    at = _position(generator, content)
    del content[at : at + generator.randint(1, 64)]


def _repeat(generator: random.Random, content: bytearray, _: Sequence[bytes]) -> None:
    at = _position(generator, content)
    block = content[at : at + generator.randint(1, 64)]
    content[at:at] = block * generator.randint(1, 4)


def _splice(generator: random.Random, content: bytearray, pool: Sequence[bytes]) -> None:
    other = bytearray(generator.choice(pool))
    start, at = _position(generator, other), _position(generator, content)
    length = generator.randint(1, 256)
    content[at : at + length] = other[start : start + length]


_MUTATIONS = (_change_byte, _flip_bit, _write_edge, _write_edge, _cut, _remove, _repeat, _splice)
