"""What a loaded model is and how it is run: what tools and evaluations start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from .context_size import context_limit
from .memory_fit import start_runner

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ..attention.base import SparseAttentionConfig
    from ..config import PrefillConfig
    from ..model_config import ModelConfig
    from ..runners.base import Runner
    from .models import LoadedModel
    from .plan import RunPlan
    from .session import Session


class OpenModel:
    """The model of a session: weights, tokens, the choices of its run, and runners beside it.

    A context manager, which frees the weights at the end.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.model_path, self.load_s = session.path, session.load_s
        self.weight_bytes, plan = session.model.weight_bytes, session.plan
        self.prefill, self.chunk_size, self.threads = plan.prefill, plan.chunk_size, plan.threads
        self.isa, self.device, self.cache_type = plan.isa, plan.device, plan.cache_type
        self.attention_precision = plan.precision

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.model_path}: {self.config.architecture}, "
            f"{self.attention.algorithm} attention, {self.isa}, {self.threads} threads>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the weights and the session; streams not yet finished end with an error."""
        self._session.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loaded model cannot be copied or pickled; load it where it is needed")

    @property
    def attention(self) -> SparseAttentionConfig:
        """The rule of the prefill as asked for, with a profile if this process has made one."""
        return self._session.plan.settings

    @property
    def model(self) -> LoadedModel:
        """The loaded weights, for tools that start runners of their own."""
        return self._session.model

    @property
    def config(self) -> ModelConfig:
        """Shape and constants of the model."""
        return self._session.plan.config

    @property
    def context_limit(self) -> int:
        """Most tokens of a prompt and its answer: as asked for, or trained and held by memory."""
        return context_limit(self._session.plan)

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of ``text``.

        ``add_special`` adds BOS and EOS where the model asks for them; ``parse_special`` turns text
        of control tokens, such as ``<|im_start|>``, into these. UsageError for a lone surrogate.
        """
        return self._session.prompts.model.tokenizer.encode(
            text, add_special=add_special, parse_special=parse_special
        )

    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ``token_ids``; incomplete UTF-8 becomes U+FFFD. UsageError for an unknown id."""
        return self._session.prompts.model.tokenizer.decode(token_ids, skip_special=skip_special)

    def profile_budgets(self, token_ids: NDArray[np.int32]) -> bool:
        """Makes a profile of ``token_ids`` [n >= 2,048] if nothing is known of the model.

        For evaluations, of what later prompts get; it is not kept. Whether this call did it.
        """
        return self._session.profile(token_ids)

    def start_runner(
        self,
        n_positions: int,
        *,
        n_prompt: int | None = None,
        attention: SparseAttentionConfig | None = None,
        prefill: PrefillConfig | None = None,
        all_rows: bool = False,
        is_rounded: bool | None = None,
    ) -> Runner:
        """A runner over the same weights, with room for ``n_positions`` tokens.

        ``attention`` and ``prefill`` default to those of this model; ``all_rows``: see
        ``SessionShape``. Budgets that nobody has said are those of a prompt of ``n_prompt`` tokens,
        by default one that takes all the room, and so is whether products of attention are rounded
        to 8 bits, unless ``is_rounded`` says it. Raises UsageError for settings that do not fit
        together, ResourceError.
        """
        n_prompt = n_positions if n_prompt is None else n_prompt
        plan = self._plan_for(n_prompt, attention, prefill)
        if is_rounded is not None:
            names = plan.precisions
            plan = replace(plan, precision=names.rounded if is_rounded else names.exact)
        return start_runner(plan, self.model, n_positions, all_rows=all_rows)

    def _plan_for(
        self,
        n_prompt: int,
        attention: SparseAttentionConfig | None,
        prefill: PrefillConfig | None = None,
    ) -> RunPlan:
        return self._session.plan.varied(attention, prefill).for_length(n_prompt)

    @property
    def may_round_attention(self) -> bool:
        """Whether this machine has products in 8 bits for it, and no precision was asked for."""
        return self._session.plan.precisions.may_round

    def resolve_attention(
        self, n_prompt: int, attention: SparseAttentionConfig | None = None
    ) -> SparseAttentionConfig:
        """The rule of ``start_runner``, with what is looked up for the model filled in."""
        return self._plan_for(n_prompt, attention).attention

    def choose_precision(
        self, n_prompt: int, attention: SparseAttentionConfig | None = None
    ) -> str:
        """The precision of the prefill attention of ``start_runner``."""
        return self._plan_for(n_prompt, attention).precision

    def report_attention(self, n_prompt: int) -> dict[str, Any]:
        """What reports say of the rule of ``start_runner``."""
        return self.resolve_attention(n_prompt).report(self.config)
