"""How the tokens of an answer are drawn, and what would be drawn of an answer that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ._sampler import Sampler
    from .grammar import GrammarState
    from .logits import LogitsProcessor


class TokenDrawer:
    """What changes the logits, what the grammar allows and the sampler, token by token."""

    def __init__(
        self,
        sampler: Sampler,
        processor: LogitsProcessor | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self._sampler, self._processor, self._grammar = sampler, processor, grammar

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
        if self._grammar is None:
            return self._sampler.sample(choice)
        return self._grammar.draw(self._sampler, choice)

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
