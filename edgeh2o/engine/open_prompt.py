"""The prompt that a session has in progress: its answer, and what the cache holds as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer
    from .generate import Generation
    from .transcript import Transcript


class OpenPrompt:
    """The latest prompt of a session, which ends where another one begins or its runner goes.

    ``generation`` writes its answer, None where none is written; ``prompt`` is its text, and that
    of the answer of a file, None where there is no text.
    """

    def __init__(self) -> None:
        self.generation: Generation | None = None
        self.prompt: Transcript | None = None

    def begin(self, generation: Generation, prompt: Transcript | None) -> None:
        """Another one."""
        self.generation, self.prompt = generation, prompt

    def end(self, prompt: Transcript | None = None) -> None:
        """It goes, and what the cache holds is what ``prompt`` says."""
        self.generation, self.prompt = None, prompt

    @contextmanager
    def ending(self, has_runner: Callable[[], bool]) -> Iterator[None]:
        """It ends, unless what fails has left the runner."""
        try:
            yield
        except BaseException:
            if not has_runner():
                self.end()
            raise
        self.end()

    def require(self, generation: Generation) -> None:
        """Raises UsageError if ``generation`` is that of an earlier one."""
        if generation is not self.generation:
            raise UsageError(
                "this stream was ended by a newer prompt, a session file or close(); "
                "read a stream to its end first, or load a second LLM"
            )

    def transcript(self, tokenizer: Callable[[], Tokenizer]) -> Transcript | None:
        """What the cache holds as text, with as much of its answer as there is."""
        generation = self.generation
        if self.prompt is None or generation is None:
            return self.prompt
        said = generation.token_ids[: generation.n_said]
        return self.prompt.with_answer(generation.text, said, tokenizer())

    def forget_drafts(self) -> None:
        """Of a file, the answer goes on without those that its runner has read."""
        if self.generation is not None and self.generation.speculation is not None:
            self.generation.speculation.forget_drafts()
