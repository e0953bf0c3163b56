"""Conversations on the disk: those that memory has no room for, and those of a server before.

Every conversation is a session file (``edgeh2o/engine/session_file.py``), which is checked before
anything of it is used. Several servers may share a folder: a file is written under another name and
renamed, and has a name made of its contents. What was used least lately goes for room.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.transcript import count_common
from ..errors import EdgeH2OError, FormatError, ResourceError
from .call_grid import CallGrid, PromptShape
from .saved_prefix import SavedPrefix, make_private_folder, peek_prefix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .conversation import Conversation
    from .saved_prefix import FindPlan

_logger = logging.getLogger(__name__)

# Shorter ones are read again as fast as they are found.
LEAST_SAVED = 256
_NAME = re.compile(r"prefix-[0-9a-f]{32}\.session")
_LOCK = ".lock"


class PrefixDisk:
    """A folder of at most ``max_bytes``, with an index of the files for which there is a plan.

    ``find_plan`` gives it by the fingerprint of a file (``peek_prefix``). What cannot be read or
    written is a line in the log. Raises ResourceError for a folder that cannot be made.
    """

    def __init__(self, folder: Path, max_bytes: int, find_plan: FindPlan) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._find_plan = find_plan
        make_private_folder(folder)
        self._lock = Lock()
        self._index: dict[str, SavedPrefix | None] = {}  # None: foreign, or not to be read
        self._seen_at = -1
        self._refresh()

    def __len__(self) -> int:
        with self._lock:
            return sum(entry is not None for entry in self._index.values())

    def find(
        self,
        token_ids: NDArray[np.int32],
        shape: PromptShape,
        grid: CallGrid,
        *,
        at_least: int,
        may_go_on: Callable[[SavedPrefix, int], bool],
    ) -> SavedPrefix | None:
        """The file from which most tokens of a prompt can be taken, if they are ``at_least``.

        And if it ``may_go_on`` from so many of the file.
        """
        best, most = None, at_least - 1
        with self._lock:
            self._refresh()
            for entry in self._index.values():
                if entry is None or len(entry.token_ids) <= most:
                    continue
                n_usable = entry.saved.count_usable(
                    count_common(entry.token_ids, token_ids), shape, grid
                )
                if n_usable > most and may_go_on(entry, n_usable):
                    best, most = entry, n_usable
        return best

    def forget(self, entry: SavedPrefix, reason: EdgeH2OError) -> None:
        """Names a file no more that could not be taken up; one that is damaged is removed."""
        _logger.warning("a kept conversation is of no use: %s", reason)
        with self._lock:
            self._index[entry.path.name] = None
        if isinstance(reason, FormatError):
            with suppress(OSError):
                entry.path.unlink()

    def touch(self, path: Path, idle_s: float = 0.0) -> None:
        """Says that a file was used so long ago."""
        used_at = time.time() - idle_s
        with suppress(OSError):
            os.utime(path, (used_at, used_at))

    def save(self, conversation: Conversation, require: Callable[[], None] = lambda: None) -> None:
        """Writes a conversation that nobody uses, unless it is there; others go for its room.

        ``require`` raises EdgeH2OError once it is not wanted any more.
        """
        runner = conversation.runner
        if runner is None or len(runner.token_ids) < LEAST_SAVED:
            return
        try:
            runner.prepare_to_save()
            if conversation.session.cache.has_open_prompt:
                with self._locked():
                    self._save(conversation, require)
        except (EdgeH2OError, OSError) as error:
            _logger.warning("a conversation is not kept on the disk: %s", error)

    def _save(self, conversation: Conversation, require: Callable[[], None]) -> None:
        runner = conversation.runner
        assert runner is not None
        end = runner.find_mark(len(runner.token_ids))
        token_ids = np.array(runner.token_ids[:end], np.int32)
        if end < LEAST_SAVED:
            return
        with self._lock:
            self._refresh()
            entries = [entry for entry in self._index.values() if entry is not None]
        scales = conversation.session.plan.adapter_scales
        entries = [entry for entry in entries if entry.plan.adapter_scales == scales]
        counts = [count_common(entry.token_ids, token_ids) for entry in entries]
        if end in counts:  # all of it is there
            self.touch(entries[counts.index(end)].path, conversation.idle_s)
            return
        parts = [runner.save_state(), *runner.mark_states, *runner.cached_rows()]
        n_bytes = sum(map(len, parts))
        if n_bytes > self.max_bytes:
            raise ResourceError(
                f"its {end} tokens take {n_bytes} bytes and --prefix-cache-disk may hold "
                f"{self.max_bytes}"
            )
        pairs = zip(entries, counts, strict=True)
        begun = [entry.path for entry, n_common in pairs if n_common == len(entry.token_ids)]
        if self._held_bytes() + n_bytes > self.max_bytes:
            self._remove_all(begun)
        self._make_room(n_bytes)
        path = self.folder / _name_of(conversation.session.fingerprint, token_ids)
        conversation.session.save(path, {}, require)
        self._remove_all(begun)  # they went on, and it takes their place
        self.touch(path, conversation.idle_s)
        self._make_room(0, spared=path)

    def remove_beginnings(
        self, token_ids: NDArray[np.int32], adapter_scales: tuple[float, ...]
    ) -> None:
        """Removes the files that hold a beginning of ``token_ids``, or all of them."""
        with self._lock:
            self._refresh()
            entries = [entry for entry in self._index.values() if entry is not None]
        for entry in entries:
            n_common = count_common(entry.token_ids, token_ids)
            if n_common == len(entry.token_ids) and entry.plan.adapter_scales == adapter_scales:
                self._remove(entry.path)

    def _list_files(self) -> list[tuple[float, int, Path]]:
        """When each was used, its bytes and its path."""
        files = []
        for path in self._paths():
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        return files

    def _held_bytes(self) -> int:
        return sum(size for _, size, _ in self._list_files())

    def _make_room(self, n_bytes: int, spared: Path | None = None) -> None:
        """Removes the files used least lately until so many bytes more fit."""
        files = self._list_files()
        total = sum(size for _, size, _ in files) + n_bytes
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                return
            if path != spared:
                self._remove(path)
                total -= size

    def _remove_all(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()
        with self._lock:
            self._index.pop(path.name, None)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """While this one writes, no other server of the folder does."""
        with (self.folder / _LOCK).open("wb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _paths(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]

    def _refresh(self) -> None:
        """Takes in what other servers have written and removed."""
        try:
            changed_at = self.folder.stat().st_mtime_ns
            if changed_at == self._seen_at:
                return
            paths = {path.name: path for path in self._paths()}
        except OSError as error:
            _logger.warning("the folder of kept conversations cannot be read: %s", error)
            self._index, self._seen_at = {}, -1
            return
        self._seen_at = changed_at
        self._index = {name: entry for name, entry in self._index.items() if name in paths}
        for name in paths.keys() - self._index.keys():
            self._index[name] = self._peek(paths[name])

    def _peek(self, path: Path) -> SavedPrefix | None:
        try:
            return peek_prefix(path, self._find_plan)
        except (EdgeH2OError, ValueError) as error:
            _logger.warning("a kept conversation is of no use: %s", error)
            return None


def _name_of(fingerprint: Mapping[str, Any], token_ids: NDArray[np.int32]) -> str:
    digest = blake2b(json.dumps(fingerprint, sort_keys=True).encode(), digest_size=16)
    digest.update(token_ids.tobytes())
    return f"prefix-{digest.hexdigest()}.session"
