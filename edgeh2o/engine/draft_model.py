"""Draft models: loaded beside a model, checked against it, and lent to its answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..errors import UsageError
from ..model_config import ModelConfig
from ..runners.runner_calls import use_small_pages
from ..sampling_config import DRAFT_OFF, SamplingParams
from .drafting import why_no_drafts, why_single_tokens
from .memory_fit import start_runner

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..runners.base import BatchRunner, Runner
    from ..tokenizer import Tokenizer
    from .draft_sources import ModelSource
    from .drafting import CallCosts, Drafter
    from .models import LoadedModel
    from .plan import RunPlan

# Models of a family pad their vocabularies to different sizes: Qwen2.5's have 151,936 and 152,064.
MOST_PADDING = 128


class DraftModel:
    """A loaded model that drafts for another one, and its sequence."""

    hidden_rows = None
    n_weight_bytes = n_mapped_bytes = 0  # yet to be loaded

    def __init__(self, model: LoadedModel, plan: RunPlan, path: Path) -> None:
        self._model = model
        self._plan = plan
        self._runner: BatchRunner | None = None
        self.path = path

    @property
    def vocab_size(self) -> int:
        """Tokens that it can read and write."""
        return self._plan.config.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory."""
        return self._model.weight_bytes

    @property
    def memory_bytes(self) -> dict[str, int]:
        """What it has allocated, by purpose."""
        session = 0 if self._runner is None else sum(self._runner.memory_bytes.values())
        return {"draft_weights": self.weight_bytes, "draft_session": session}

    def estimate_session_bytes(self, context: int) -> int:
        """What it would allocate for texts of ``context`` tokens."""
        shape = self._plan.shape(self._choose_context(context))
        return sum(self._model.estimate_session_bytes(self._plan.attention, shape).values())

    def prepared(self, sampling: SamplingParams, context: int) -> DraftModel | None:
        """This model, with room for texts of ``context`` tokens; None where it is not to draft.

        Raises ResourceError if that does not fit in memory.
        """
        if sampling.draft_tokens == DRAFT_OFF:
            return None
        needed = self._choose_context(context)
        if self._runner is None or self._runner.max_context < needed:
            self._runner = None  # freed before the next one is allocated
            self._runner = cast("BatchRunner", start_runner(self._plan, self._model, needed))
            use_small_pages(self._runner)  # it may never read as much
        return self

    def _choose_context(self, context: int) -> int:
        return min(context, self._plan.config.context_length)

    @property
    def runner(self) -> BatchRunner:
        """Its sequence. Raises ValueError before ``prepared``."""
        if self._runner is None:
            raise ValueError("the draft model has no sequence yet")
        return self._runner

    @property
    def max_context(self) -> int:
        """Tokens that its sequence has room for; 0 without one."""
        return 0 if self._runner is None else self._runner.max_context

    @contextmanager
    def lend(self) -> Iterator[BatchRunner | None]:
        """Its sequence, None after one that did not fit; see ``ModelSource``."""
        yield self._runner

    def make_drafter(
        self, runner: Runner, prompt: NDArray[np.int32], costs: CallCosts, length: int | None
    ) -> Drafter:
        """A ``ModelDrafter``; see ``DraftSource``."""
        return make_model_drafter(self, prompt, costs, length)


def make_model_drafter(
    source: ModelSource, prompt: NDArray[np.int32], costs: CallCosts, length: int | None
) -> Drafter:
    """What drafts by a model; see ``DraftSource``."""
    from .model_drafter import ModelDrafter

    return ModelDrafter(source, prompt, costs, length)


def check_kind(config: ModelConfig, device: str, what: str, *, is_draft: bool) -> None:
    """Raises UsageError for a model that cannot check drafts, or, ``is_draft``, write them."""
    if cause := (why_no_drafts if is_draft else why_single_tokens)(config, device):
        raise UsageError(
            f"{what} cannot be used with a draft model (--draft): {cause}; leave --draft out, or "
            "use GGUF files or safetensors on the CPU, for the drafts of an attention model"
        )


def check_draft(tokenizer: Tokenizer, draft: Tokenizer, path: Path) -> None:
    """Raises UsageError unless the token ids of both models mean the same."""
    ours, theirs = tokenizer.vocabulary.tokens, draft.vocabulary.tokens
    n_common = min(len(ours), len(theirs))
    cause = ""
    if abs(len(ours) - len(theirs)) > MOST_PADDING:
        cause = f"it has {len(theirs):,} tokens and the model {len(ours):,}"
    elif ours[:n_common] != theirs[:n_common]:
        i = next(i for i in range(n_common) if ours[i] != theirs[i])
        cause = f"token {i} is {theirs[i]!r:.40} there and {ours[i]!r:.40} in the model"
    elif tokenizer.eog_ids != draft.eog_ids:
        cause = (
            f"its answers end with the tokens {sorted(draft.eog_ids)}, "
            f"the model's with {sorted(tokenizer.eog_ids)}"
        )
    if cause:
        raise UsageError(
            f"the draft model {path} has another vocabulary: {cause}; use a smaller model of the "
            "same family, or a stronger quantisation of the same one"
        )
