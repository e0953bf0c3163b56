"""Refusals in the form of each interface, and what the engine's errors become there."""

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
ANTHROPIC_PATH = "/v1/messages"  # and below
SLOTS_PATH = "/slots"  # and below
# Those that no other interface has.
LLAMA_SERVER_PATHS = frozenset(
    {
        *("/completion", "/completions", "/infill", "/tokenize", "/detokenize", "/apply-template"),
        *("/embedding", "/embeddings", "/rerank", "/reranking", "/lora-adapters", "/props"),
        SLOTS_PATH,
    }
)
_LLAMA_SERVER_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


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
        """The body in the form of OpenAI's interface, fit for JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def to_anthropic_dict(self) -> dict[str, Any]:
        """The body in the form of Anthropic's."""
        kind = _ANTHROPIC_KINDS.get(
            self.status, "api_error" if self.status >= 500 else INVALID_REQUEST
        )
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def to_llama_server_dict(self) -> dict[str, Any]:
        """The body in the form of llama-server, whose codes are numbers."""
        told = self.to_dict()
        kind = _LLAMA_SERVER_KINDS.get(self.status, self.kind)
        told["error"] |= {"code": self.status, "type": kind}
        return told

    def describe(self, path: str) -> dict[str, Any]:
        """The body in the form of the interface that has ``path``."""
        if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
            return self.to_anthropic_dict()
        if path in LLAMA_SERVER_PATHS or path.startswith(f"{SLOTS_PATH}/"):
            return self.to_llama_server_dict()
        return self.to_dict()


class PromptTooLongError(ApiError):
    """The refusal by which clients know that they have to shorten a conversation.

    ``is_least``: of a prompt that was not tokenised, because it has more than ``n_tokens`` at any
    rate.
    """

    def __init__(self, n_tokens: int, limit: int, *, is_least: bool = False) -> None:
        counted = f"at least {n_tokens}" if is_least else str(n_tokens)
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {counted} tokens. Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
        )
        self._n_tokens, self._limit = n_tokens, limit

    def to_dict(self) -> dict[str, Any]:
        """With the numbers by the names of llama-server."""
        told = super().to_dict()
        told["error"] |= {"n_prompt_tokens": self._n_tokens, "n_ctx": self._limit}
        return told

    def to_llama_server_dict(self) -> dict[str, Any]:
        """By the type that its clients know."""
        told = super().to_llama_server_dict()
        told["error"]["type"] = "exceed_context_size_error"
        return told

    def to_anthropic_dict(self) -> dict[str, Any]:
        """In the words by which agents know it there."""
        told = super().to_anthropic_dict()
        told["error"]["message"] = (
            f"prompt is too long: {self._n_tokens} tokens > {self._limit} maximum"
        )
        return told


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of any error; nothing of the inside where that was not meant."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CancelledError):
        return ApiError(str(error), status=503, kind="server_error", code="cancelled")
    if isinstance(error, ResourceError):
        return ApiError(str(error), status=503, kind="server_error", code="out_of_memory")
    if isinstance(error, ContextLengthError):
        return PromptTooLongError(error.n_tokens, error.limit, is_least=True)
    if isinstance(error, (UsageError, FormatError)):
        return ApiError(str(error))
    if isinstance(error, EdgeH2OError):
        return ApiError(str(error), status=500, kind="server_error")
    if isinstance(error, MemoryError):
        return ApiError("out of memory", status=503, kind="server_error", code="out_of_memory")
    return ApiError("internal error; see the server's log", status=500, kind="server_error")
