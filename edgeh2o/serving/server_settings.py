"""How a server admits requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engine.embedding import EUCLIDEAN
from ..sampling_config import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How requests are admitted; ``timeout_s`` is for a whole answer, 0 for none.

    ``aliases`` are all names of the model, ``model_name`` among them, ``tags`` what else lists of
    models say of it. Any of ``api_keys`` lets a client in; without them all may.

    ``pooling`` makes vectors of texts, None: as the model's file says; ``vector_power`` is the norm
    by which they are divided where a request says nothing.

    ``allowed_hosts`` are the names by which browsers may call the server, None for any;
    ``cors_origins`` the pages of other origins that may.
    """

    model_name: str
    model_path: str = ""
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    parallel: int = 4
    max_queue: int = 32
    timeout_s: float = 0.0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    pooling: str | None = None
    vector_power: int = EUCLIDEAN
