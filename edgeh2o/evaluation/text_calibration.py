"""Measures the texts that a table is made of; each is read densely once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..attention.dense import DenseConfig
from ..attention.headwise import HeadwiseConfig
from ..attention.rounding_quality import RoundingQuality, rounding_limit
from ..engine.calibration import FIRST_QUERY, OnAttention, measure_head_errors
from .comparison import WindowComparer, score_window
from .progress import Steps
from .rounding_calibration import RoundingMeter

if TYPE_CHECKING:
    from ..attention.budget_table import BudgetTable
    from ..config import PrefillConfig
    from ..llm import LLM
    from ..runners.base import Runner
    from .calibration_notes import CalibrationNotes
    from .progress import Progress

# Mean budgets whose perplexity loss is measured, for --max-loss.
MEASURED_BUDGETS = (512, 768, 1024, 1280)
# A dense read that shows the heads' errors takes about as long as so many others.
_ERROR_STEPS = 2


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A window of tokens [n] of a text called ``name``; queries before ``first_query`` are not
    measured."""

    name: str
    tokens: NDArray[np.int32]
    first_query: int = FIRST_QUERY


@dataclass(frozen=True, slots=True)
class TextReading:
    """What a dense read says of a text.

    ``errors`` are those of ``HeadErrors``, ``nll`` is the mean negative log-probability of the
    predictions after the first ``FIRST_QUERY``. Products in 8 bits, where they were measured, have
    a divergence ``rounding_kl`` from exact ones and add ``rounding_loss`` to ``nll``.
    """

    errors: list[list[float]]
    nll: float
    rounding_kl: float | None = None
    rounding_loss: float = 0.0


class TextMeter:
    """Reads windows of ``length`` tokens, whole, densely and by budgets.

    Raises ResourceError when two sessions do not fit in memory.
    """

    def __init__(self, llm: LLM, length: int, notes: CalibrationNotes) -> None:
        self._llm = llm
        self._length = length
        self._notes = notes
        self._prefill = _in_one_batch(llm.prefill, length)
        runner = start_reader(llm, length)
        self._comparer = WindowComparer(runner)
        # Latent attention has shorter batches: heads are then measured in another read.
        self._is_at_once = runner.batch_size >= length
        # What a probe computes from exact keys and values fits what runs attend to: 16 bits change
        # it by 3e-4, where heads are wrong by hundredths.
        self._is_shown = llm.cache_type == "f16" and llm.attention_precision in ("f32", "int16")

    def read(self, texts: Sequence[CalibrationText], progress: Progress) -> list[TextReading]:
        """One reading of each text. ``progress`` makes ``count_reading_steps``.

        Nothing is rounded after a text that loses too much by it.
        """
        n_layers = self._llm.config.n_layers
        steps = Steps(progress, count_reading_steps(self._llm, len(texts)), size=n_layers)
        readings: list[TextReading] = []
        may_round = self._llm.may_round_attention
        for text in texts:

            def measure(text: CalibrationText = text, may_round: bool = may_round) -> Any:
                return asdict(self._read(text, may_round=may_round, steps=steps))

            reading = TextReading(**self._notes.recall(f"text: {text.name}", measure))
            readings.append(reading)
            kl = reading.rounding_kl
            may_round = kl is not None and kl <= rounding_limit(text.name)
        steps.finish()
        return readings

    def _read(self, text: CalibrationText, *, may_round: bool, steps: Steps) -> TextReading:
        scores: list[NDArray[np.float64]] = []

        def read(on_attention: OnAttention | None = None) -> None:
            def show(*rows: Any) -> None:
                assert on_attention is not None
                on_attention(*(rows if self._is_shown else (*rows[:-1], None)))

            scores.append(
                self._comparer.score(
                    text.tokens,
                    first=FIRST_QUERY,
                    on_attention=show if on_attention else None,
                    on_layer=lambda *_: steps.advance_parts(_ERROR_STEPS),
                )
            )

        measured = measure_head_errors(
            self._llm.model,
            text.tokens,
            threads=self._llm.threads,
            first_query=text.first_query,
            read=read if self._is_at_once else None,
        )
        if not self._is_at_once:
            read()
        reading = TextReading(measured.errors.tolist(), float(scores[0].mean()))
        if not may_round:
            return reading
        meter = RoundingMeter(self._llm, self._comparer, self._prefill)
        kl, loss = meter.measure(text.tokens, first=FIRST_QUERY)
        steps.advance()
        return replace(reading, rounding_kl=kl, rounding_loss=loss)

    def measure_losses(
        self,
        table: BudgetTable,
        texts: Sequence[CalibrationText],
        readings: Sequence[TextReading],
        progress: Progress,
    ) -> dict[int, float]:
        """Perplexity losses in percent by mean budget, of the predictions that readings score.

        ``progress`` makes ``count_loss_steps``.
        """
        steps = Steps(progress, count_loss_steps(len(texts)), size=self._llm.config.n_layers)
        losses = {}
        for budget in MEASURED_BUDGETS:
            attention = HeadwiseConfig(
                budgets=table.budgets(budget), by_query_head=table.n_heads > 0
            )
            sparse = self._llm.start_runner(
                self._length, attention=attention, prefill=self._prefill, all_rows=True
            )
            added = []
            for text, reading in zip(texts, readings, strict=True):

                def measure(text: CalibrationText = text, sparse: Any = sparse) -> float:
                    nll = score_window(sparse, text.tokens, first=FIRST_QUERY)
                    steps.advance()
                    return float(nll.mean())

                nll = self._notes.recall(f"loss with {budget} keys: {text.name}", measure)
                added.append(nll - reading.nll)
            losses[budget] = round(100 * float(np.expm1(np.mean(added))), 3)
        steps.finish()
        return losses


def start_reader(llm: LLM, length: int) -> Runner:
    """A runner that reads texts of ``length`` tokens densely, at once where it has room for that.

    Exactly, with all rows of the last layer. Raises ResourceError where memory does not suffice.
    """
    return llm.start_runner(
        length,
        attention=DenseConfig(),
        prefill=_in_one_batch(llm.prefill, length),
        all_rows=True,
        is_rounded=False,
    )


def _in_one_batch(prefill: PrefillConfig, length: int) -> PrefillConfig:
    """The heads' errors need all of a text's rows at once."""
    if prefill.batch_size >= length:
        return prefill
    batch = math.lcm(prefill.batch_size, DenseConfig.preferred_chunk_size)
    return replace(prefill, batch_size=-(-length // batch) * batch)


def count_reading_steps(llm: LLM, n_texts: int) -> int:
    """Steps of ``TextMeter.read``, each about as long as a read of a text."""
    return n_texts * (_ERROR_STEPS + llm.may_round_attention)


def count_loss_steps(n_texts: int) -> int:
    """Steps of ``TextMeter.measure_losses``."""
    return n_texts * len(MEASURED_BUDGETS)


def summarise_rounding(
    texts: Sequence[CalibrationText], readings: Sequence[TextReading]
) -> RoundingQuality | None:
    """That of the texts whose rounding was measured; None if no text's was."""
    measured: Mapping[str, TextReading] = {
        text.name: reading
        for text, reading in zip(texts, readings, strict=True)
        if reading.rounding_kl is not None
    }
    if not measured:
        return None
    loss = 100 * float(np.expm1(np.mean([each.rounding_loss for each in measured.values()])))
    kl = {name: round(each.rounding_kl or 0.0, 6) for name, each in measured.items()}
    return RoundingQuality(length=len(texts[0].tokens), kl=kl, loss=round(loss, 4))
