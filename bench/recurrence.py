"""What a token costs in the recurrence of a gated delta net: one by one, in chunks, and in ggml.

    python -m bench.recurrence [--ggml DIR] [--row-decays]

The recurrence alone, of layers with the heads of Qwen3.5-2B, on one thread: no projections, norms
or convolution. With --row-decays every row of a state decays by itself (Kimi Delta Attention).
ggml's operator is called in its shared libraries, which a build of llama.cpp has (--ggml: their
folder), with the same numbers; what comes out must agree. Times are medians of rounds in turn, of
the kernels and the operator alone: memory is there before.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeh2o import _core, _recurrent_kernels
from edgeh2o.evaluation.reporting import markdown_table

from .errors import LlamaCppError
from .reporting import run_script, write_report

N_HEADS, HEAD_DIM, COLUMNS = 16, 128, 32  # columns: of the slices that the kernels work on
TYPE_F32 = 0  # of ggml
GGML_MEMORY = 1 << 30

Floats = NDArray[np.float32]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.recurrence", description=__doc__)
    parser.add_argument("--isa", help="one instruction set (default: all but scalar)")
    parser.add_argument("--tokens", type=int, default=192, help="tokens (default: %(default)s)")
    parser.add_argument("--ggml", type=Path, help="folder of ggml's shared libraries")
    parser.add_argument("--row-decays", action="store_true", help="a decay of every row")
    parser.add_argument("-r", type=int, default=20, help="rounds (default: %(default)s)")
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    return parser


def main() -> int:
    """Measures and prints the table; returns the exit code."""
    args = build_parser().parse_args()
    isas = [args.isa] if args.isa else [i for i in _core.available_isas() if i != "scalar"]
    numbers = Numbers(args.tokens, HEAD_DIM if args.row_decays else 1)
    contestants: dict[str, Contestant] = {}
    for isa in isas:
        contestants[f"{isa}, one by one"] = OneByOne(numbers, isa)
        contestants[f"{isa}, in chunks"] = InChunks(numbers, isa)
    if args.ggml:
        contestants["ggml"] = GgmlOperator(args.ggml, numbers)
    reference = OneByOne(numbers, "scalar")
    reference.run()
    expected = reference.outputs()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(args.r):
        for name, contestant in contestants.items():
            contestant.prepare()
            started_at = time.perf_counter()
            contestant.run()
            seconds[name].append(time.perf_counter() - started_at)
            out = contestant.outputs()
            np.testing.assert_allclose(out, expected, atol=1e-4, err_msg=name)
    per_token = {name: float(np.median(of)) / args.tokens for name, of in seconds.items()}
    slowest = per_token.get("ggml", max(per_token.values()))
    rows = [(name, f"{1e6 * one:.1f}", f"{slowest / one:.1f}x") for name, one in per_token.items()]
    against = "against ggml" if args.ggml else "against the slowest"
    records: list[dict[str, Any]] = [
        {"contestant": name, "seconds_per_token": one} for name, one in per_token.items()
    ]
    title = f"{N_HEADS} heads of {HEAD_DIM}, {args.tokens} tokens, one thread"
    table = markdown_table(("kernel", "µs per token and layer", against), rows)
    write_report(args.output, [f"{title}\n\n{table}"], records)
    return 0


class Numbers:
    """A layer's queries, keys, values, gates and state."""

    def __init__(self, n_tokens: int, n_decays: int) -> None:
        random = np.random.default_rng(0)
        shape = (N_HEADS, n_tokens, HEAD_DIM)
        self.q, self.k, self.v = (random.standard_normal(shape).astype(np.float32) for _ in "qkv")
        for x in (self.q, self.k):
            x /= np.linalg.norm(x, axis=2, keepdims=True)
        decays = random.uniform(0.7, 1, (*shape[:2], n_decays)).astype(np.float32)
        self.decays = decays[:, :, 0] if n_decays == 1 else decays
        self.rates = random.uniform(0, 1, shape[:2]).astype(np.float32)
        n_slices = HEAD_DIM // COLUMNS
        state = random.standard_normal((N_HEADS, n_slices, HEAD_DIM, COLUMNS))
        self.state = state.astype(np.float32)
        slices = self.v.reshape(N_HEADS, n_tokens, n_slices, COLUMNS)
        self.slices = np.ascontiguousarray(slices.transpose(0, 2, 1, 3))


class Contestant(Protocol):
    """One way to compute the outputs; ``run`` alone is timed."""

    def prepare(self) -> None:
        """Puts the state back to where it begins."""

    def run(self) -> None:
        """Computes them."""

    def outputs(self) -> Floats:
        """Of the latest run: [heads, tokens, dimensions]."""


class _Kernel:
    """What a kernel of an instruction set works on, and writes to ``out``."""

    def __init__(self, numbers: Numbers, isa: str, out: Floats) -> None:
        self._numbers, self._isa, self._out = numbers, isa, out
        self._state = numbers.state.copy()

    def prepare(self) -> None:
        self._state[:] = self._numbers.state


class OneByOne(_Kernel):
    """The kernel that takes tokens one by one."""

    def __init__(self, numbers: Numbers, isa: str) -> None:
        super().__init__(numbers, isa, np.zeros_like(numbers.slices))

    def run(self) -> None:
        kernel, of = _recurrent_kernels.delta_net, self._numbers
        for head in range(N_HEADS):
            gates = of.decays[head], of.rates[head]
            slices = zip(of.slices[head], self._state[head], self._out[head], strict=True)
            for v, state, out in slices:
                kernel(self._isa, of.q[head], of.k[head], v, *gates, state, out, state)

    def outputs(self) -> Floats:
        return self._out.transpose(0, 2, 1, 3).reshape(self._numbers.v.shape)


class InChunks(_Kernel):
    """The kernel that takes them in chunks."""

    def __init__(self, numbers: Numbers, isa: str) -> None:
        super().__init__(numbers, isa, np.zeros_like(numbers.v))

    def run(self) -> None:
        kernel, of = _recurrent_kernels.delta_net_chunks, self._numbers
        parts = (of.q, of.k, of.v, of.decays, of.rates, self._state, self._out, self._state)
        for part in zip(*parts, strict=True):
            kernel(self._isa, *part)

    def outputs(self) -> Floats:
        return self._out


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class GgmlOperator:
    """ggml_gated_delta_net on the numbers, in a graph of this node alone."""

    def __init__(self, folder: Path, numbers: Numbers) -> None:
        base, self._cpu = _load_ggml(folder)
        self._n_tokens = numbers.q.shape[1]
        self._context = ctypes.c_void_p(base.ggml_init(_InitParams(GGML_MEMORY, None, False)))
        self._base = base
        by_token = [x.transpose(1, 0, 2) for x in (numbers.q, numbers.k, numbers.v)]
        logs = np.log(numbers.decays).reshape(*numbers.rates.shape, -1)  # [heads, tokens, 1 or dim]
        by_token += [logs.transpose(1, 0, 2), numbers.rates.T[:, :, None]]
        # Of every head: [column][row].
        state = numbers.state.transpose(0, 1, 3, 2).reshape(N_HEADS, HEAD_DIM, HEAD_DIM)
        inputs = [self._tensor(x) for x in (*by_token, state)]
        operation = base.ggml_gated_delta_net(self._context, *inputs, ctypes.c_int64(1))
        self._out = ctypes.c_void_p(operation)
        self._graph = ctypes.c_void_p(base.ggml_new_graph(self._context))
        base.ggml_build_forward_expand(self._graph, self._out)

    def prepare(self) -> None:
        """Nothing: its state after the tokens lies beside the one before them."""

    def run(self) -> None:
        if self._cpu.ggml_graph_compute_with_ctx(self._context, self._graph, 1) != 0:
            raise LlamaCppError("ggml did not compute its gated delta net")

    def outputs(self) -> Floats:
        rows = self._values(self._out, (self._n_tokens, N_HEADS, HEAD_DIM))
        return np.array(rows.transpose(1, 0, 2)) * np.float32(HEAD_DIM**0.5)  # it divides by it

    def _tensor(self, values: Floats) -> ctypes.c_void_p:
        sizes = (ctypes.c_int64(n) for n in reversed(values.shape))
        made = self._base.ggml_new_tensor_4d(self._context, TYPE_F32, *sizes, ctypes.c_int64(1))
        tensor = ctypes.c_void_p(made)
        self._values(tensor, values.shape)[:] = values
        return tensor

    def _values(self, tensor: ctypes.c_void_p, shape: tuple[int, ...]) -> Floats:
        address = self._base.ggml_get_data_f32(tensor)
        pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, shape)


def _load_ggml(folder: Path) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    backends = sorted(folder.glob("libggml-cpu*.so"))
    if len(backends) != 1 or not (folder / "libggml-base.so").exists():
        raise LlamaCppError(
            f"{folder} must hold libggml-base.so and one libggml-cpu*.so, and holds "
            f"{len(backends)} of the latter: copy those that are meant to a folder of their own"
        )
    base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(backends[0]), ctypes.RTLD_GLOBAL)
    for name in ("init", "new_tensor_4d", "get_data_f32", "gated_delta_net", "new_graph"):
        try:
            getattr(base, f"ggml_{name}").restype = ctypes.c_void_p
        except AttributeError:
            raise LlamaCppError(f"{folder / 'libggml-base.so'} has no ggml_{name}") from None
    cpu.ggml_cpu_init()
    return base, cpu


if __name__ == "__main__":
    run_script(main)
