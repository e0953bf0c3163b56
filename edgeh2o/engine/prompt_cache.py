"""One session of a model and what its cache holds: prompts go on from it, files keep it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import PrefillConfig, RuntimeConfig, SamplingParams
from ..errors import FormatError, UsageError
from .generate import Generation, OnPrefill
from .session import Session
from .transcript import Transcript

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..attention.base import SparseAttentionConfig
    from .opening import LoadedModel


class PromptCache:
    """``settings`` and the model are what a session file must agree with: see ``session_file``."""

    def __init__(self, session: Session, model: LoadedModel, settings: Mapping[str, Any]) -> None:
        self._session = session
        self._model = model
        self._tokenizer = model.tokenizer
        self._settings = settings
        self._transcript: Transcript | None = None
        self._generation: Generation | None = None

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        *,
        attention: SparseAttentionConfig,
        prefill: PrefillConfig,
        runtime: RuntimeConfig,
    ) -> PromptCache:
        """An empty one. Its files hold the attention in effect, budgets of the model included."""
        session = Session(model, attention=attention, prefill=prefill, runtime=runtime)
        settings = {
            "attention": attention.resolved(model.config).to_dict(),
            "chunk_size": prefill.chunk_size,
            "cache_type": runtime.cache_type,
        }
        return cls(session, model, settings)

    def encode(
        self, prompt: Transcript, encode_from: Callable[[int], list[int]], *, keep: bool
    ) -> list[int]:
        """Token ids of a prompt; with ``keep``, what is in the cache already keeps its tokens.

        ``encode_from(i)`` gives the ids of the prompt's text from character i on.
        """
        known = self._latest_transcript() if keep else None
        return encode_from(0) if known is None else known.encode(prompt, encode_from)

    def begin(
        self,
        token_ids: NDArray[np.int32],
        prompt: Transcript | None,
        sampling: SamplingParams,
        *,
        keep: bool,
        logprobs: bool,
        on_prefill: OnPrefill | None,
        started_at: float,
    ) -> Generation:
        """Makes room for a prompt and its answer; ``prompt`` is its text where it has one.

        With ``keep`` the cache serves as far as it agrees with the prompt, and stays fit for a
        prompt that goes on from this one.
        """
        n_cached = 0
        if keep:
            runner, n_cached = self._session.resume(token_ids.tolist(), sampling.max_tokens)
        else:
            runner = self._session.prepare(len(token_ids), sampling.max_tokens)
        self._transcript = prompt and prompt.with_prompt_ids(token_ids.tolist())
        self._generation = Generation(
            runner,
            self._tokenizer,
            token_ids,
            sampling,
            logprobs=logprobs,
            n_cached=n_cached,
            stays_open=keep,
            on_prefill=on_prefill,
            started_at=started_at,
        )
        return self._generation

    def forget(self) -> None:
        """Leaves nothing to go on from, and no word of it to save."""
        self._generation = self._transcript = None
        if (runner := self._session.runner) is not None:
            runner.reset()

    @property
    def has_open_prompt(self) -> bool:
        """Whether there is something to go on from."""
        runner = self._session.runner
        return runner is not None and runner.prompt_logits is not None

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Writes a session file; one without a cache if there is only ``extra`` to go on from.

        Raises UsageError if there is nothing at all.
        """
        from .session_file import write_session

        transcript = self._latest_transcript()
        runner = self._session.runner
        if runner is None or not self.has_open_prompt:
            if not extra:
                raise UsageError(
                    "there is no prompt to save: one must have been read to its end with keep_cache"
                )
            runner, transcript = self._session.prepare(0, 0), None
        write_session(
            path,
            fingerprint=self._fingerprint(),
            state=runner.export_state(),
            rows=runner.cached_rows(),
            document={
                "transcript": None if transcript is None else transcript.to_dict(),
                "extra": dict(extra),
            },
        )

    def load(self, path: Path, vocab_size: int) -> dict[str, Any]:
        """Takes up a session file; returns its ``extra``."""
        from .session_file import open_session

        with open_session(path, fingerprint=self._fingerprint(), vocab_size=vocab_size) as saved:
            values, extra = saved.document.get("transcript"), saved.document.get("extra")
            if not isinstance(extra, dict):
                raise FormatError(f"the session file {path} lacks its document; delete it")
            transcript = None
            if values is not None:
                transcript = Transcript.from_dict(values, vocab_size=vocab_size)
            runner = self._session.restore(saved.state)
            try:
                saved.fill(runner.cached_rows())
            except BaseException:
                runner.reset()
                raise
            self._generation, self._transcript = None, transcript
        return extra

    def _fingerprint(self) -> Mapping[str, Any]:
        return {"model": self._model.fingerprint, **self._settings}

    def _latest_transcript(self) -> Transcript | None:
        """What was read last, with as much of its answer as there is."""
        generation = self._generation
        if self._transcript is None or generation is None:
            return self._transcript
        return self._transcript.with_answer(generation.text, generation.token_ids, self._tokenizer)
