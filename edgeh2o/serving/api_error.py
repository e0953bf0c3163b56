"""Refusals in the form of OpenAI's interface, and what the engine's errors become there."""

from __future__ import annotations

from typing import Any

from ..errors import (
    ContextLengthError,
    EdgeH2OError,
    FormatError,
    ResourceError,
    UsageError,
)
from .scheduler import CancelledError

INVALID_REQUEST = "invalid_request_error"


class ApiError(EdgeH2OError):
    """What a client gets: an HTTP status, and why, as text and by a ``code``."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind
        self.param, self.code = param, code

    def to_dict(self) -> dict[str, Any]:
        """The body, fit for JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def context_length_exceeded(n_tokens: int, limit: int, *, is_least: bool = False) -> ApiError:
    """The refusal by which clients know that they have to shorten a conversation.

    ``is_least``: of a prompt that was not tokenised, because it has more than so many at any rate.
    """
    counted = f"at least {n_tokens}" if is_least else str(n_tokens)
    return ApiError(
        f"This model's maximum context length is {limit} tokens. However, your messages resulted "
        f"in {counted} tokens. Please reduce the length of the messages.",
        param="messages",
        code="context_length_exceeded",
    )


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of any error; nothing of the inside where that was not meant."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CancelledError):
        return ApiError(str(error), status=503, kind="server_error", code="cancelled")
    if isinstance(error, ResourceError):
        return ApiError(str(error), status=503, kind="server_error", code="out_of_memory")
    if isinstance(error, ContextLengthError):
        return context_length_exceeded(error.n_tokens, error.limit, is_least=True)
    if isinstance(error, (UsageError, FormatError)):
        return ApiError(str(error))
    if isinstance(error, EdgeH2OError):
        return ApiError(str(error), status=500, kind="server_error")
    if isinstance(error, MemoryError):
        return ApiError("out of memory", status=503, kind="server_error", code="out_of_memory")
    return ApiError("internal error; see the server's log", status=500, kind="server_error")
