"""Settings of the headwise rule: what can be given, and what values are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..errors import UsageError
from ..option_fields import check_int, check_real, is_int, option
from .base import SparseAttentionConfig
from .budget_points import SHOWN_LENGTH
from .budget_table import Budget, BudgetTable
from .head_budgets import DEFAULT_BUDGET, PROFILE_BUDGET, PROFILE_LENGTH, HeadBudgets
from .prefill_quality import DEFAULT_MAX_LOSS

DECODE_ATTENTIONS = ("auto", "dense", "headwise")
# Of a shorter prompt generated tokens read everything: there is little to spare.
DECODE_FROM = 2048
# What statistics say of the tokens after a shorter prompt than that.
DECODES_ALL = "dense: reading less would save too little at this length"
NOT_MEASURED = "dense: what reading less loses at this length was not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadwiseSettings(SparseAttentionConfig):
    """Fields of ``HeadwiseConfig``, which says what they mean.

    Raises UsageError for values out of range.
    """

    preferred_chunk_size: ClassVar[int] = 256
    # Every chunk waits for the CPU's choice: on an H100 a 1B shape reads 16,384 tokens 1.5 times as
    # fast as in chunks of 256, and the loss is no larger (docs/devices.md).
    gpu_chunk_size: ClassVar[int | None] = 1024
    main_settings: ClassVar[tuple[str, ...]] = ("budget",)

    budget: int | None = option(
        None,
        "--budget",
        help="earlier keys that a query reads besides its chunk, mean over the heads "
        f"(default: what --max-loss {DEFAULT_MAX_LOSS} takes of a budget table, which is "
        f"{DEFAULT_BUDGET} for the packaged one; {PROFILE_BUDGET} with a profile, else all; half "
        f"as many again for every doubling of a prompt beyond {SHOWN_LENGTH:,} tokens, with a "
        f"profile beyond {PROFILE_LENGTH:,}, or what the table says of longer ones)",
        metavar="KEYS",
    )
    max_loss: float | None = option(
        None,
        "--max-loss",
        help="take the smallest calibrated budget whose perplexity loss stays below this "
        f"(default: {DEFAULT_MAX_LOSS}; if there is none, everything is read)",
        metavar="PERCENT",
    )
    budget_table: str | None = option(
        None,
        "--budget-table",
        help="table made by `edgeh2o calibrate` (default: the one of the model); none: only what "
        "prompts teach",
        metavar="FILE",
    )
    local: int = option(
        256, "--headwise-local", help="tokens just before a chunk that are always read"
    )
    sinks: int = option(
        4, "--headwise-sinks", help="first tokens of the prompt that are always read"
    )
    decay: float = option(0.9, "--headwise-decay", help="factor of the old scores at every chunk")
    landmark_size: int = option(
        64, "--landmark-size", help="tokens that share a landmark, 0 = no landmarks"
    )
    landmark_spread: float = option(
        0.4,
        "--landmark-spread",
        help="part of the mass that landmarks have because the keys of a page are not equal, as if "
        "their logits were normal; 0 = as if they were equal (on a GPU always)",
        metavar="PART",
    )
    max_past: int = option(
        8192,
        "--headwise-max-past",
        help="most tokens that a head with unlimited budget reads: beyond it the pages that the "
        "chunk's queries ask for; landmarks grow coarser there; 0 = no limit",
    )
    tail: int = option(
        32,
        "--headwise-tail",
        help="last tokens of the prompt that read everything, as far back as its last logical "
        "batch begins",
    )
    decode_attention: str = option(
        "auto",
        "--decode-attention",
        help="what generated tokens read of a prompt of "
        f"{DECODE_FROM:,} tokens or more: dense: all; headwise: by the budgets what its last "
        "tokens read most, landmarks of the rest, and everything generated since; auto: headwise "
        "where the budget table says that this is harmless and, by what would be read, a tenth of "
        "a token's time is saved, else dense",
        choices=DECODE_ATTENTIONS,
    )
    decode_pages: int = option(
        1024,
        "--decode-pages",
        help="where that is headwise: pages of 4 tokens that a head without a budget "
        "reads of prompts with at least twice as many, each generated token its own; 0 = all",
    )
    budgets: tuple[Budget, ...] | None = field(default=None, metadata={"is_option": False})
    by_query_head: bool = field(default=False, metadata={"is_option": False})
    decode_budgets: tuple[Budget, ...] | None = field(default=None, metadata={"is_option": False})
    decode_from: int = field(default=DECODE_FROM, metadata={"is_option": False})
    # Longest prompt after which they do so; None: there is none. Not of a session file.
    decode_until: int | None = field(
        default=None, compare=False, metadata={"is_option": False, "is_setting": False}
    )
    source: str = field(default="given", metadata={"is_option": False, "is_setting": False})
    prompts: int | None = field(default=None, metadata={"is_option": False, "is_setting": False})
    is_shown: bool = field(
        default=False, compare=False, metadata={"is_option": False, "is_setting": False}
    )
    profile: BudgetTable | None = field(
        default=None, metadata={"is_option": False, "is_setting": False}
    )

    # Of what ``resolved`` gave: what was looked up, for prompts of any length.
    found: HeadBudgets | None = field(
        default=None,
        repr=False,
        compare=False,
        metadata={"is_option": False, "is_setting": False},
    )

    def __post_init__(self) -> None:
        if self.budget is not None and self.max_loss is not None:
            raise UsageError("give --budget or --max-loss, not both")
        if self.budget is not None:
            check_int(self, "budget", 1)
        if self.max_loss is not None:
            check_real(
                self, "max_loss", "a percentage >= 0", lambda value: value >= 0, "0.5 is strict"
            )
        check_real(
            self, "decay", "in [0, 1]", lambda value: 0 <= value <= 1, "use 1 to forget nothing"
        )
        check_real(
            self,
            "landmark_spread",
            "in [0, 1]",
            lambda value: 0 <= value <= 1,
            "use 0 for landmarks of equal keys",
        )
        names = ("local", "sinks", "landmark_size", "max_past", "tail", "decode_pages")
        for name in (*names, "decode_from"):
            check_int(self, name, 0)
        if self.decode_attention not in DECODE_ATTENTIONS:
            raise UsageError(
                "decode_attention (--decode-attention) must be one of "
                f"{', '.join(DECODE_ATTENTIONS)}, got {self.decode_attention!r:.80}"
            )
        for name in ("budgets", "decode_budgets"):
            values = getattr(self, name) or ()
            if not all(budget is None or is_positive_int(budget) for budget in values):
                raise UsageError(f"{name} must be positive integers, or None for the whole past")
        if self.decode_budgets is not None and self.budgets is None:
            raise UsageError("decode_budgets need budgets")


def is_positive_int(value: object) -> bool:
    """Whether it is a whole number above 0, whatever its type."""
    return is_int(value) and value > 0
