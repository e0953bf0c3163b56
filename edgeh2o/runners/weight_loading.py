"""Reads and packs the weights of a GGUF file on a thread of its own."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Protocol

from .. import _core
from ..formats.gguf import GgufFile
from ..formats.open_file import truncated, unreadable
from ..models.tensors import TensorBinding

OnBytes = Callable[[int, int], None]
REPORT_INTERVAL_S = 0.05
POOL_BLOCK_BYTES = 32 * 2**20  # as cpp/base/arena.cc


class Reader(Protocol):
    """Reads tensors of a file into the model of the core, as ``_core.WeightReader`` does."""

    @property
    def n_bytes_done(self) -> int: ...

    def run(self) -> None: ...
    def take_all_threads(self) -> None: ...
    def cancel(self) -> None: ...


class WeightLoading:
    """A context manager: the work begins where it is entered and is over where it is left.

    It needs no Python, so that the thread that waits for it can do something else before: the
    tokenizer of a vocabulary of 49,000 takes as long as the weights of a model of 135M. It leaves
    a core to that thread until it waits. ``n_bytes`` are to be read in all.
    """

    def __init__(self, readers: Sequence[tuple[Path, Reader]], n_bytes: int) -> None:
        """``readers``: what packs the weights of each file, ``n_bytes`` in all, in this order."""
        self._readers, self.n_bytes = readers, n_bytes
        self._is_left = False
        self._error: BaseException | None = None
        # Waited for instead of the thread, which an interrupted join() takes for ended (3.12).
        self._is_over = Event()
        self._thread = Thread(target=self._run, name="edgeh2o-load")

    @property
    def n_bytes_done(self) -> int:
        """Bytes of the file that were packed."""
        return sum(reader.n_bytes_done for _, reader in self._readers)

    def __enter__(self) -> WeightLoading:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_left = True
        for _, reader in self._readers:
            reader.cancel()
        self._is_over.wait()
        self._thread.join()

    def wait(self, on_bytes: OnBytes | None = None) -> None:
        """Returns when all is packed; ``on_bytes(done, total)`` is called meanwhile and then.

        Raises FormatError and ResourceError for a file that cannot be read any more, ValueError
        for a tensor that the core does not take, MemoryError.
        """
        for _, reader in self._readers:
            reader.take_all_threads()
        reported = 0
        while not self._is_over.wait(None if on_bytes is None else REPORT_INTERVAL_S):
            if on_bytes is not None and (done := self.n_bytes_done) > reported:
                on_bytes(done, self.n_bytes)
                reported = done
        if self._error is not None:
            raise self._error
        if on_bytes is not None and self.n_bytes > reported:  # it was ready before the wait
            on_bytes(self.n_bytes, self.n_bytes)

    def _run(self) -> None:
        try:
            for path, reader in self._readers:
                if self._is_left:
                    return
                try:
                    reader.run()
                except EOFError:
                    raise truncated(path) from None
                except OSError as error:
                    raise unreadable(path, error) from None
        except BaseException as error:  # for the thread that waits
            self._error = error
        finally:
            self._is_over.set()


def readers_of(
    core_model: _core.Model | _core.DeviceModel, file: GgufFile, bindings: Iterable[TensorBinding]
) -> list[tuple[Path, Reader]]:
    """A reader for the tensors of every file of a GGUF model."""
    by_file: dict[GgufFile, list[TensorBinding]] = {}
    for binding in bindings:
        by_file.setdefault(file.source(binding.info), []).append(binding)
    return [
        (
            each.path,
            _core.WeightReader(core_model, each.fileno(), [_source(item) for item in items]),
        )
        for each, items in by_file.items()
    ]


def mapped_bytes(sizes: Iterable[int]) -> int:
    """Addresses that tensors of these sizes take: blocks, and one of its own for a larger one."""
    total = left = 0
    for size in sizes:
        if size > left:
            left = max(size, POOL_BLOCK_BYTES)
            total += left
        left -= size
    return total


def _source(item: TensorBinding) -> tuple[str, str, int, int, int, int, array[int] | None]:
    first_byte = item.info.offset + item.first_byte
    shape = (item.n_rows, item.info.cols)
    return (item.name, item.info.type_name, first_byte, item.n_bytes, *shape, item.row_order)
