"""How the tokens of an answer are drawn, and what would be drawn of an answer that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ._sampler import Sampler
    from .grammar import GrammarState
    from .logits import DrawnProbabilities, LogitsProcessor


class TokenDrawer:
    """What changes the logits, what the grammar allows and the sampler, token by token.

    ``drawn`` notes what tokens are drawn from.
    """

    def __init__(
        self,
        sampler: Sampler,
        processor: LogitsProcessor | None = None,
        grammar: GrammarState | None = None,
        drawn: DrawnProbabilities | None = None,
    ) -> None:
        self._sampler, self._processor, self._grammar = sampler, processor, grammar
        self._drawn = drawn

    @property
    def vocab_size(self) -> int:
        """Tokens that it draws from."""
        return self._sampler.vocab_size

    def process(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """What is drawn from instead of ``logits`` [vocab_size], which stay as they are."""
        return logits if self._processor is None else self._processor.process(logits)

    def draw(self, choice: NDArray[np.float32]) -> int:
        """A token of what ``process`` returned.

        Raises ValueError where none can be drawn, UsageError where the grammar cannot go on.
        """
        of = None if self._drawn is None else self._sampler.distribution(choice)
        if self._grammar is None:
            token_id = self._sampler.sample(choice)
        else:
            token_id = self._grammar.draw(self._sampler, choice)
        if self._drawn is not None and of is not None:
            self._drawn.note(*of, token_id)
        return token_id

    def accept(self, token_id: int) -> None:
        """``token_id`` was drawn. Raises UsageError where the grammar cannot go on."""
        self._sampler.accept(token_id)
        if self._processor is not None:
            self._processor.accept(token_id)
        if self._grammar is not None:
            self._grammar.accept(token_id)

    def twin(self, vocab_size: int) -> TokenDrawer:
        """One for the logits of another model, of ``vocab_size`` tokens; see ``follow``."""
        return TokenDrawer(self._sampler.twin(vocab_size))

    def follow(self, other: TokenDrawer) -> None:
        """Draws from now on what ``other`` will from the same logits; that one stays as it is."""
        self._sampler.follow(other._sampler)
        self._processor = other._processor and other._processor.ahead(self.vocab_size)
        self._grammar = other._grammar and other._grammar.ahead()
