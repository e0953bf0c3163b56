"""The Python interface: load a model once, then generate, stream and tokenise.

What this module imports at its top is needed before the weights are read, and NumPy is not: what
is only needed for an answer is imported while other threads read them, by ``_import_answering``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import isa as instruction_sets
from .attention.base import SparseAttentionConfig
from .attention.headwise import HeadwiseConfig
from .attention.registry import make_sparse_attention
from .config import ModelConfig, PrefillConfig, RuntimeConfig, SamplingParams
from .engine.access import ExclusiveAccess
from .engine.loading import load_model
from .engine.session import Session, fit_chunks
from .errors import UsageError
from .formats.model_cache import resolve_model
from .host.threads import default_thread_count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .engine.generate import Generation
    from .engine.opening import LoadedModel
    from .engine.prompt import TokenIds
    from .engine.prompt_cache import PromptCache
    from .engine.results import GenerationResult, GenerationStream
    from .engine.stats import GenerationStats
    from .engine.transcript import Transcript
    from .runners.base import Runner
    from .tokenizer.chat_template import ChatTemplate, Message

OnProgress = Callable[[str, int, int], None]


def _import_answering() -> None:
    from .engine import prompt, prompt_cache, results, stats, transcript  # noqa: F401


class LLM:
    """A loaded model that answers one prompt at a time.

    ``model`` is the path of a GGUF file or of the folder of an ONNX model, or the name of a known
    model, which is fetched when it is missing. ``attention`` is the rule of the prefill:
    ``HeadwiseConfig``, ``H2OConfig``, ``DenseConfig``, a name such as ``"dense"`` or a mapping
    such as ``{"algorithm": "h2o", "local": 256}``.
    ``context_size``, ``threads``, ``isa``, ``cache_type``,
    ``attention_precision`` and ``check_tensors`` are those of
    ``RuntimeConfig``; ``seed`` serves calls whose ``SamplingParams`` has none; ``chat_template``
    (jinja2) takes the place of the model's own, and ``chat_template_kwargs`` are variables of it
    such as ``{"enable_thinking": False}``. ``on_progress(stage, done, total)`` is called in the
    stages "load" (bytes) and "prefill" (tokens).

    Raises UsageError for a bad option, FormatError for a bad file, and ResourceError, before
    anything large is allocated, for a context or weights that do not fit in memory.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        context_size: int | None = None,
        threads: int | None = None,
        isa: str | None = None,
        seed: int | None = None,
        prefill: PrefillConfig | None = None,
        attention: SparseAttentionConfig | Mapping[str, Any] | str | None = None,
        cache_type: str = "f16",
        attention_precision: str = "auto",
        check_tensors: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        started_at = time.perf_counter()
        runtime = RuntimeConfig(
            context_size=context_size,
            threads=threads,
            isa=isa,
            cache_type=cache_type,
            attention_precision=attention_precision,
            check_tensors=check_tensors,
        )
        if isinstance(attention, str):
            attention = {"algorithm": attention}
        if isinstance(attention, Mapping):
            attention = make_sparse_attention(attention)
        self.prefill = prefill or PrefillConfig()  # as asked for: its chunks may be left open
        attention, prefill = fit_chunks(attention or HeadwiseConfig(), self.prefill)
        self.chunk_size = prefill.with_chunk_size(attention.preferred_chunk_size)[1]
        self._seed = SamplingParams(seed=seed).seed
        self.threads = runtime.threads or default_thread_count()
        self.attention = attention
        self._on_progress = on_progress
        self._current: Generation | None = None
        self._access = ExclusiveAccess()
        self._template_source = chat_template
        self._template_variables = chat_template_kwargs
        self._template: ChatTemplate | None = None
        if runtime.isa is not None:
            instruction_sets.use(runtime.isa)
        self.isa = instruction_sets.active()
        instruction_sets.attention_precision(runtime.attention_precision)  # to refuse it at once
        self._use_threads()

        if chat_template is not None:
            from .tokenizer.chat_template import compile_template

            compile_template(chat_template)  # to refuse it before the weights are read
        path = resolve_model(model)
        weights = load_model(
            path,
            attention=attention,
            prefill=prefill,
            runtime=runtime,
            on_bytes=self._stage_report("load"),
            meanwhile=_import_answering,
        )
        self.model_path = path
        self.attention_precision = instruction_sets.attention_precision(
            runtime.attention_precision, has_key_bias=weights.config.has_key_bias
        )
        self._runtime = replace(runtime, attention_precision=self.attention_precision)
        self._weight_bytes = weights.weight_bytes
        self._model: LoadedModel | None = weights
        self._cache: PromptCache | None = self._make_cache(weights)
        self.load_s = time.perf_counter() - started_at

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._weight_bytes

    @property
    def cache_type(self) -> str:
        """Number type of the key-value cache."""
        return self._runtime.cache_type

    @property
    def model(self) -> LoadedModel:
        """The loaded weights, for tools that start runners of their own."""
        return self._require_open()

    @property
    def config(self) -> ModelConfig:
        """Shape and constants of the model."""
        return self._require_open().config

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of ``text``.

        ``add_special`` adds BOS and EOS where the model asks for them; ``parse_special`` turns
        the text of control tokens, such as ``<|im_start|>``, into those tokens. Raises UsageError
        for a lone surrogate.
        """
        return self._require_open().tokenizer.encode(
            text, add_special=add_special, parse_special=parse_special
        )

    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ``token_ids``; incomplete UTF-8 becomes U+FFFD.

        Raises UsageError for an id outside the vocabulary.
        """
        return self._require_open().tokenizer.decode(token_ids, skip_special=skip_special)

    def generate(
        self,
        prompt: str | TokenIds,
        sampling: SamplingParams | None = None,
        *,
        parse_special: bool = True,
        logprobs: bool = False,
        keep_cache: bool = False,
    ) -> GenerationResult:
        """The whole answer to ``prompt``: raw text, or token ids that are taken as they are."""
        with self._access.call():
            generation = self._open(prompt, sampling, parse_special, logprobs, keep_cache)
            return self._stream(generation, None).finish()

    def stream(
        self,
        prompt: str | TokenIds,
        sampling: SamplingParams | None = None,
        *,
        parse_special: bool = True,
        logprobs: bool = False,
        keep_cache: bool = False,
    ) -> GenerationStream:
        """Chunks of the answer as they are generated; the prompt is read at the first one.

        A new prompt ends the stream of the one before. With ``keep_cache`` it goes on from the
        cache of an earlier such prompt as far as the two agree, and may be gone on from; else
        what came before is forgotten. Raises UsageError for a prompt that is empty or longer than
        the context, BusyError where another thread reads a stream.
        """
        with self._access.call():
            generation = self._open(prompt, sampling, parse_special, logprobs, keep_cache)
            return self._stream(generation, self._access)

    def _open(
        self,
        prompt: str | TokenIds,
        sampling: SamplingParams | None,
        parse_special: bool,
        logprobs: bool,
        keep_cache: bool,
    ) -> Generation:
        from .engine.prompt import check_token_ids
        from .engine.transcript import Transcript

        started_at = time.perf_counter()
        self._refuse_hopeless_length(prompt)
        if not isinstance(prompt, str):
            ids = check_token_ids(prompt, self.config.vocab_size)
            return self._begin(ids, None, sampling, logprobs, keep_cache, started_at)

        def encode_from(start: int) -> list[int]:
            return self.tokenize(prompt[start:], add_special=not start, parse_special=parse_special)

        transcript = Transcript(prompt=prompt, parse_special=parse_special)
        return self._begin_text(transcript, encode_from, sampling, logprobs, keep_cache, started_at)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        logprobs: bool = False,
    ) -> GenerationResult:
        """The model's next message, after ``messages`` of a ``role`` and a ``content`` each.

        The chat template puts them into the form that the model was trained on; control tokens
        written in a message stay plain text. The cache is kept between calls, so that a
        conversation that grows is read only from where it is new. Raises UsageError if there is
        no template, FormatError if it does not work or refuses the messages.
        """
        with self._access.call():
            return self._stream(self._open_chat(messages, sampling, logprobs, True), None).finish()

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        logprobs: bool = False,
        keep_cache: bool = True,
    ) -> GenerationStream:
        """Chunks of the model's next message; see ``chat`` and ``stream``."""
        with self._access.call():
            generation = self._open_chat(messages, sampling, logprobs, keep_cache)
            return self._stream(generation, self._access)

    def _open_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None,
        logprobs: bool,
        keep_cache: bool,
    ) -> Generation:
        from .engine.transcript import Transcript

        started_at = time.perf_counter()
        template = self.chat_template
        chat = template.render(messages)
        self._refuse_hopeless_length(chat.text)
        return self._begin_text(
            Transcript(prompt=chat.text, parse_special=True),
            lambda start: template.encode_rendered(chat, start),
            sampling,
            logprobs,
            keep_cache,
            started_at,
        )

    @property
    def chat_template(self) -> ChatTemplate:
        """The template in use. Raises UsageError if there is none, FormatError if it is broken."""
        from .tokenizer.chat_template import ChatTemplate, read_chat_template

        if self._template is None:
            model = self._require_open()
            source = self._template_source or read_chat_template(model.chat_template)
            if source is None:
                raise UsageError(
                    "this model has no chat template; give one with --chat-template FILE, or "
                    "use the model without chat (--no-chat)"
                )
            self._template = ChatTemplate(
                source, model.tokenizer, variables=self._template_variables
            )
        return self._template

    @property
    def has_open_prompt(self) -> bool:
        """Whether a prompt with ``keep_cache`` was read to its end: what ``save_session`` needs."""
        return self._require_cache().has_open_prompt

    def save_session(self, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Saves the cache of a prompt with ``keep_cache``, to go on from in another process.

        ``extra`` are plain values that ``load_session`` gives back; without such a prompt they are
        all that is saved. The file is replaced as one step. Raises UsageError if there is nothing
        to save, ResourceError if it cannot be written.
        """
        with self._access.call():
            self._require_cache().save(Path(path), extra or {})

    def load_session(self, path: str | Path) -> dict[str, Any]:
        """Takes up a saved session; returns its ``extra``. The next ``keep_cache`` goes on from it.

        Raises FormatError for a damaged file, UsageError for one of another model, attention,
        chunk size or cache type, ResourceError for one that cannot be read or held.
        """
        with self._access.call():
            self._use_threads()
            extra = self._require_cache().load(Path(path), self.config.vocab_size)
            self._current = None
            return extra

    def _begin_text(
        self,
        prompt: Transcript,
        encode_from: Callable[[int], list[int]],
        sampling: SamplingParams | None,
        logprobs: bool,
        keep_cache: bool,
        started_at: float,
    ) -> Generation:
        import numpy as np

        ids = self._require_cache().encode(prompt, encode_from, keep=keep_cache)
        tokens = np.asarray(ids, np.int32)
        return self._begin(tokens, prompt, sampling, logprobs, keep_cache, started_at)

    def _begin(
        self,
        token_ids: NDArray[np.int32],
        prompt: Transcript | None,
        sampling: SamplingParams | None,
        logprobs: bool,
        keep_cache: bool,
        started_at: float,
    ) -> Generation:
        if len(token_ids) == 0:
            raise UsageError(
                "the prompt is empty and this model adds no beginning-of-text token; "
                "give at least one token"
            )
        sampling = sampling or SamplingParams()
        if not isinstance(sampling, SamplingParams):
            raise UsageError(f"sampling must be SamplingParams(...), got {sampling!r:.80}")
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._seed)
        self._use_threads()  # sessions are sized for the number of threads
        self._current = None
        if not keep_cache:  # a saved session must fit the budgets of another process
            self._profile(token_ids)
        self._current = self._require_cache().begin(
            token_ids,
            prompt,
            sampling,
            keep=keep_cache,
            logprobs=logprobs,
            on_prefill=self._stage_report("prefill"),
            started_at=started_at,
        )
        return self._current

    def _stream(self, generation: Generation, access: ExclusiveAccess | None) -> GenerationStream:
        from .engine.results import GenerationStream

        return GenerationStream(
            generation, resume=self._resume, make_stats=self._stats, access=access
        )

    def profile_budgets(self, token_ids: NDArray[np.int32]) -> bool:
        """Fits the attention to the model by the beginning of a long prompt, if it needs that.

        For models without a budget table: the first prompt of ``PROFILED_LENGTH`` tokens or more
        decides for this object; prompts with ``keep_cache`` do not. Whether this call did it.
        """
        with self._access.call():
            return self._profile(token_ids)

    def _profile(self, token_ids: NDArray[np.int32]) -> bool:
        model, attention = self._require_open(), self.attention
        if not attention.needs_profile(model.config):
            return False
        from .engine.calibration import PROFILED_LENGTH, profile_prompt
        from .runners.native import NativeModel

        if len(token_ids) < PROFILED_LENGTH:
            return False
        if not isinstance(model, NativeModel):
            return False
        self._use_threads()
        self.attention = attention.with_profile(profile_prompt(model, token_ids))
        self._cache = self._make_cache(model)
        return True

    def _make_cache(self, model: LoadedModel) -> PromptCache:
        from .engine.prompt_cache import PromptCache

        attention, prefill = fit_chunks(self.attention, self.prefill)
        return PromptCache.of(model, attention=attention, prefill=prefill, runtime=self._runtime)

    def start_runner(
        self,
        n_positions: int,
        *,
        attention: SparseAttentionConfig | None = None,
        prefill: PrefillConfig | None = None,
        all_rows: bool = False,
    ) -> Runner:
        """A runner of its own over the same weights, with room for ``n_positions`` tokens.

        For evaluation and benchmarks, which drive it themselves. ``attention`` and ``prefill``
        default to those of this ``LLM``; ``all_rows`` is described at ``SessionShape``. Raises
        UsageError for settings that do not fit together and ResourceError for a context that does
        not fit in memory.
        """
        self._use_threads()
        attention, prefill = fit_chunks(attention or self.attention, prefill or self.prefill)
        session = Session(
            self._require_open(),
            attention=attention,
            prefill=prefill,
            runtime=replace(self._runtime, context_size=n_positions),
            all_rows=all_rows,
        )
        return session.prepare(n_positions, 0)

    def close(self) -> None:
        """Frees the weights and the session; streams not yet finished end with an error."""
        self._current = None
        self._cache = None
        self._model = None

    def _require_open(self) -> LoadedModel:
        if self._model is None:
            raise UsageError("the model is closed; load it again")
        return self._model

    def _require_cache(self) -> PromptCache:
        if self._cache is None:
            raise UsageError("the model is closed; load it again")
        return self._cache

    def _resume(self, generation: Generation) -> None:
        """Lets ``generation`` go on, if it is the one that the session belongs to."""
        if generation is not self._current:
            raise UsageError(
                "this stream was ended by a newer prompt or by close(); "
                "read a stream to its end first, or load a second LLM"
            )
        self._use_threads()

    def _refuse_hopeless_length(self, prompt: str | TokenIds) -> None:
        from .engine.prompt import refuse_hopeless_length

        limit = self._runtime.context_size or self.config.context_length
        refuse_hopeless_length(prompt, self._require_open().tokenizer, limit)

    def _use_threads(self) -> None:
        """The number of threads belongs to the process; another ``LLM`` may have set its own."""
        from . import _core

        _core.set_num_threads(self.threads)

    def _stage_report(self, stage: str) -> Callable[[int, int], None] | None:
        report = self._on_progress
        if report is None:
            return None

        def on_step(done: int, total: int) -> None:
            report(stage, done, total)

        return on_step

    def _stats(self, generation: Generation) -> GenerationStats:
        from .engine.stats import GenerationStats

        return GenerationStats.of(
            generation,
            model=str(self.model_path),
            isa=self.isa,
            threads=self.threads,
            attention=self.attention.report(self.config),
            cache_type=self._runtime.cache_type,
            attention_precision=self.attention_precision,
            load_s=self.load_s,
            weight_bytes=self._weight_bytes,
        )
