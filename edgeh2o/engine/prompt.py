"""What a prompt may be, and its token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import length_hint
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import ContextLengthError, UsageError
from .context_size import context_limit
from .ranking import require_template
from .transcript import Transcript

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..tokenizer.chat_template import Begun, ChatTemplate, Message
    from .models import DescribedModel
    from .plan import RunPlan

TokenIds: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"

# Prompts up to this length are counted exactly before they are refused: that takes a moment.
CHEAP_PROMPT_TOKENS = 2**17


@dataclass(frozen=True, slots=True)
class Prompt:
    """``encode_from(i)`` gives the ids of its text from character i on, all of one without text.

    ``text`` is that as a reader would have it.
    """

    transcript: Transcript | None
    encode_from: Callable[[int], list[int]]
    text: str = ""

    def encode(self, known: Transcript | None = None) -> NDArray[np.int32]:
        """Token ids [n]; what ``known`` has in common with the text keeps its own.

        Raises UsageError if there are none.
        """
        if known is not None and self.transcript is not None:
            ids = known.encode(self.transcript, self.encode_from)
        else:
            ids = self.encode_from(0)
        if len(ids) == 0:
            raise UsageError(
                "the prompt is empty and this model adds no beginning-of-text token; "
                "give at least one token"
            )
        return np.asarray(ids, np.int32)


class PromptReader:
    """Makes prompts of texts, token ids and messages; needs no weights.

    ``template`` takes the place of the model's own, ``variables`` are what it may ask for.
    """

    def __init__(
        self,
        model: DescribedModel,
        plan: RunPlan,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self._config = plan.config
        self._limit = context_limit(plan)
        self._source = template
        self._variables = variables
        self._template: ChatTemplate | None = None
        self._tool_template: ChatTemplate | None = None
        self._latest: tuple[object, Prompt] | None = None

    @property
    def template_source(self) -> object:
        """The text of the template in use, that of the model unchecked; None if there is none."""
        return self._source or self.model.chat_template

    @property
    def chat_template(self) -> ChatTemplate:
        """The template in use. Raises UsageError if there is none, FormatError if it is broken."""
        if self._template is None:
            self._template = self._compile(self.template_source)
        return self._template

    @property
    def tool_template(self) -> ChatTemplate:
        """The template for requests with tools: the model's of that purpose, else as above."""
        if self._source or self.model.tool_template in (None, ""):
            return self.chat_template
        if self._tool_template is None:
            self._tool_template = self._compile(self.model.tool_template)
        return self._tool_template

    def _compile(self, value: object) -> ChatTemplate:
        from ..tokenizer.chat_template import ChatTemplate, read_chat_template

        source = read_chat_template(value)
        if source is None:
            raise UsageError(
                "this model has no chat template; give one with --chat-template, a file or "
                "'chatml', or let 'edgeh2o run' go on with raw text"
            )
        return ChatTemplate(source, self.model.tokenizer, variables=self._variables)

    def open(self, prompt: str | TokenIds, *, parse_special: bool = True) -> Prompt:
        """A prompt of raw text or of token ids.

        Raises UsageError for anything else, and for what no context holds.
        """
        tokenizer = self.model.tokenizer
        if not isinstance(prompt, str):
            self._refuse_hopeless_length(length_hint(prompt))
            ids = _check_token_ids(prompt, self._config.vocab_size).tolist()
            return Prompt(None, lambda _: ids)
        return self._open_text(
            prompt,
            (prompt, parse_special),
            lambda start: tokenizer.encode(
                prompt[start:],
                add_special=not start,
                parse_special=parse_special,
                before=prompt[:start],
            ),
            parse_special=parse_special,
        )

    def open_chat(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        continues: Begun | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """The prompt that the template makes of ``messages``. Raises as both it and ``open`` do.

        ``variables`` are of this conversation alone; with ``tools`` among them the template is
        ``tool_template``. The others are those of ``ChatTemplate.render``.
        """
        given = {**(self._variables or {}), **(variables or {})}
        template = self.tool_template if given.get("tools") else self.chat_template
        chat = template.render(
            messages,
            variables=variables,
            continues=continues,
            add_generation_prompt=add_generation_prompt,
        )
        return self._open_text(
            chat.text, chat, partial(template.encode_rendered, chat), plain=chat.plain_text
        )

    def open_pair(self, query: str, document: str) -> Prompt:
        """The prompt by which a reranking model ranks ``document``; control tokens stay text.

        Raises as ``require_template`` and ``open`` do.
        """
        from ..tokenizer.chat_template import fill_template

        for name, text in (("query", query), ("document", document)):
            if not isinstance(text, str):
                raise UsageError(f"a {name} is a text, got {text!r:.80}")
        tokenizer = self.model.tokenizer
        texts = {"query": query, "document": document}
        template = require_template(self._config)
        if not template:
            counts = map(tokenizer.count_at_least, texts.values())
            self._refuse_hopeless_length(sum(counts))
            ids = tokenizer.encode_pair(query, document)
            return Prompt(None, lambda _: ids, f"{query}\n{document}")
        pair = fill_template(template, texts, tokenizer)

        def encode_from(start: int) -> list[int]:
            # As llama-server: the template has all that begins and ends a prompt.
            return tokenizer.encode(
                pair.text[start:],
                add_special=False,
                parse_special=True,
                stand_ins=pair.stand_ins,
                before=pair.text[:start],
            )

        return self._open_text(pair.text, pair, encode_from, plain=pair.plain_text)

    def _open_text(
        self,
        text: str,
        key: object,
        encode_from: Callable[[int], list[int]],
        *,
        parse_special: bool = True,
        plain: str | None = None,
    ) -> Prompt:
        """``key`` tells what is tokenised: a prompt that was checked keeps its ids."""
        if self._latest is None or self._latest[0] != key:
            self._refuse_hopeless_length(self.model.tokenizer.count_at_least(text))
            transcript = Transcript(prompt=text, parse_special=parse_special)
            prompt = Prompt(
                transcript, lru_cache(maxsize=4)(encode_from), text if plain is None else plain
            )
            self._latest = key, prompt
        return self._latest[1]

    def _refuse_hopeless_length(self, n_tokens: int) -> None:
        """Before a prompt of at least ``n_tokens`` is tokenised or copied."""
        if n_tokens > max(self._limit, CHEAP_PROMPT_TOKENS):
            raise ContextLengthError(n_tokens, self._limit)


def _check_token_ids(token_ids: TokenIds, vocab_size: int) -> NDArray[Any]:
    """The ids as an array [n]. Raises UsageError for one outside the vocabulary."""
    try:
        ids = np.asarray(token_ids)
        kind = f"{ids.ndim} dimensions of {ids.dtype}"
    except (TypeError, ValueError):  # parts of several lengths
        ids, kind = np.empty((0, 0)), "parts of several lengths"
    if not hasattr(token_ids, "__len__") or isinstance(token_ids, (bytes, bytearray, memoryview)):
        ids, kind = np.empty((0, 0)), type(token_ids).__name__
    is_list = isinstance(token_ids, (list, tuple)) and len(token_ids) > 0
    if is_list and all(isinstance(each, str) for each in token_ids):
        raise UsageError(
            f"a prompt is one text, got {len(token_ids)} of them; give one after the other, or "
            "requests to 'edgeh2o serve' or 'batch', which answer several at a time"
        )
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UsageError(
            f"a prompt is text or a flat sequence of integer token ids, got {kind}; "
            "messages are for chat()"
        )
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        index = int(outside[0])
        raise UsageError(
            f"token id {ids[index]} at index {index} is outside the vocabulary "
            f"of {vocab_size} tokens"
        )
    return ids
