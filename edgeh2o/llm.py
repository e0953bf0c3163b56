"""The Python interface, in front of the engine: load a model once, then generate and stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .attention.base import SparseAttentionConfig
from .attention.registry import make_sparse_attention
from .config import PrefillConfig, RuntimeConfig, SamplingParams
from .engine.opening import load_session
from .model_config import ModelConfig
from .rope_config import ROPE_OF_FILE, RopeConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .engine.access import GenerationStream
    from .engine.models import LoadedModel
    from .engine.prompt import TokenIds
    from .engine.results import GenerationResult
    from .engine.session import OnProgress, Session
    from .runners.base import Runner
    from .tokenizer.chat_template import ChatTemplate, Message


class LLM:
    """A loaded model that answers one prompt at a time.

    ``model`` is a GGUF file, a folder of safetensors or ONNX, or the name of a known model, fetched
    if missing. ``attention`` is the rule of the prefill: ``HeadwiseConfig``, ``H2OConfig``,
    ``DenseConfig``, a name (``"dense"``) or a mapping: ``{"algorithm": "h2o", "local": 256}``.
    ``context_size``, ``threads``, ``isa``, ``cache_type``, ``cache_type_k``, ``cache_type_v``,
    ``attention_precision``, ``check_tensors``, ``device``, ``rope`` and ``quantize`` are those of
    ``RuntimeConfig``; ``seed`` serves calls whose ``SamplingParams`` has none; ``chat_template``
    (jinja2) replaces the model's own, with ``chat_template_kwargs`` as variables
    (``{"enable_thinking": False}``). ``on_progress(stage, done, total)`` counts bytes of "load" and
    tokens of "prefill"; what ``check(session)`` raises ends the loading. Raises UsageError for a
    bad option, FormatError for a bad file, ResourceError if memory lacks.
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
        cache_type_k: str | None = None,
        cache_type_v: str | None = None,
        attention_precision: str = "auto",
        check_tensors: bool = False,
        device: str = "auto",
        rope: RopeConfig = ROPE_OF_FILE,
        quantize: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        check: Callable[[Session], None] | None = None,
    ) -> None:
        self._session = session = load_session(
            model,
            make_sparse_attention(attention),
            prefill or PrefillConfig(),
            RuntimeConfig(
                context_size=context_size,
                threads=threads,
                isa=isa,
                cache_type=cache_type,
                cache_type_k=cache_type_k,
                cache_type_v=cache_type_v,
                attention_precision=attention_precision,
                check_tensors=check_tensors,
                device=device,
                rope=rope,
                quantize=quantize,
            ),
            seed=SamplingParams(seed=seed).seed,
            template=chat_template,
            variables=chat_template_kwargs,
            on_progress=on_progress,
            check=check,
        )
        self.model_path, self.load_s = session.path, session.load_s
        self.weight_bytes, plan = session.model.weight_bytes, session.plan
        self.prefill, self.chunk_size, self.threads = plan.prefill, plan.chunk_size, plan.threads
        self.isa, self.device, self.cache_type = plan.isa, plan.device, plan.cache_type
        self.attention_precision = plan.precision

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def attention(self) -> SparseAttentionConfig:
        """The rule of the prefill as asked for, with a profile if this process has made one."""
        return self._session.plan.settings

    @property
    def model(self) -> LoadedModel:
        """The loaded weights, for tools that start runners of their own."""
        return self._session.model

    @property
    def config(self) -> ModelConfig:
        """Shape and constants of the model."""
        return self._session.plan.config

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of ``text``.

        ``add_special`` adds BOS and EOS where the model asks for them; ``parse_special`` turns text
        of control tokens, such as ``<|im_start|>``, into these. UsageError for a lone surrogate.
        """
        return self._session.prompts.model.tokenizer.encode(
            text, add_special=add_special, parse_special=parse_special
        )

    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ``token_ids``; incomplete UTF-8 becomes U+FFFD. UsageError for an unknown id."""
        return self._session.prompts.model.tokenizer.decode(token_ids, skip_special=skip_special)

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
        opening = partial(self._session.prompts.open, prompt, parse_special=parse_special)
        return self._session.generate(opening, sampling, logprobs=logprobs, keep_cache=keep_cache)

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
        cache of an earlier such prompt, up to a mark where the two agree, and may be gone on from,
        also when an interrupt ends its reading; else what came before is forgotten. Raises
        UsageError for an empty or too long prompt, BusyError where another thread reads a stream.
        """
        opening = partial(self._session.prompts.open, prompt, parse_special=parse_special)
        return self._session.stream(opening, sampling, logprobs=logprobs, keep_cache=keep_cache)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        logprobs: bool = False,
    ) -> GenerationResult:
        """The model's next message, after ``messages`` of a ``role`` and a ``content`` each.

        The chat template puts them into the form that the model was trained on; control tokens
        in a message stay plain text. The cache is kept, so that a growing conversation is read only
        from where it is new. Raises UsageError without a template, FormatError if it fails.
        """
        opening = partial(self._session.prompts.open_chat, messages)
        return self._session.generate(opening, sampling, logprobs=logprobs, keep_cache=True)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        logprobs: bool = False,
        keep_cache: bool = True,
    ) -> GenerationStream:
        """Chunks of the model's next message; see ``chat`` and ``stream``."""
        opening = partial(self._session.prompts.open_chat, messages)
        return self._session.stream(opening, sampling, logprobs=logprobs, keep_cache=keep_cache)

    @property
    def chat_template(self) -> ChatTemplate:
        """The template in use. Raises UsageError if there is none, FormatError if it is broken."""
        return self._session.prompts.chat_template

    @property
    def has_open_prompt(self) -> bool:
        """Whether a prompt with ``keep_cache`` was read, up to a mark at least: it may be saved."""
        return self._session.has_open_prompt

    def forget(self) -> None:
        """Empties the cache of prompts with ``keep_cache``: they are not saved any more."""
        self._session.forget()

    def save_session(self, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Saves the cache of a prompt with ``keep_cache``, to go on from in another process.

        ``extra`` are plain values that ``load_session`` gives back, all that is saved without such
        a prompt. The file is replaced in one step. Raises UsageError without anything to save,
        ResourceError if it cannot be written.
        """
        self._session.save(Path(path), extra or {})

    def load_session(self, path: str | Path) -> dict[str, Any]:
        """Takes up a saved session; returns its ``extra``. The next ``keep_cache`` goes on from it.

        Raises FormatError for a damaged file, UsageError for one of other options, ResourceError.
        """
        return self._session.load(Path(path))

    def profile_budgets(self, token_ids: NDArray[np.int32]) -> bool:
        """Makes a profile of ``token_ids`` [n >= 2,048] if nothing is known of the model.

        For evaluations, of what later prompts get; it is not kept. Whether this call did it.
        """
        return self._session.profile(token_ids)

    def start_runner(
        self,
        n_positions: int,
        *,
        attention: SparseAttentionConfig | None = None,
        prefill: PrefillConfig | None = None,
        all_rows: bool = False,
    ) -> Runner:
        """A runner over the same weights, with room for ``n_positions`` tokens.

        ``attention`` and ``prefill`` default to those of this ``LLM``; ``all_rows``: see
        ``SessionShape``. Raises UsageError for settings that do not fit together, ResourceError.
        """
        plan = self._session.plan.varied(attention, prefill)
        return plan.start_runner(self.model, n_positions, all_rows=all_rows)

    def close(self) -> None:
        """Frees the weights and the session; streams not yet finished end with an error."""
        self._session.close()
