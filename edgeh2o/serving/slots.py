"""What slots have read last: saved to files by names, restored from them, and erased.

A slot is a place at which requests are answered and has no memory of its own: what it has read is
one of the kept conversations, which all slots go on from. A request that names its slot makes a
conversation that slot's: others copy it, so that what is saved under a name is what was read there.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..engine.transcript import count_common
from ..errors import FormatError, ResourceError, UsageError
from .api_error import ApiError
from .conversation import ANY_SLOT
from .saved_prefix import make_private_folder, peek_prefix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .conversation import Conversation
    from .conversations import ConversationPool
    from .saved_prefix import FindPlan, SavedPrefix

_logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 255
_OTHER = "it was saved by a server of another model or with other flags"
_DAMAGED = "it is damaged, see the server's log"
# Not in names of files: what other systems refuse, and what looks like a dot or a slash.
_REFUSED_CHARACTERS = frozenset('/\\:*?"<>|\uff0e\u2215\u2216\ufffd\ufeff')


@dataclass(frozen=True, slots=True)
class SlotFile:
    """A file that was written or read: its tokens, its bytes, and how long that took."""

    n_tokens: int
    n_bytes: int
    elapsed_s: float


class Slots:
    """Conversations of slots, and a folder of files of them.

    Without a ``folder`` nothing is noted or saved. ``find_plan`` as ``peek_prefix`` has it. Raises
    ResourceError for a folder that cannot be made.

    ``require`` of the methods raises once the request is not wanted any more.
    """

    def __init__(self, pool: ConversationPool, folder: Path | None, find_plan: FindPlan) -> None:
        if folder is not None:
            make_private_folder(folder)
        self._pool, self._folder, self._find_plan = pool, folder, find_plan
        self._latest: dict[int, tuple[weakref.ref[Conversation], NDArray[np.int32]]] = {}

    def require_folder(self) -> Path:
        """The folder. Raises ApiError where there is none."""
        if self._folder is None:
            raise ApiError(
                "slots are not saved, restored or erased: this server was started without "
                "--slot-save-path FOLDER; conversations are kept by themselves, and every prompt "
                "goes on from what any of them has read",
                status=501,
                code="unsupported_endpoint",
            )
        return self._folder

    def note(self, slot: int, conversation: Conversation, *, is_named: bool) -> None:
        """A request was answered at ``slot``, which it asked for if that ``is_named``."""
        runner = conversation.runner
        if self._folder is None or slot == ANY_SLOT or runner is None:
            return
        before = self._find(slot)
        if before is not None and before is not conversation and before.slot == slot:
            before.slot = ANY_SLOT
        if is_named:
            conversation.slot = slot
        self._latest[slot] = weakref.ref(conversation), np.array(runner.token_ids, np.int32)

    def save(self, slot: int, name: str, require: Callable[[], None]) -> SlotFile:
        """Writes what ``slot`` has read last, or replaces a file by it. Raises ApiError.

        A file that was there before is then unchanged.
        """
        path = self._path_of(name)
        begun_at = time.monotonic()
        with self._hold(slot, require) as conversation:
            if conversation is None:
                raise ApiError(
                    f"slot {slot} has nothing to save: no request was answered there, or what it "
                    "has read has gone for room, or went on at another slot; name the slot by "
                    "'id_slot'"
                )
            runner = conversation.runner
            assert runner is not None
            runner.prepare_to_save()
            if not conversation.session.cache.has_open_prompt:
                raise ApiError(f"slot {slot} cannot be saved: no prompt was read there to its end")
            try:
                conversation.session.save(path, {})
                n_bytes = path.stat().st_size
            except (OSError, ResourceError) as error:
                _logger.warning("slot %d is not saved: %s", slot, error)
                raise ApiError(
                    f"slot {slot} is not saved to '{name}': it cannot be written, see the "
                    "server's log; what was saved there before is unchanged",
                    status=500,
                    kind="server_error",
                ) from None
            n_tokens = len(runner.token_ids)
            self.note(slot, conversation, is_named=False)
        return SlotFile(n_tokens, n_bytes, time.monotonic() - begun_at)

    def restore(self, slot: int, name: str, require: Callable[[], None]) -> SlotFile:
        """Has ``slot`` go on from what was saved. Raises ApiError; it then has what it had."""
        path = self._path_of(name)
        begun_at = time.monotonic()
        try:
            saved = self._peek(slot, path)
            kept = self._pool.take_in(saved, slot, require)
            n_bytes = path.stat().st_size
        except (FormatError, UsageError, ValueError, OSError) as error:
            _logger.warning("slot %d is not restored: %s", slot, error)
            reason = _OTHER if isinstance(error, UsageError) else _DAMAGED
            raise _not_restored(slot, path, reason) from None
        self.note(slot, kept, is_named=True)
        return SlotFile(len(saved.token_ids), n_bytes, time.monotonic() - begun_at)

    def erase(self, slot: int, require: Callable[[], None]) -> int:
        """Forgets what ``slot`` has read last; how many tokens those were. Saved files stay."""
        with self._hold(slot, require) as conversation:
            if conversation is None:
                return 0
            assert conversation.runner is not None
            n_tokens = len(conversation.runner.token_ids)
            self._pool.drop(conversation)
        del self._latest[slot]
        return n_tokens

    @contextmanager
    def _hold(self, slot: int, require: Callable[[], None]) -> Iterator[Conversation | None]:
        """What ``_find`` gives, which nobody else has meanwhile."""
        conversation = self._find(slot)
        if conversation is None:
            yield None
            return
        with self._pool.hold(conversation, require) as is_kept:
            is_good = is_kept and self._is_as_noted(slot, conversation)
            yield conversation if is_good else None

    def _find(self, slot: int) -> Conversation | None:
        """What was answered at ``slot`` last, if it is kept and has not become another."""
        if slot not in self._latest:
            return None
        conversation = self._latest[slot][0]()
        is_good = conversation is not None and self._is_as_noted(slot, conversation)
        return conversation if is_good else None

    def _is_as_noted(self, slot: int, conversation: Conversation) -> bool:
        runner, token_ids = conversation.runner, self._latest[slot][1]
        return runner is not None and count_common(runner.token_ids, token_ids) == len(token_ids)

    def _peek(self, slot: int, path: Path) -> SavedPrefix:
        try:
            saved = peek_prefix(path, self._find_plan)
        except ResourceError as error:
            _logger.warning("slot %d is not restored: %s", slot, error)
            raise _not_restored(slot, path, "there is no such file that can be read") from None
        if saved is None:
            raise _not_restored(slot, path, _OTHER)
        n_tokens, limit = len(saved.token_ids), self._pool.context_limit
        if n_tokens > limit:
            raise _not_restored(
                slot, path, f"its {n_tokens} tokens do not fit in the context of {limit} (-c)"
            )
        return saved

    def _path_of(self, name: str) -> Path:
        folder = self.require_folder()
        if not is_safe_name(name):
            raise ApiError(
                "'filename' must be the name of a file alone: without folders, of characters that "
                f"all systems allow, {MAX_NAME_BYTES} bytes at most",
                param="filename",
            )
        return folder / name


def is_safe_name(name: str) -> bool:
    """Whether a file of that name lies in the folder where it is looked for, on any system."""
    is_short = 0 < len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES
    is_plain = all(_is_plain(character) for character in name)
    # Hidden ones are those that are being written.
    has_ends = name.strip(" ") == name and not name.startswith(".") and not name.endswith(".")
    return is_short and is_plain and has_ends and ".." not in name


def _is_plain(character: str) -> bool:
    code = ord(character)
    is_control = code < 0x20 or 0x7F <= code < 0xA0
    is_surrogate = 0xD800 <= code < 0xE000
    return not is_control and not is_surrogate and character not in _REFUSED_CHARACTERS


def _not_restored(slot: int, path: Path, reason: str) -> ApiError:
    return ApiError(f"slot {slot} is not restored from '{path.name}': {reason}", param="filename")
