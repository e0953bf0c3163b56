"""Session files: a prompt that was read, to go on from later.

Layout, little-endian: magic, format version (u32), length of the header (u32), the header in JSON,
then the parts whose sizes it gives: token ids (i32), the document (JSON text of the caller), the
state of the core, the logits after the prompt (f32), what is noted at each mark, the rows of the
cache; at the end the BLAKE2b hash of everything before it. The header also holds the fingerprint of
what made the file: model, attention, chunk size and cache type; whether its budgets are from
prompts (``is_taught``), and the positions of its session (``context``). Older files lack these two,
and marks.

A file is checked as a whole before anything of it is used.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError, ResourceError, UsageError
from ..formats.atomic_file import replacing
from ..runners.base import Runner, RunnerState
from .context_size import choose_context, rotate_alike
from .saved_plan import SCALES, is_alike

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .plan import RunPlan

MAGIC = b"EH2OSESS"
FORMAT_VERSION = 2
MAX_HEADER_BYTES = 2**20
DIGEST_BYTES = 32
_PREFIX = struct.Struct("<8sII")
_BLOCK_BYTES = 2**20
_SIZES = ("token_bytes", "document_bytes", "core_bytes", "logit_bytes", "row_bytes")
_OPTIONAL = {"rope", "keys", SCALES}  # of a fingerprint
_OTHER_FILE = "name another file with --session"
_CURE = f"delete it, or {_OTHER_FILE}"


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A file that was found good. ``restore`` reads the cached rows, once."""

    state: RunnerState
    document: Mapping[str, Any]
    context: int
    _file: IO[bytes]
    _row_bytes: int

    def restore(self, runner: Runner) -> None:
        """Lets ``runner`` take up what was saved. Raises FormatError, and then it holds nothing."""
        self.state.restore(runner)
        try:
            self.fill(runner.cached_rows())
        except BaseException:
            runner.reset()
            raise

    def fill(self, rows: Iterable[NDArray[np.uint8]]) -> None:
        """Reads into ``rows``. Raises FormatError if they are not as many as were saved."""
        left = self._row_bytes
        for row in rows:
            left -= len(row)
            if left < 0 or self._file.readinto(row.data) != len(row):  # type: ignore[attr-defined]
                break
        if left != 0:
            raise FormatError(
                f"the session file holds {self._row_bytes} bytes of cached rows, which do not "
                f"fit this model; {_CURE}"
            )


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raises UsageError for what JSON cannot hold."""
    try:
        json.dumps(dict(extra))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"what is saved with a session (extra) must be plain values by name: {error}"
        ) from None


def write_session(
    path: Path,
    *,
    fingerprint: Mapping[str, Any],
    is_taught: bool,
    precision: str,
    state: RunnerState,
    rows: Iterable[NDArray[np.uint8]],
    document: Mapping[str, Any],
    context: int,
    require: Callable[[], None] = lambda: None,
) -> None:
    """Writes or replaces ``path`` as one step. Raises ResourceError; the old file then remains.

    And what ``require`` raises, which is called between two blocks.
    """
    logits = b"" if state.prompt_logits is None else _little_endian(state.prompt_logits, "<f4")
    tokens = _little_endian(np.array(state.token_ids, np.int32), "<i4")
    parts = [tokens, json.dumps(document).encode("ascii"), state.core, logits]
    all_rows = list(rows)
    sizes = [*map(len, parts), sum(map(len, all_rows))]
    said = {
        "fingerprint": fingerprint,
        "is_taught": is_taught,
        "precision": precision,
        "context": context,
        "sizes": dict(zip(_SIZES, sizes, strict=True)),
        "mark_bytes": list(map(len, state.marks)),
    }
    header = json.dumps(said).encode("ascii")
    digest = blake2b(digest_size=DIGEST_BYTES)
    try:
        with replacing(path) as file:
            prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(header))
            blocks: list[bytes | memoryview] = [prefix, header, *parts, *state.marks]
            for block in (*blocks, *(row.data for row in all_rows)):
                require()
                digest.update(block)
                file.write(block)
            require()
            file.write(digest.digest())
    except OSError as error:
        raise ResourceError(
            f"cannot save the session to {path}: {error.strerror or error}; "
            "what was saved there before is unchanged"
        ) from None


def find_answer_room(plan: RunPlan, path: Path, n_tokens: int, made_for: int) -> int:
    """Tokens that a file needs room for behind its own, -1 for those of an open answer.

    Such that its context rotates keys as that in which it was made. Raises UsageError.
    """
    context = choose_context(plan, n_tokens, -1, goes_on=True)
    if n_tokens > context:
        raise UsageError(
            f"the session file {path} holds {n_tokens} tokens and the context {context}; "
            f"use -c {n_tokens + 1} or more, or name another file with --session"
        )
    for room in (-1, max(0, made_for - n_tokens)):
        held = choose_context(plan, n_tokens, room)
        if n_tokens == 0 or rotate_alike(plan.config, held, made_for):
            return room
    raise UsageError(
        f"the session file {path} was made in a context of {made_for} positions and this one "
        f"has {context}, for which the model rotates its keys otherwise (LongRoPE); use "
        f"-c {made_for}, or name another file with --session"
    )


@contextmanager
def open_session(
    path: Path, *, fingerprint: Mapping[str, Any], vocab_size: int
) -> Iterator[SavedSession]:
    """Checks a file against what is running now.

    Raises FormatError for a damaged file, UsageError for one of another model or of other options,
    ResourceError for one that cannot be read.
    """
    with _open(path) as file:
        yield _read(path, file, fingerprint, vocab_size)


def check_session_file(path: Path, fingerprint: Mapping[str, Any] | None = None) -> None:
    """Refuses, as ``open_session`` does, what is no session file or is cut off.

    With ``fingerprint`` also one of another model or of other options. It takes no time.
    """
    with _open(path) as file:
        header, _ = _read_header(path, file)
    if fingerprint is not None:
        _check_fingerprint(path, header.get("fingerprint"), fingerprint)


def read_settings(path: Path) -> Mapping[str, Any]:
    """What a file says it was made with, unchecked: its fingerprint, ``is_taught``, ``precision``.

    Raises as ``check_session_file`` does.
    """
    with _open(path) as file:
        header, _ = _read_header(path, file)
    fingerprint = header.get("fingerprint")
    if not isinstance(fingerprint, dict):
        return {}
    return {**fingerprint, **{name: header.get(name) for name in ("is_taught", "precision")}}


@dataclass(frozen=True, slots=True)
class SessionHead:
    """What a file says of itself, unchecked: to choose among files, before one is opened."""

    fingerprint: Mapping[str, Any]
    token_ids: NDArray[np.int32]
    core: bytes  # its beginning
    context: int
    precision: str | None


def peek_session(path: Path) -> SessionHead:
    """Reads the head of a file. Raises as ``check_session_file`` does."""
    with _open(path) as file:
        header, (token_bytes, document_bytes, core_bytes, *_) = _read_header(path, file)
        tokens = np.frombuffer(_read_exactly(path, file, token_bytes // 4 * 4), "<i4")
        file.seek(document_bytes + token_bytes % 4, os.SEEK_CUR)
        core = _read_exactly(path, file, min(core_bytes, MAX_HEADER_BYTES))
    fingerprint = header.get("fingerprint")
    return SessionHead(
        fingerprint if isinstance(fingerprint, dict) else {},
        tokens.astype(np.int32),
        core,
        _context_of(header, tokens.size),
        precision if isinstance(precision := header.get("precision"), str) else None,
    )


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    try:
        # Not to wait for a writer if it is a pipe.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _damaged(path, "it is not a regular file", _OTHER_FILE)
            yield file
    except OSError as error:
        raise ResourceError(
            f"cannot read the session file {path}: {error.strerror or error}; {_OTHER_FILE}"
        ) from None


def _read(
    path: Path, file: IO[bytes], fingerprint: Mapping[str, Any], vocab_size: int
) -> SavedSession:
    header, sizes = _read_header(path, file)
    n_bytes, begin = os.fstat(file.fileno()).st_size, file.tell()
    _check_fingerprint(path, header.get("fingerprint"), fingerprint)
    token_bytes, document_bytes, core_bytes, logit_bytes, row_bytes, *mark_bytes = sizes
    if token_bytes % 4 or logit_bytes not in (0, 4 * vocab_size):
        raise _damaged(path, "the sizes of its parts cannot be")
    _check_digest(path, file, n_bytes - DIGEST_BYTES)
    file.seek(begin)
    tokens = np.frombuffer(_read_exactly(path, file, token_bytes), "<i4")
    document = _parse_json(path, _read_exactly(path, file, document_bytes))
    core = _read_exactly(path, file, core_bytes)
    logits = np.frombuffer(_read_exactly(path, file, logit_bytes), "<f4").astype(np.float32)
    marks = tuple(_read_exactly(path, file, n) for n in mark_bytes)
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise _damaged(path, f"a token id is outside the vocabulary of {vocab_size} tokens")
    state = RunnerState(tuple(tokens.tolist()), core, logits if logits.size else None, marks)
    return SavedSession(state, document, _context_of(header, tokens.size), file, row_bytes)


def _context_of(header: Mapping[str, Any], n_tokens: int) -> int:
    """Positions of the session that was saved; of an older file its tokens."""
    context = header.get("context")
    return max(context, n_tokens) if type(context) is int else n_tokens


def _read_header(path: Path, file: IO[bytes]) -> tuple[dict[str, Any], list[int]]:
    """The header and the sizes of the parts, which begin where the file then stands.

    Those of the marks stand behind ``_SIZES``.
    """
    n_bytes = os.fstat(file.fileno()).st_size
    header_bytes = _read_prefix(path, file, n_bytes)
    header = _parse_json(path, _read_exactly(path, file, header_bytes))
    sizes = _check_sizes(path, header, n_bytes - _PREFIX.size - header_bytes - DIGEST_BYTES)
    return header, sizes


def _read_prefix(path: Path, file: IO[bytes], n_bytes: int) -> int:
    prefix = file.read(_PREFIX.size)
    if prefix[: len(MAGIC)] != MAGIC[: len(prefix)] or not prefix:
        raise _damaged(path, "it is not a session file", _OTHER_FILE)
    if len(prefix) < _PREFIX.size:
        raise _damaged(path, f"it ends after {n_bytes} bytes")
    _, version, header_bytes = _PREFIX.unpack(prefix)
    if version != FORMAT_VERSION:
        raise _damaged(
            path, f"its format version is {version}, this program reads {FORMAT_VERSION}"
        )
    if header_bytes > min(MAX_HEADER_BYTES, n_bytes):
        raise _damaged(path, f"its header has {header_bytes} bytes")
    return int(header_bytes)


def _check_sizes(path: Path, header: Mapping[str, Any], expected: int) -> list[int]:
    sizes, marks = header.get("sizes"), header.get("mark_bytes", [])
    values: list[object] = []
    if isinstance(sizes, dict) and isinstance(marks, list):
        values = [*(sizes.get(name) for name in _SIZES), *marks]
    counts = [value for value in values if type(value) is int and value >= 0]
    if not counts or len(counts) != len(values):
        raise _damaged(path, "its header lacks the sizes of its parts")
    missing = sum(counts) - expected
    if missing:
        raise _damaged(path, f"it has {abs(missing)} bytes too {'few' if missing > 0 else 'many'}")
    return counts


def _check_fingerprint(path: Path, saved: object, current: Mapping[str, Any]) -> None:
    if not isinstance(saved, dict) or (saved.keys() ^ current.keys()) - _OPTIONAL:
        raise _damaged(path, "its header lacks the fingerprint")
    unset: dict[str, Any] = dict.fromkeys(_OPTIONAL)
    then_all, now_all = unset | saved, unset | json.loads(json.dumps(current))
    if is_alike(then_all, now_all):
        return
    is_other_model = then_all["model"] != now_all["model"]
    for name, value in now_all.items():
        if then_all[name] != value and (name != SCALES or is_other_model):
            what = "another model file"
            if name != "model":
                then, now = then_all[name], value
                if name != SCALES:
                    name, then, now = _first_difference(name, then, now)
                what = f"{name} {_shorten(then)}; this run has {_shorten(now)}"
            raise UsageError(
                f"the session file {path} was made with {what}; "
                "run it as it was made, or name another file with --session"
            )


def _first_difference(name: str, saved: object, current: object) -> tuple[str, object, object]:
    """The innermost first place where two unequal plain values part, and what is there."""
    if isinstance(saved, dict) and isinstance(current, dict):
        for key in {**current, **saved}:
            then, now = saved.get(key), current.get(key)
            if then != now:
                return _first_difference(f"{name} {key}", then, now)
    if isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        for index, value in enumerate(current):
            if saved[index] != value:
                return _first_difference(f"{name}[{index}]", saved[index], value)
    return name, saved, current


def _check_digest(path: Path, file: IO[bytes], n_bytes: int) -> None:
    file.seek(0)
    digest = blake2b(digest_size=DIGEST_BYTES)
    left = n_bytes
    while left > 0:
        block = file.read(min(left, _BLOCK_BYTES))
        if not block:
            raise _damaged(path, "it became shorter while it was read")
        digest.update(block)
        left -= len(block)
    if file.read(DIGEST_BYTES) != digest.digest():
        raise _damaged(path, "its checksum is wrong")


def _parse_json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _damaged(path, "a part of it is not JSON")
    return value


def _read_exactly(path: Path, file: IO[bytes], n_bytes: int) -> bytes:
    blocks, left = [], n_bytes
    while left > 0 and (block := file.read(left)):
        blocks.append(block)
        left -= len(block)
    if left:
        raise _damaged(path, "it became shorter while it was read")
    return b"".join(blocks)


def _damaged(path: Path, reason: str, cure: str = _CURE) -> FormatError:
    return FormatError(f"the session file {path} cannot be used: {reason}; {cure}")


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _little_endian(values: NDArray[Any], dtype: str) -> bytes:
    return values.astype(dtype).tobytes()
