"""Prefill and decode of a model that is larger than memory, whose weights are read from the disk.

Every run is a process in a control group with a limit of memory, and of the disk if one is named;
nothing of the files is in the page cache at its start. Making the group needs root. llama.cpp maps
the model file, and must not repack its weights, which would take memory for all of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from edgeh2o.evaluation.reporting import format_samples, markdown_table

from .errors import LlamaCppError
from .llama_cpp import LlamaCpp, parse_bench
from .prefill import contest_parser, parse_own_bench, parse_sizes
from .reporting import existing_file, print_progress, run_script, write_report

MIB = 2**20
GROUPS = Path("/sys/fs/cgroup")
GROUP = "edgeh2o-bench"
WARM_UP_TOKENS = 8  # our first run writes the packed weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Tokens/s of both sides by test, such as ``pp512`` and ``tg32``."""

    model: str
    test: str
    memory_mib: int
    disk_mb_s: int | None
    ours: list[float]
    theirs: list[float]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = contest_parser("python -m bench.beyond_memory", __doc__)
    parser.add_argument("models", type=existing_file, nargs="+", metavar="MODEL")
    parser.add_argument("--memory", type=int, required=True, metavar="MIB", help="limit of memory")
    parser.add_argument("--disk", type=int, metavar="MB/S", help="limit of reading (default: none)")
    parser.add_argument("--packed-weights", type=Path, metavar="FOLDER", help="where ours are kept")
    parser.add_argument("-p", type=parse_sizes, default=(512,), help="prompt lengths in tokens")
    parser.add_argument("-n", type=parse_sizes, default=(32,), help="numbers of tokens to decode")
    parser.set_defaults(r=3)
    return parser


def main() -> int:
    """Runs everything, prints one table; returns the exit code."""
    args = build_parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="edgeh2o-") as temporary:
        folder = args.packed_weights or Path(temporary)
        with limited_group(args.memory, args.disk) as groups:
            measurements = [
                each
                for model in args.models
                for peer_folder in args.llama_cpp
                for each in _contest(
                    args, LlamaCpp(peer_folder, args.threads), model, folder, groups
                )
            ]
    disk = "as it is" if args.disk is None else f"of {args.disk} MB/s"
    note = (
        f"{args.memory} MiB of memory, a disk {disk}; medians of {args.r} runs in turn (lowest to "
        f"highest), {args.threads} threads, dense."
    )
    header = ("file", "test", "edgeh2o", "llama.cpp", "ratio")
    rows = [
        (
            each.model,
            each.test,
            format_samples(each.ours, 1),
            format_samples(each.theirs, 1),
            f"{statistics.median(each.ours) / statistics.median(each.theirs):.1f}x",
        )
        for each in measurements
    ]
    table = markdown_table(header, rows)
    write_report(args.output, [note, table], [asdict(each) for each in measurements])
    return 0


def _contest(
    args: argparse.Namespace, peer: LlamaCpp, model: Path, folder: Path, groups: Sequence[Path]
) -> list[Measurement]:
    isa = args.isa or peer.isa()
    tests = [("-p", n) for n in args.p] + [("-n", n) for n in args.n]
    own = [sys.executable, "-m", "edgeh2o", "bench", str(model), "--isa", isa, "-r", "1"]
    own += ["-t", str(args.threads), "-b", str(args.batch_size), "--modes", "dense", "-o", "json"]
    own += ["--packed-weights", str(folder)]
    theirs = [*peer.command("llama-bench", ["-m", str(model), "-r", "1", "-o", "json"])]
    theirs += ["-t", str(args.threads), "-b", str(args.batch_size), "-ub", str(args.chunk_size)]
    theirs += ["--no-warmup", "--repack", "0", "-lm", "mmap", *args.llama_bench_args]
    print_progress(f"{model.name}: packed weights")
    _run([*own, "-p", str(WARM_UP_TOKENS), "-n", "0"], dict(os.environ), groups)
    measurements = []
    for flag, number in tests:
        test = f"{'pp' if flag == '-p' else 'tg'}{number}"
        sizes = ["-p", str(number), "-n", "0"] if flag == "-p" else ["-p", "0", "-n", str(number)]
        ours_tps, theirs_tps = [], []
        for round_number in range(args.r):
            print_progress(f"{model.name}: {test}, round {round_number + 1} of {args.r}")
            drop_pages([model, *folder.glob("*.packed")])
            ours_tps.append(parse_own_bench(_run([*own, *sizes], dict(os.environ), groups)))
            drop_pages([model, *folder.glob("*.packed")])
            theirs_tps.append(parse_bench(_run([*theirs, *sizes], peer.environment(), groups)))
        measurements.append(
            Measurement(
                model=model.name,
                test=test,
                memory_mib=args.memory,
                disk_mb_s=args.disk,
                ours=ours_tps,
                theirs=theirs_tps,
            )
        )
    return measurements


def drop_pages(paths: Sequence[Path]) -> None:
    """Takes files out of the page cache, as far as they are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def limited_group(memory_mib: int, disk_mb_s: int | None) -> Iterator[list[Path]]:
    """Folders of control groups, of version 2 or 1, that limit whoever is written to them."""
    is_version_2 = (GROUPS / "cgroup.controllers").exists()
    groups: dict[Path, dict[str, str]] = {}
    limit = str(memory_mib * MIB)
    if is_version_2:
        groups[GROUPS / GROUP] = {"memory.max": limit, "memory.swap.max": "0"}
    else:
        groups[GROUPS / "memory" / GROUP] = {"memory.limit_in_bytes": limit}
    if disk_mb_s is not None:
        device = _disk_of(Path.cwd())
        rate = disk_mb_s * 10**6
        if is_version_2:
            groups[GROUPS / GROUP]["io.max"] = f"{device} rbps={rate}"
        else:
            name = "blkio.throttle.read_bps_device"
            groups[GROUPS / "blkio" / GROUP] = {name: f"{device} {rate}"}
    if is_version_2:
        (GROUPS / "cgroup.subtree_control").write_text("+memory +io")
    try:
        for folder, limits in groups.items():
            folder.mkdir(exist_ok=True)
            for name, value in limits.items():
                if name != "memory.swap.max" or (folder / name).exists():
                    (folder / name).write_text(value)
        yield list(groups)
    finally:
        for folder in groups:
            if folder.exists():
                folder.rmdir()


def _disk_of(path: Path) -> str:
    """Its number, of the whole disk where a part of it is named."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    part = Path("/sys/dev/block") / number
    if (part / "partition").exists():
        return (part.resolve().parent / "dev").read_text().strip()
    return number


def _run(command: Sequence[str], environment: Mapping[str, str], groups: Sequence[Path]) -> str:
    """What a process in the groups prints. Raises LlamaCppError where it fails."""
    joins = "".join(f"echo $$ > {folder}/cgroup.procs; " for folder in groups)
    result = subprocess.run(
        ["sh", "-c", f'{joins}exec "$@"', "sh", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise LlamaCppError(f"{command[0]} failed ({result.returncode}): {result.stderr[-500:]}")
    return result.stdout


if __name__ == "__main__":
    run_script(main)
