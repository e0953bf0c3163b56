"""The path by which slots are saved, restored and erased, as llama-server has it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .admission import Admission
from .api_error import ApiError
from .event_flow import finish_or_cancel
from .http_body import read_body

if TYPE_CHECKING:
    from .slots import Slots
    from .ticket import Ticket

SLOT_PATH = "/slots/{slot}"
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


class SlotActions:
    """Answers ``POST /slots/N?action=...``; a slot that is at work is waited for.

    A client that goes waits no more. What is being written by then is written to its end.
    """

    def __init__(self, slots: Slots, admission: Admission) -> None:
        self._slots, self._admission = slots, admission

    async def act(self, request: Request) -> Response:
        """Raises ApiError."""
        self._slots.require_folder()
        number, action = request.path_params["slot"], request.query_params.get("action", "")
        if not _NUMBER.fullmatch(number):
            raise ApiError(f"a slot has a number (/slots/0), got {number[:100]!r}", param="id_slot")
        act = {"save": self._save, "restore": self._restore, "erase": self._erase}.get(action)
        if act is None:
            raise ApiError(
                f"'action' must be save, restore or erase, got {action[:100]!r}", param="action"
            )
        name = "" if act == self._erase else await _read_name(request)
        if not name and "origin" in request.headers:
            await read_body(request)  # as JSON: pages of other origins cannot send that unasked
        client = request.client.host if request.client else ""
        done = self._act_at(int(number), client, partial(act, int(number), name))
        return JSONResponse(await finish_or_cancel(request, done))

    async def _act_at(
        self, slot: int, client: str, act: Callable[[Ticket], dict[str, Any]]
    ) -> dict[str, Any]:
        async with self._admission.admit(client, slot) as ticket:
            return await self._admission.run(partial(act, ticket), ticket)

    def _save(self, slot: int, name: str, ticket: Ticket) -> dict[str, Any]:
        file = self._slots.save(slot, name, ticket.require)
        return {
            "id_slot": slot,
            "filename": name,
            "n_saved": file.n_tokens,
            "n_written": file.n_bytes,
            "timings": {"save_ms": file.elapsed_s * 1e3},
        }

    def _restore(self, slot: int, name: str, ticket: Ticket) -> dict[str, Any]:
        file = self._slots.restore(slot, name, ticket.require)
        return {
            "id_slot": slot,
            "filename": name,
            "n_restored": file.n_tokens,
            "n_read": file.n_bytes,
            "timings": {"restore_ms": file.elapsed_s * 1e3},
        }

    def _erase(self, slot: int, _: str, ticket: Ticket) -> dict[str, Any]:
        return {"id_slot": slot, "n_erased": self._slots.erase(slot, ticket.require)}


async def _read_name(request: Request) -> str:
    fields = await read_body(request)
    name = fields.text("filename")
    if not name:
        fields.refuse("filename", "the name of a file")
    return name
