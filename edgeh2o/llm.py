"""The Python interface, in front of the engine: load a model once, then generate and stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .attention.base import SparseAttentionConfig
from .attention.registry import make_sparse_attention
from .config import PACKED_OFF, PrefillConfig, RuntimeConfig
from .engine.embedding import EUCLIDEAN, POOLINGS, choose_pooling, is_several, normalise
from .engine.open_model import OpenModel
from .engine.opening import load_session
from .engine.ranking import find_scores, require_ranking
from .errors import UsageError
from .lora_config import LoraLike, make_adapters
from .option_fields import require_flag
from .rope_config import ROPE_OF_FILE, RopeConfig
from .sampling_config import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .engine.access import GenerationStream
    from .engine.prompt import TokenIds
    from .engine.results import GenerationResult
    from .engine.session import OnProgress, Session
    from .tokenizer.chat_template import ChatTemplate, Message


class LLM(OpenModel):
    """A loaded model that answers one prompt at a time.

    ``model`` is a GGUF file, a folder of safetensors or ONNX, or the name of a known model, fetched
    if missing. ``attention`` is the rule of the prefill: ``HeadwiseConfig``, ``H2OConfig``,
    ``DenseConfig``, a name (``"dense"``) or a mapping: ``{"algorithm": "h2o", "local": 256}``.
    ``context_size``, ``threads``, ``isa``, ``cache_type``, ``cache_type_k``, ``cache_type_v``,
    ``attention_precision``, ``check_tensors``, ``device``, ``rope``, ``quantize``,
    ``packed_weights`` and ``draft`` are those of ``RuntimeConfig``, ``lora`` a folder of PEFT or
    GGUF file of a LoRA adapter, ``(path, scale)``, or a list of such; ``seed`` serves calls whose
    ``SamplingParams`` has none; ``chat_template`` (jinja2) replaces the model's own, with
    ``chat_template_kwargs`` as variables (``{"enable_thinking": False}``).
    ``on_progress(stage, done, total)`` counts bytes of "load" and tokens of "prefill"; what
    ``check(session)`` raises ends the loading. Raises UsageError for a bad option, FormatError for
    a bad file, ResourceError if memory lacks.
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
        packed_weights: str | Path = PACKED_OFF,
        lora: LoraLike | Sequence[LoraLike] | None = None,
        draft: str | Path | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        check: Callable[[Session], None] | None = None,
    ) -> None:
        session = load_session(
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
                packed_weights=str(packed_weights),
                lora=make_adapters(lora),
                draft=None if draft is None else str(draft),
            ),
            seed=SamplingParams(seed=seed).seed,
            template=chat_template,
            variables=chat_template_kwargs,
            on_progress=on_progress,
            check=check,
        )
        super().__init__(session)

    def generate(
        self,
        prompt: str | TokenIds,
        sampling: SamplingParams | None = None,
        *,
        parse_special: bool = True,
        logprobs: bool = False,
        keep_cache: bool = False,
        lora: Mapping[int, float] | None = None,
    ) -> GenerationResult:
        """The whole answer to ``prompt``: raw text, or token ids that are taken as they are.

        ``lora`` are what adapters count in it, by their number in that of the model; those that are
        not named count nothing. None: all, by their scales.
        """
        opening = partial(self._session.prompts.open, prompt, parse_special=parse_special)
        options = {"logprobs": logprobs, "keep_cache": keep_cache, "lora": lora}
        return self._session.generate(opening, sampling, **options)

    def stream(
        self,
        prompt: str | TokenIds,
        sampling: SamplingParams | None = None,
        *,
        parse_special: bool = True,
        logprobs: bool = False,
        keep_cache: bool = False,
        lora: Mapping[int, float] | None = None,
    ) -> GenerationStream:
        """Chunks of the answer as they are generated; the prompt is read at the first one.

        A new prompt ends the stream of the one before. With ``keep_cache`` it goes on from the
        cache of an earlier such prompt, up to a mark where the two agree, and may be gone on from,
        also when an interrupt ends its reading; else what came before is forgotten. Raises
        UsageError for an empty or too long prompt, BusyError where another thread reads a stream.
        """
        opening = partial(self._session.prompts.open, prompt, parse_special=parse_special)
        options = {"logprobs": logprobs, "keep_cache": keep_cache, "lora": lora}
        return self._session.stream(opening, sampling, **options)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        logprobs: bool = False,
        lora: Mapping[int, float] | None = None,
    ) -> GenerationResult:
        """The model's next message, after ``messages`` of a ``role`` and a ``content`` each.

        The chat template puts them into the form that the model was trained on; control tokens
        in a message stay plain text. The cache is kept, so that a growing conversation is read only
        from where it is new. Raises UsageError without a template, FormatError if it fails.
        """
        opening = partial(self._session.prompts.open_chat, messages)
        options = {"logprobs": logprobs, "keep_cache": True, "lora": lora}
        return self._session.generate(opening, sampling, **options)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        logprobs: bool = False,
        keep_cache: bool = True,
        lora: Mapping[int, float] | None = None,
    ) -> GenerationStream:
        """Chunks of the model's next message; see ``chat`` and ``stream``."""
        opening = partial(self._session.prompts.open_chat, messages)
        options = {"logprobs": logprobs, "keep_cache": keep_cache, "lora": lora}
        return self._session.stream(opening, sampling, **options)

    def embed(
        self,
        texts: str | TokenIds | Sequence[str | TokenIds],
        pooling: str | None = None,
        normalize: bool = True,
        *,
        parse_special: bool = True,
        lora: Mapping[int, float] | None = None,
    ) -> NDArray[np.float32]:
        """The vector of a text or of token ids, float32 [model_dim]; of k of them [k, model_dim].

        It is made of what the logits of tokens are made of, the normed rows behind the last layer,
        by ``pooling``: "mean" of all, "last", "cls" (the first), or "none": a row for every token,
        [n, model_dim], of one text. None: as the model's file says. With ``normalize`` rows have a
        Euclidean length of 1. Prompts are read by the rules of those that are answered: sparse
        where that is faster, and the first long one of an unknown model makes a profile; only the
        last layer reads densely for rows that are not the last. ``DenseConfig()`` as ``attention``
        reads all of it densely. Models whose tokens read those behind them too read a text whole,
        and densely. What came before is forgotten, and a stream ends. ``lora`` as in ``generate``.

        Raises UsageError for an empty or too long text, for no texts, for an unknown pooling, for
        a model on a GPU or of ONNX, and for several texts without pooling; BusyError as ``stream``,
        ResourceError if memory lacks.
        """
        import numpy as np

        require_flag("normalize", normalize)
        several = is_several(texts)
        given = cast("Sequence[str | TokenIds]", texts if several else [texts])
        if isinstance(texts, (list, tuple)) and not texts:
            raise UsageError("there is nothing to embed: give a text, token ids, or a list of such")
        if several and choose_pooling(self.config, pooling) == "none":
            raise UsageError(
                "pooling 'none' gives a row for every token, of one text at a time; take another "
                f"pooling ({', '.join(POOLINGS[1:])}), or call embed() for each text"
            )
        open_prompt = partial(self._session.prompts.open, parse_special=parse_special)
        openings = [partial(open_prompt, each) for each in given]
        vectors = self._session.embed(openings, pooling, lora=lora)
        found = np.stack(vectors) if several else vectors[0]
        return normalise(found, EUCLIDEAN) if normalize else found

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        lora: Mapping[int, float] | None = None,
    ) -> NDArray[np.float32]:
        """How well each of n documents answers a query: float32 [n], the more the better.

        Of reranking models, as llama.cpp has it. Of causal ones, such as Qwen3-Reranker, it is the
        share of the file's first label ("yes") in a softmax over all of them, from 0 to 1; of
        others, such as bge-reranker-v2-m3, the logit of the first label, of any sign. Every
        document is a prompt with the query, in the form that the file names or as a pair of texts,
        in which control tokens stay plain text; it is read as ``embed`` reads. ``lora`` as in
        ``generate``.

        Raises UsageError for another model, for no documents, for what is no text and for a prompt
        that is too long; others as ``embed``.
        """
        ranking = require_ranking(self.config)
        if not isinstance(documents, (list, tuple)):
            raise UsageError(f"documents are a list of texts, got {documents!r:.80}")
        if not documents:
            raise UsageError("there is nothing to rank: give a document at least")
        open_pair = partial(self._session.prompts.open_pair, query)
        openings = [partial(open_pair, document) for document in documents]
        rows = self._session.embed(openings, ranking.pooling, lora=lora)
        return find_scores(rows, self.model)[:, 0].copy()

    @property
    def chat_template(self) -> ChatTemplate:
        """The template in use. Raises UsageError if there is none, FormatError if it is broken."""
        return self._session.prompts.chat_template

    @property
    def has_open_prompt(self) -> bool:
        """Whether a prompt with ``keep_cache`` was read, up to a mark at least: it may be saved."""
        return self._session.cache.has_open_prompt

    def forget(self) -> None:
        """Empties the cache of prompts with ``keep_cache``: they are not saved any more."""
        self._session.forget()

    def save_session(self, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Saves the cache of a prompt with ``keep_cache``, to go on from in another process.

        ``extra`` are plain values that ``load_session`` gives back, all that is saved without such
        a prompt, whose stream ends. The file is replaced in one step. Raises UsageError without
        anything to save and for an ``extra`` that JSON cannot hold, ResourceError if it cannot be
        written.
        """
        self._session.save(_path_of_session(path), extra or {})

    def load_session(self, path: str | Path) -> dict[str, Any]:
        """Takes up a saved session; returns its ``extra``. The next ``keep_cache`` goes on from it.

        Raises FormatError for a damaged file, UsageError for one of other options, ResourceError.
        """
        return self._session.load(_path_of_session(path))


def _path_of_session(path: str | Path) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"a session file is named by its path, got {path!r:.80}")
    return Path(path)
