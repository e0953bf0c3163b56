"""What tests of drafts share: ways to sample, and a runner that looks at several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.engine.fakes import ScriptedRunner

SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repeat_penalty": 1.3, "repeat_last_n": -1},
    {"temperature": 0.3, "top_k": 0, "min_p": 0.0},
    {"temperature": 0.7, "repeat_penalty": 1.1, "repeat_last_n": 20},
    {"temperature": 1.5, "top_p": 0.5},
]
# By what changes the logits before the sampler sees them.
PENALISED = [
    {"temperature": 0.0, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"temperature": 0.7, "presence_penalty": -0.5, "logit_bias": {5: 1.0, 9: -100}},
]


class TogetherRunner(ScriptedRunner):
    """Looks at several tokens; the script goes on from those that were accepted."""

    max_decode_tokens = 16

    def __init__(self, script: Sequence[int], **options: Any) -> None:
        super().__init__(script, **options)
        self.ahead = 0

    def decode(self, token: int) -> np.ndarray:
        self.ahead = 0
        return super().decode(token)

    def decode_batch(self, tokens: np.ndarray) -> np.ndarray:
        assert tokens.dtype == np.int32
        assert self.position + len(tokens) <= self.max_context
        first, n_logits = self.decode(int(tokens[0])), self._n_logits
        rows = [first, *(self._next_logits() for _ in tokens[1:])]
        self.calls[-1] = ("decode_batch", tokens.tolist())
        self._n_logits, self.ahead = n_logits, len(tokens) - 1
        return np.stack(rows)

    def accept(self, n: int) -> None:
        assert n <= self.ahead
        self.ahead -= n
        self.position += n
        self._n_logits += n
