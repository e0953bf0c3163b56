"""Many requests of a file, in the form of OpenAI's batches; a run that was killed goes on.

Every result is one line of the output file, written and synced as it comes, with the id and a hash
of its request. A second run keeps the whole lines, reads a line that was cut off again, and answers
what is missing.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..errors import EdgeH2OError, ResourceError, UsageError
from ..sampling_config import SamplingParams
from .answer_format import AnswerFormat
from .api_error import ApiError, as_api_error
from .events import Event, Finished, Piece
from .fields import parse_body
from .openai_format import ChatFormat, TextFormat
from .requests import read_chat_request, read_text_request
from .ticket import Ticket

if TYPE_CHECKING:
    from .answers import AnswerEngine

MAX_LINE_BYTES = 32 * 2**20
_HASH_BYTES = 16
_ID_PREFIX = "batch_req_"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

OnDone = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A line of the input: its id, its path of the interface, the body, and a hash of all."""

    custom_id: str
    url: str
    body: bytes
    digest: str


def read_items(path: Path) -> list[BatchItem]:
    """The requests of a file, which may begin with a byte-order mark.

    Raises UsageError that names the line that is none.
    """
    items: list[BatchItem] = []
    seen: set[str] = set()
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(_bounded_lines(path, lines), start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    item = _read_item(f"{path}, line {number}", line)
                    if item.custom_id in seen:
                        raise UsageError(
                            f"{path}, line {number}: the id {item.custom_id!r:.80} is there twice"
                        )
                    seen.add(item.custom_id)
                    items.append(item)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if not items:
        raise UsageError(f"{path} holds no requests")
    return items


def _bounded_lines(path: Path, lines: IO[bytes]) -> Iterator[bytes]:
    while line := lines.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise UsageError(f"{path} has a line of more than {MAX_LINE_BYTES // 2**20} MiB")
        yield line


def _read_item(place: str, line: bytes) -> BatchItem:
    try:
        fields = parse_body(line)
        custom_id, url = fields.text("custom_id"), fields.text("url", CHAT)
        body = fields.mapping("body")
    except ApiError as error:
        raise UsageError(f"{place}: {error}") from None
    if not custom_id or not body:
        raise UsageError(f"{place}: a request needs a custom_id and a body")
    if url not in (CHAT, TEXT):
        raise UsageError(f"{place}: the url must be {CHAT} or {TEXT}")
    data = json.dumps(body, sort_keys=True).encode()
    digest = hashlib.blake2b(f"{custom_id}\0{url}\0".encode() + data, digest_size=_HASH_BYTES)
    return BatchItem(custom_id, url, data, digest.hexdigest())


class ResultFile:
    """The output: whole lines of earlier runs stay, a last one that was cut off goes.

    ``done`` are the hashes of the requests that have a result, ``refused`` of those whose result
    is an error. One process at a time has it. Raises UsageError for a file that is something else,
    which stays as it is, ResourceError for one that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: set[str] = set()
        self.refused: set[str] = set()
        try:
            is_there = path.exists()
            if is_there and not path.is_file():
                raise UsageError(
                    f"results need a regular file, from which a later run goes on, and {path} is "
                    "none; name another one"
                )
            self._file = path.open("r+b" if is_there else "w+b")
        except OSError as error:
            raise ResourceError(f"cannot write {path}: {error.strerror}") from None
        try:
            self._lock_file()
            end = self._read_back()
            self._file.truncate(end)
            self._file.seek(end)
        except BaseException:
            self._file.close()
            raise

    def _lock_file(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another run writes to {self._path}") from None

    def _read_back(self) -> int:
        """Takes in the results that are there; returns where the last whole line ends."""
        end = 0
        for number, line in enumerate(_bounded_lines(self._path, self._file), start=1):
            if not line.endswith(b"\n"):
                if not _may_be_cut_off(line):
                    raise self._refuse_line(number)
                break
            try:
                value = json.loads(line)
                self._note(value["request_hash"], value)
            except (ValueError, TypeError, KeyError, RecursionError):
                raise self._refuse_line(number) from None
            end += len(line)
        return end

    def _refuse_line(self, number: int) -> UsageError:
        return UsageError(
            f"{self._path}, line {number}, is no result of a batch; name another file"
        )

    def _note(self, digest: str, result: Mapping[str, Any]) -> None:
        self.done.add(digest)
        if result["error"] is not None:
            self.refused.add(digest)

    def add(self, item: BatchItem, result: Mapping[str, Any]) -> None:
        """Writes a result to the disk."""
        line = json.dumps(
            {
                "id": f"{_ID_PREFIX}{secrets.token_hex(12)}",
                "custom_id": item.custom_id,
                **result,
                "request_hash": item.digest,
            },
            ensure_ascii=False,
        )
        try:
            self._file.write(line.encode("utf-8") + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ResourceError(
                f"cannot write {self._path}: {error.strerror}; free some space and run it again"
            ) from None
        self._note(item.digest, result)

    def count_refused(self, items: Sequence[BatchItem]) -> int:
        """How many of the requests have an error, of this run or one before it."""
        return sum(item.digest in self.refused for item in items)

    def close(self) -> None:
        """Lets others write."""
        with suppress(OSError):  # of a line that could not be written; ``add`` has said so
            self._file.close()


def _may_be_cut_off(line: bytes) -> bool:
    """Whether a line without an end is the beginning of a result; power failures leave zeros."""
    begins = f'{{"id": "{_ID_PREFIX}'.encode()
    line = line.rstrip(b"\0")
    return line.startswith(begins) or begins.startswith(line)


def run_batch(
    engine: AnswerEngine,
    items: Sequence[BatchItem],
    results: ResultFile,
    *,
    model_name: str,
    sampling: SamplingParams,
    parallel: int = 1,
    on_done: OnDone | None = None,
) -> None:
    """Answers what has no result yet, ``parallel`` at once.

    A request that is refused gets a line with its error; only what nobody meant ends the run. The
    first request is read alone where several begin alike, so that the others find it.
    """
    left = deque(item for item in items if item.digest not in results.done)
    n_done = len(items) - len(left)
    if on_done is not None:
        on_done(n_done, len(items))
    running: dict[Future[dict[str, Any]], tuple[BatchItem, Ticket]] = {}
    threads = ThreadPoolExecutor(parallel, thread_name_prefix="edgeh2o-batch")
    try:
        width = 1
        while left or running:
            while left and len(running) < width:
                item, ticket = left.popleft(), Ticket()
                work = threads.submit(answer_item, engine, item, model_name, sampling, ticket)
                running[work] = item, ticket
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            # What is ready is written, whichever of them ends the run.
            for future in sorted(finished, key=lambda future: future.exception() is not None):
                item, _ = running.pop(future)
                results.add(item, future.result())
                n_done += 1
                if on_done is not None:
                    on_done(n_done, len(items))
            width = parallel
    finally:
        for _, ticket in running.values():
            ticket.cancel("the batch was interrupted")
        threads.shutdown(cancel_futures=True)


def answer_item(
    engine: AnswerEngine,
    item: BatchItem,
    model_name: str,
    sampling: SamplingParams,
    ticket: Ticket | None = None,
) -> dict[str, Any]:
    """What a line says besides its ids: a response, or the error of a request that is refused.

    Raises EdgeH2OError for what is not the request's fault.
    """
    ticket = ticket or Ticket()
    is_chat = item.url == CHAT
    events: list[Event] = []
    try:
        read = read_chat_request if is_chat else read_text_request
        request = read(parse_body(item.body), sampling)
        name = engine.adapters.name_of_answer(request, model_name)
        form: AnswerFormat = ChatFormat(name) if is_chat else TextFormat(name)
        engine.answer(request, events.append, ticket)
    except EdgeH2OError as error:
        ticket.require()  # an interrupt is no result
        told = as_api_error(error)
        if told.status >= 500:  # not the request's fault: the next run may have more luck
            raise
        body = told.to_dict()
        return {"response": _response(told.status, body), "error": body["error"]}
    pieces = [event for event in events if isinstance(event, Piece)]
    last = events[-1]
    assert isinstance(last, Finished)
    return {"response": _response(200, form.whole(pieces, last)), "error": None}


def _response(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": body}
