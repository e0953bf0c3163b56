"""Our side of a comparison: one model, dense, through the classes that ``edgeh2o run`` uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeh2o import _core, isa
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.config import PrefillConfig, RuntimeConfig
from edgeh2o.engine.generate import Generation
from edgeh2o.engine.plan import RunPlan
from edgeh2o.runners.native import NativeModel, NativeModelFile
from edgeh2o.sampling_config import SamplingParams

from .log_probabilities import log_softmax


def load_model(path: Path, *, threads: int, isa_name: str | None) -> NativeModel:
    """The weights packed for ``isa_name``, or for the best instruction set of this machine."""
    if isa_name is not None:
        isa.use(isa_name)
    _core.set_num_threads(threads)
    with NativeModelFile(path) as file:
        return file.load()


class DenseModel:
    """A model without sparsity: logits of windows, greedy answers."""

    def __init__(
        self,
        model: NativeModel,
        *,
        context_size: int,
        chunk_size: int,
        precision: str = "auto",
    ) -> None:
        """Allocates a session; windows and answers share its ``context_size`` positions.

        ``chunk_size``, a divisor of it, may be smaller: then both phases of a prefill take part.
        ``precision`` is that of the attention.
        """
        self.tokenizer = model.tokenizer
        plan = RunPlan.of(
            model.config,
            DenseConfig(),
            PrefillConfig(batch_size=context_size, chunk_size=chunk_size),
            RuntimeConfig(attention_precision=precision, threads=_core.num_threads()),
        )
        self._runner = model.start_session(plan.attention, plan.shape(context_size, all_rows=True))

    def window_logits(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Logits [n, vocab] of one window, whose first token gives way to BOS as llama.cpp does."""
        beginning = self.tokenizer.encode("", add_special=True)
        bos_id = self.tokenizer.bos_id
        if bos_id is not None and beginning[:1] == [bos_id]:
            tokens = np.concatenate([np.array([bos_id], np.int32), tokens[1:]])
        self._runner.reset()
        self._runner.prefill(tokens, is_last=True)
        return self._runner.row_logits(0, len(tokens))

    def generate_greedily(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        """The most likely tokens after ``prompt``, end-of-generation tokens excluded."""
        sampling = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
        self._runner.reset()
        generation = Generation(self._runner, self.tokenizer, prompt, sampling)
        return [chunk.token_id for chunk in generation]

    def preference(self, prefix: Sequence[int], chosen: int, other: int) -> float:
        """How many nats more likely ``chosen`` is than ``other`` after ``prefix``."""
        self._runner.reset()
        logits = self._runner.prefill(np.asarray(prefix, np.int32), is_last=True)
        assert logits is not None, "the last batch of a prompt gives logits"
        log_probabilities = log_softmax(logits[None].astype(np.float64))[0]
        return float(log_probabilities[chosen] - log_probabilities[other])
