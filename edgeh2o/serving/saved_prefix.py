"""What a session file holds that a server may go on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.session_file import peek_session
from ..formats.atomic_file import make_folder
from .saved_state import SavedPlaces, read_places

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..engine.plan import RunPlan
    from ..engine.session_file import SessionHead

    FindPlan = Callable[[Mapping[str, Any]], RunPlan | None]


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """A file, and what it says that it holds."""

    path: Path
    token_ids: NDArray[np.int32]
    saved: SavedPlaces
    plan: RunPlan
    context: int


def peek_prefix(path: Path, find_plan: FindPlan) -> SavedPrefix | None:
    """What a file says that it holds; None of another model, or that was read otherwise.

    ``find_plan`` gives the plan by the fingerprint of a file, budgets included: what was read
    otherwise, or multiplied to another precision, would go on otherwise. Raises ValueError and as
    ``peek_session``.
    """
    head = peek_session(path)
    plan = find_plan(head.fingerprint)
    if plan is None or not _is_of_precision(plan, head):
        return None
    return SavedPrefix(path, head.token_ids, read_places(head.core), plan, head.context)


def _is_of_precision(plan: RunPlan, head: SessionHead) -> bool:
    """Whether a server would read the file's prompts as they were read. Older files do not say."""
    return head.precision in (None, plan.rounding_for(head.context).precision)


def make_private_folder(folder: Path) -> None:
    """Makes a folder that only its owner may look into, unless it is there.

    Raises ResourceError.
    """
    if not folder.is_dir():
        make_folder(folder)
        folder.chmod(0o700)  # conversations are private
