"""Where the calls end in which a prompt is read, and so where another prompt may go on.

That depends on the prompt alone, never on what was found in a cache: what is read after a mark is
then what a whole read would have computed. Calls are chunks, counted from where the reading of a
prompt or of a further turn began, with one end besides: where the question of the prompt begins,
behind the document, so that another question finds a mark there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

# The part of a chunk before a question below which it is read with the question.
LEAST_SHARE_BEFORE_QUESTION = 4


@dataclass(frozen=True, slots=True)
class PromptShape:
    """Tokens of a prompt, and those from its question on, 0 where nothing tells them apart."""

    n_tokens: int
    n_question: int = 0


@dataclass(frozen=True, slots=True)
class ReadPlaces:
    """Where prompts were read so far: marks, beginnings of turns, and ends before questions.

    All ascending; the first turn begins at 0.
    """

    marks: tuple[int, ...] = ()
    turns: tuple[int, ...] = (0,)
    questions: tuple[int, ...] = ()

    def up_to(self, position: int) -> ReadPlaces:
        """Those that are left when the tokens from ``position`` on are forgotten."""
        return ReadPlaces(
            tuple(mark for mark in self.marks if mark <= position),
            tuple(turn for turn in self.turns if turn <= position) or (0,),
            tuple(question for question in self.questions if question <= position),
        )

    def with_mark(self, position: int) -> ReadPlaces:
        """With another mark behind the others."""
        return replace(self, marks=(*self.marks, position))

    def keeping(self, marks: Collection[int]) -> ReadPlaces:
        """With those of its marks alone that are among ``marks``."""
        return replace(self, marks=tuple(mark for mark in self.marks if mark in marks))

    def with_turn(self, position: int) -> ReadPlaces:
        """With a turn that begins behind the others."""
        return replace(self, turns=(*self.turns, position))

    def with_question(self, position: int) -> ReadPlaces:
        """With the end of a call before a question, if it is new."""
        if position in self.questions:
            return self
        return replace(self, questions=(*self.questions, position))


@dataclass(frozen=True, slots=True)
class CallGrid:
    """``chunk`` tokens a call; the last call of a prompt has ``least_last`` at least.

    Of a prompt that is told where its question begins, the last call has the question at least.
    """

    chunk: int
    least_last: int

    def question_of(self, shape: PromptShape, turn: int) -> int | None:
        """Where the call ends that comes before the question, in a turn that begins at ``turn``."""
        position = shape.n_tokens - shape.n_question
        n_before = position - turn
        if not shape.n_question or n_before < self.chunk:
            return None  # not worth a call of its own
        least = self.chunk // LEAST_SHARE_BEFORE_QUESTION
        return position if n_before % self.chunk >= least else None

    def ends(
        self, begin: int, end: int, shape: PromptShape, turn: int, *, is_last: bool
    ) -> list[int]:
        """Positions at which calls end that read the tokens [begin, end) of a prompt.

        What is left before ``end``, if that is not the prompt's, is read with what comes then.
        """
        last = end if is_last else max(end, shape.n_tokens)
        question = self.question_of(shape, turn)
        ends, position = [], begin
        while position < last:
            behind = min(position + self.chunk, last)
            if question is not None and position < question < behind:
                behind = question
            ends.append(behind)
            position = behind
        if len(ends) > 1 and ends[-1] - ends[-2] < self.least_last and ends[-2] != question:
            del ends[-2]
        return [each for each in ends if each <= end]

    def allows(self, position: int, shape: PromptShape, places: ReadPlaces) -> bool:
        """Whether a whole read of the prompt has a call that ends at ``position``.

        In ``places`` one does, and the prompts agree up to there.
        """
        turn = max(begin for begin in places.turns if begin <= position)
        question = self.question_of(shape, turn)
        if position > shape.n_tokens - self.least_last and position != question:
            return False
        theirs = {each for each in places.questions if turn < each <= position}
        return theirs == ({question} if question is not None and question <= position else set())

    def last_mark(
        self, marks: Sequence[int], n_common: int, shape: PromptShape, places: ReadPlaces
    ) -> int:
        """The last of ``marks`` among the first ``n_common`` tokens that is allowed, or 0."""
        return max(
            (mark for mark in marks if mark <= n_common and self.allows(mark, shape, places)),
            default=0,
        )
