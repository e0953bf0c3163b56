"""One copy of the weights for the runners of several requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from weakref import ref

from .. import _core
from ..engine.full_context import check_eviction
from ..engine.models import device_memory_left, fingerprint_at, mapped_weight_bytes
from .call_grid import CallGrid
from .scheduler import Scheduler
from .shared_runner import SHARED_PARTS, SharedRunner

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig
    from ..engine.models import LoadedModel
    from ..model_config import ModelConfig
    from ..runners.base import SessionShape
    from ..tokenizer import Tokenizer

# Tokens that the last call of a prompt has at least, where there are as many: its last ones may
# read everything, as far as their call reaches.
LEAST_LAST_CALL = 64


class SharedModel:
    """A ``LoadedModel`` over another one, whose runners take turns."""

    def __init__(self, model: LoadedModel, scheduler: Scheduler) -> None:
        self.model, self.scheduler = model, scheduler
        # What the calls of all write to; it lives as long as one of them.
        self._find_workspace: Callable[[], _core.Workspace | None] = lambda: None

    def start_session(self, attention: SparseAttentionConfig, shape: SessionShape) -> SharedRunner:
        """As that of the model."""
        runner = self.scheduler.call(lambda: self.model.start_session(attention, shape))
        workspace = None
        if isinstance(runner, _core.Sequence):
            workspace = runner.workspace
            self._find_workspace = ref(workspace)
            runner.use_small_pages()  # of many conversations most are short, and stay for long
        grid = self.call_grid(attention, shape)
        return SharedRunner(runner, self.scheduler, workspace, grid)

    def check_eviction(self, attention: SparseAttentionConfig, shape: SessionShape) -> None:
        """As that of the model, if it has one. Raises UsageError."""
        check_eviction(self.model, attention, shape)

    @staticmethod
    def call_grid(attention: SparseAttentionConfig, shape: SessionShape) -> CallGrid:
        """Where calls end; the tail that reads everything is part of the last one."""
        least = max(LEAST_LAST_CALL, int(getattr(attention, "tail", 0)))
        chunk = shape.chunk_size
        return CallGrid(chunk, min(least, chunk, shape.batch_size - chunk))

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def chat_template(self) -> object:
        return self.model.chat_template

    @property
    def tool_template(self) -> object:
        return self.model.tool_template

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint

    def fingerprint_at(self, adapter_scales: tuple[float, ...]) -> str:
        """As ``engine.models`` has it."""
        return fingerprint_at(self.model, adapter_scales)

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    def device_memory_left(self) -> int | None:
        """As ``engine.models`` has it."""
        return device_memory_left(self.model)

    @property
    def mapped_weight_bytes(self) -> int:
        return mapped_weight_bytes(self.model)

    @property
    def shows_attention(self) -> bool:
        """No: what prompts teach would change the answers to those that come later."""
        return False

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        """What another session takes: of what all write to, only what nobody has written yet."""
        parts = dict(self.model.estimate_session_bytes(attention, shape))
        workspace = self._find_workspace()
        n_written = 0 if workspace is None else workspace.written_bytes
        for name in SHARED_PARTS:
            n_counted = min(n_written, parts.get(name, 0))
            if n_counted:
                parts[name] -= n_counted
                n_written -= n_counted
        return parts
