"""Who may use a model: one call, or one step of a stream, at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Thread, current_thread
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from ..errors import BusyError

if TYPE_CHECKING:
    from typing_extensions import Self

    from .generate import Generation, GenerationChunk
    from .results import GenerationResult
    from .stats import GenerationStats


class ExclusiveAccess:
    """Calls of several threads queue up; a stream that one of them reads keeps the others out.

    A stream is open from ``open`` to ``close``, or until nobody holds it or its thread has ended.
    In the thread that reads it a new call is let in: it ends the stream.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._user: Thread | None = None
        self._stream: ReferenceType[object] | None = None
        self._reader: Thread | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Waits for the calls of other threads. Raises BusyError for an open stream of theirs."""
        self._refuse_busy()
        with self._alone():
            self._refuse_busy()  # it may have been opened meanwhile
            yield

    @contextmanager
    def step(self, stream: object) -> Iterator[None]:
        """One step of ``stream``, in whatever thread; it then is that thread's stream."""
        with self._alone() as me:
            if self._is_open(stream):
                self._reader = me
            yield

    def open(self, stream: object) -> None:
        """Keeps other threads out until ``close``."""
        self._stream, self._reader = ref(stream), current_thread()

    def close(self, stream: object) -> None:
        """Lets other threads in, if ``stream`` is the one that is open."""
        if self._is_open(stream):
            self._stream = None

    def _is_open(self, stream: object) -> bool:
        return self._stream is not None and self._stream() is stream

    def _refuse_busy(self) -> None:
        stream, reader = self._stream, self._reader  # others may change them meanwhile
        is_open = stream is not None and stream() is not None
        if is_open and reader and reader.is_alive() and reader is not current_thread():
            raise BusyError(
                "another thread reads a stream of this model; read that to its end or close() it, "
                "or load a second LLM"
            )

    @contextmanager
    def _alone(self) -> Iterator[Thread]:
        me = current_thread()
        if self._user is me:
            raise BusyError("the model is at work; on_progress must not call it")
        with self._lock:
            self._user = me
            try:
                yield me
            finally:
                self._user = None


class GenerationStream(Iterator["GenerationChunk"]):
    """Chunks of one answer. ``result`` gives the whole of what was generated so far.

    A context manager, which closes it at the end. ``check(generation)`` is called before every
    token, and raises if it must not go on. Other threads are refused until the end, ``close`` or
    the last reference.
    """

    def __init__(
        self, generation: Generation, access: ExclusiveAccess, check: Callable[[Generation], None]
    ) -> None:
        self._generation = generation
        self._access = access
        self._check = check
        self._chunks = iter(generation)
        self._is_over = False
        access.open(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __next__(self) -> GenerationChunk:
        chunk = None
        with self._access.step(self):
            try:
                if not self._is_over:
                    self._check(self._generation)
                    chunk = next(self._chunks, None)
            finally:
                if chunk is None or chunk.finish_reason is not None:
                    self._end()
        if chunk is None:
            raise StopIteration
        return chunk

    def cut(self) -> None:
        """Lets the next token be the last one, as if it were that of ``max_tokens``."""
        self._generation.is_cut = True

    def close(self) -> None:
        """Ends the answer where it is; other threads may use the model, ``result`` stays."""
        with self._access.step(self):
            self._chunks.close()
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._access.close(self)

    def finish(self) -> GenerationResult:
        """Reads the stream to its end; returns the whole answer."""
        for _ in self:
            pass
        return self.result()

    def stats(self) -> GenerationStats:
        """Statistics so far, which cost the same however long the answer is."""
        return self._generation.stats()

    def result(self) -> GenerationResult:
        """Text, tokens and statistics so far; complete once the stream has ended."""
        return self._generation.result()
