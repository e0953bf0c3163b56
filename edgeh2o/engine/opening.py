"""Model files of every kind, opened by what they are, and sessions of what they hold.

What a run of a model needs before its weights are read is imported at the top, and NumPy is not:
what is only needed for an answer is imported while other threads read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .. import isa as instruction_sets
from ..config import PrefillConfig, RuntimeConfig
from ..formats.model_cache import resolve_model
from ..onnx.folder import is_onnx
from ..runners.base import RunnableModel, SessionShape
from .plan import RunPlan, fit_chunks

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig
    from ..config import ModelConfig
    from ..tokenizer import Tokenizer
    from .session import OnProgress, Session


class DescribedModel(Protocol):
    """What is known of a model before its weights are read."""

    @property
    def config(self) -> ModelConfig:
        """Shape and constants of the model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> object:
        """As in the file, unchecked."""

    @property
    def fingerprint(self) -> str:
        """A hash of the model file that tells models apart."""


class LoadedModel(DescribedModel, RunnableModel, Protocol):
    """A model with its weights."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""

    @property
    def shows_attention(self) -> bool:
        """Whether its runners show what their attention computes, as a profile needs it."""


class ModelFile(DescribedModel, Protocol):
    """An opened file that was found good; no weights read yet. A context manager."""

    @property
    def n_weight_bytes(self) -> int:
        """Bytes of the weights in the file."""

    @property
    def n_mapped_bytes(self) -> int:
        """Addresses that they will take."""

    def __enter__(self) -> ModelFile: ...

    def __exit__(self, *exception: object) -> None: ...

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        """Bytes by purpose that a session of ``shape`` would allocate; nothing is allocated."""

    def load(
        self,
        *,
        check_tensors: bool = False,
        on_bytes: Callable[[int, int], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> LoadedModel:
        """Loads the weights; ``on_bytes(done, total)`` counts bytes of the file.

        ``meanwhile()`` is called once, while they are loaded where that goes on by itself; what it
        raises ends the loading.
        """


def open_model(path: Path) -> ModelFile:
    """Opens a GGUF file, or the folder or ``.onnx`` file of an ONNX model.

    Raises FormatError for a file that cannot be run, ResourceError for one that cannot be read,
    UsageError if packages for it are missing.
    """
    if is_onnx(path):
        from ..onnx.model import OnnxModelFile

        return OnnxModelFile(path)
    from ..runners.native import NativeModelFile

    return NativeModelFile(path)


def load_session(
    model: str | Path,
    attention: SparseAttentionConfig,
    prefill: PrefillConfig,
    runtime: RuntimeConfig,
    *,
    seed: int | None,
    template: str | None,
    variables: Mapping[str, Any] | None,
    on_progress: OnProgress | None,
    check: Callable[[Session], None] | None,
) -> Session:
    """A session of the model in a file, in a folder or of a known name.

    ``check`` gets the session, with its tokenizer, while the weights are read; what it raises ends
    that. The rest is described at ``LLM``. Raises as that does.
    """
    started_at = time.perf_counter()
    if runtime.isa is not None:
        instruction_sets.use(runtime.isa)
    # What can be refused without the model is.
    attention, _ = fit_chunks(attention, prefill)
    instruction_sets.attention_precision(runtime.attention_precision)
    if template is not None:
        from ..tokenizer.chat_template import compile_template

        compile_template(template)
    path = resolve_model(model)
    opened: list[Session] = []
    with open_model(path) as file:
        plan = RunPlan.of(file.config, attention, prefill, runtime)
        plan.check_load(file)
        plan.use_threads()

        def prepare() -> None:
            from .prompt import PromptReader
            from .session import Session

            prompts = PromptReader(file, plan, template, variables)
            session = Session(prompts, plan, path=path, seed=seed, on_progress=on_progress)
            if check is not None:
                check(session)
            opened.append(session)

        weights = file.load(
            check_tensors=runtime.check_tensors,
            on_bytes=None if on_progress is None else partial(on_progress, "load"),
            meanwhile=prepare,
        )
    session = opened[0]
    session.take_weights(weights, time.perf_counter() - started_at)
    return session
