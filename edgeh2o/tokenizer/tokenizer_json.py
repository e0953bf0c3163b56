"""Tokenizers from a ``tokenizer.json`` of the Hugging Face ``tokenizers`` library, and to one.

The library does the encoding; special tokens are found by us, as for GGUF models, so that control
tokens in a user's text stay text. Two kinds of vocabularies are known: byte-level BPE, and
SentencePiece pieces with byte fallback.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Pipeline

from ..errors import FormatError, UsageError
from .base import After, Tokenizer
from .bpe import MERGES_KEY
from .byte_bpe import ByteBpeTokenizer, spell_byte_characters
from .json_bpe import PlainBpe, read_plain_bpe
from .vocabulary import (
    BLANK,
    TokenType,
    Vocabulary,
    read_string_list,
    read_vocabulary,
    spell_piece,
)

MODEL_NAME = "tokenizer.json"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# The parts that may be sequences, and what these call their steps.
_INNER = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
_CURE = "fetch tokenizer.json of the model again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """What the files beside tokenizer.json say; ids or texts, None where they are silent."""

    vocab_size: int
    bos: int | str | None = None
    eos: int | str | None = None
    more_eos: tuple[int, ...] = ()


class JsonTokenizer(Tokenizer):
    """The pipeline of a tokenizer.json."""

    def __init__(self, text: str, settings: TokenizerSettings) -> None:
        """Raises FormatError for a file that is malformed, or does not fit the model."""
        plain = read_plain_bpe(text)
        self._plain = plain
        self._pipeline = _build_pipeline(text if plain is None else plain.steps)
        document = _describe_steps(self._pipeline)
        self._later = self._pipeline
        if _without_prefix(document, ("first",)) is not None:
            bare = _without_prefix(parse_document(text), ("first",))
            self._later = _build_pipeline(json.dumps(bare))
        self.is_byte_level = _is_byte_level(document)
        vocabulary, metadata = _read_vocabulary(self._pipeline, plain, settings, self.is_byte_level)
        self.metadata: Mapping[str, object] = metadata  # as a GGUF file would have it
        super().__init__(
            vocabulary,
            metadata,
            model_name=MODEL_NAME,
            pre_name="default",
            default_add_bos=False,
            space_prefix=not self.is_byte_level and _adds_space(document),
        )
        if plain is not None and not _matches_always(vocabulary, plain.added):
            self._plain, self._pipeline = None, _build_pipeline(text)
            self._later = self._pipeline

    def split_words(self, text: str) -> list[str]:
        """The words within which byte-level merges are made, a character for every byte."""
        splitter = self._pipeline.pre_tokenizer
        return [] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]

    @cached_property
    def _going_on(self) -> Pipeline:
        """What encodes text that goes on from other text: it puts no blank before it."""
        bare = _without_prefix(json.loads(self._pipeline.to_str()), ("first", "always"))
        return self._pipeline if bare is None else _build_pipeline(json.dumps(bare))

    def _encode_text(self, text: str, after: After) -> Sequence[int]:
        try:
            if self._plain is not None:
                return self._plain.encode(self.split_words(text))
            if after == "text":
                pipeline = self._going_on
            else:
                pipeline = self._pipeline if after == "start" else self._later
            ids: list[int] = pipeline.encode(text, add_special_tokens=False).ids
        except Exception as error:
            raise UsageError(f"the text cannot be tokenised: {error}") from None
        return ids

    def _spell(self, text: str) -> bytes:
        return spell_byte_characters(text) if self.is_byte_level else spell_piece(text)


def dump_tokenizer(
    metadata: Mapping[str, object], tokenizer: Tokenizer, templates: Mapping[str, str]
) -> dict[str, str]:
    """The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json, by file name.

    ``templates`` are chat templates by name; "default" is the one that needs none.
    """
    if isinstance(tokenizer, ByteBpeTokenizer):
        merges = (text.split(" ") for text in read_string_list(metadata, MERGES_KEY))
        pairs = [(left, right) for left, right in merges]
        ignore_merges = tokenizer.rule.ignore_merges
        model = models.BPE(dict(tokenizer.vocabulary.ids), pairs, ignore_merges=ignore_merges)
        pipeline = Pipeline(model)
        pipeline.pre_tokenizer = tokenizer.rule.build()
        pipeline.decoder = decoders.ByteLevel()
    else:
        pipeline = _sentencepiece_pipeline(metadata)
    vocabulary = tokenizer.vocabulary
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            pipeline.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        elif kind == TokenType.USER_DEFINED:
            pipeline.add_tokens([AddedToken(text, normalized=False)])
    if tokenizer.add_bos or tokenizer.add_eos:
        before = f"{tokenizer.bos_text} " if tokenizer.add_bos else ""
        after = f" {tokenizer.eos_text}" if tokenizer.add_eos else ""
        ids = [(tokenizer.bos_text, tokenizer.bos_id), (tokenizer.eos_text, tokenizer.eos_id)]
        pipeline.post_processor = processors.TemplateProcessing(
            single=f"{before}$A{after}",
            special_tokens=[pair for pair in ids if pair[1] is not None],
        )
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, text in (("bos_token", tokenizer.bos_text), ("eos_token", tokenizer.eos_text)):
        if text:
            config[key] = text
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    return {
        "tokenizer.json": pipeline.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2),
    }


def _sentencepiece_pipeline(metadata: Mapping[str, object]) -> Pipeline:
    """Pieces that merge by score, as merges: the highest score first."""
    tokens = read_string_list(metadata, "tokenizer.ggml.tokens")
    scores: Any = metadata["tokenizer.ggml.scores"]
    types: Any = metadata["tokenizer.ggml.token_type"]
    ids = {text: i for i, text in enumerate(tokens)}
    mergeable = {
        text for text, i in ids.items() if types[i] in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    pairs = [
        (-float(scores[ids[text]]), ids[text[:i]], ids[text[i:]], text[:i], text[i:])
        for text in mergeable
        for i in range(1, len(text))
        if text[:i] in mergeable and text[i:] in mergeable
    ]
    unknown = next((text for text, i in ids.items() if types[i] == TokenType.UNKNOWN), None)
    merges = [(left, right) for *_, left, right in sorted(pairs)]
    pipeline = Pipeline(
        models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps = [normalizers.Replace(" ", BLANK)]
    ending: list[Any] = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(BLANK))  # type: ignore[arg-type]
        ending.append(decoders.Strip(" ", 1, 0))
    pipeline.normalizer = normalizers.Sequence(steps)
    pipeline.decoder = decoders.Sequence(ending)
    return pipeline


def parse_document(text: str) -> dict[str, Any]:
    """The object of a tokenizer.json. Raises FormatError for anything else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"tokenizer.json is not JSON ({error}); {_CURE}") from None
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise FormatError(f"tokenizer.json describes no tokenizer; {_CURE}")
    return document


def _build_pipeline(text: str) -> Pipeline:
    try:
        pipeline = Pipeline.from_str(text)
    except BaseException as error:
        # The library panics, which is no Exception, over some malformed files.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        parse_document(text)  # which says more of what is no JSON
        raise FormatError(f"tokenizer.json cannot be used: {error}; {_CURE}") from None
    # Both would change the ids of a prompt.
    pipeline.no_truncation()
    pipeline.no_padding()
    pipeline.encode_special_tokens = True
    return pipeline


def _describe_steps(pipeline: Pipeline) -> dict[str, Any]:
    """The parts of a tokenizer.json but its vocabulary, as the library has read them.

    The text is so parsed once, by the library, which takes most of the time.
    """
    parts = {part: getattr(pipeline, part) for part in _INNER}
    return {part: step and json.loads(step.__getstate__()) for part, step in parts.items()}


def _steps(document: Mapping[str, Any], part: str) -> Iterator[dict[str, Any]]:
    """The steps of the normalizer, pre-tokenizer or decoder, those of sequences one by one."""
    waiting = [document.get(part)]
    while waiting:
        step = waiting.pop(0)
        if not isinstance(step, dict):
            continue
        if step.get("type") == "Sequence":
            waiting[:0] = step.get(_INNER[part]) or []
        else:
            yield step


def _is_byte_level(document: Mapping[str, Any]) -> bool:
    kinds = {step.get("type") for step in _steps(document, "decoder")}
    if "ByteLevel" in kinds:
        return True
    pieces = {step.get("type") for step in _steps(document, "pre_tokenizer")} | kinds
    if kinds & {"ByteFallback", "Metaspace"} or "Metaspace" in pieces:
        return False
    raise FormatError(
        f"tokenizer.json decodes by {', '.join(sorted(map(str, kinds))) or 'nothing'}; byte-level "
        "BPE and SentencePiece tokenizers are supported"
    )


def _adds_space(document: Mapping[str, Any]) -> bool:
    prepends = any(step.get("type") == "Prepend" for step in _steps(document, "normalizer"))
    return prepends or any(
        step.get("type") == "Metaspace"
        and step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        != "never"
        for step in _steps(document, "pre_tokenizer")
    )


def _without_prefix(document: Mapping[str, Any], schemes: Collection[str]) -> dict[str, Any] | None:
    """The document without the blank before a text, if it has one by one of ``schemes``.

    "first": before the first text alone; "always": after special tokens too.
    """
    parts = ("normalizer", "pre_tokenizer")
    copy = {**document, **{part: deepcopy(document.get(part)) for part in parts}}
    found = False
    for step in _steps(copy, "pre_tokenizer"):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") in schemes:
            step["prepend_scheme"] = "never"
            found = True
    for step in _steps(copy, "normalizer"):
        if step.get("type") == "Prepend" and "always" in schemes:
            step["prepend"] = ""
            found = True
    return copy if found else None


def _matches_always(vocabulary: Vocabulary, added: Sequence[tuple[str, bool]]) -> bool:
    """Whether all added tokens that the library finds in any text are found before it is asked."""
    types, ids = vocabulary.types, vocabulary.ids
    return all(
        types[ids[text]] == TokenType.USER_DEFINED for text, is_special in added if not is_special
    )


def _read_vocabulary(
    pipeline: Pipeline, plain: PlainBpe | None, settings: TokenizerSettings, is_byte_level: bool
) -> tuple[Vocabulary, dict[str, object]]:
    """The vocabulary as GGUF metadata would give it, so that the same rules apply."""
    if plain is not None:
        ids, added = plain.ids, plain.added
    else:
        ids = pipeline.get_vocab(with_added_tokens=True)
        tokens = pipeline.get_added_tokens_decoder().values()
        added = [(token.content, token.special) for token in tokens]
    before, after = _find_added_ids(pipeline)
    # As converters do: Gemma 3's image token has no row in models that read texts alone.
    needed = (settings.bos, settings.eos, before, after)
    left_out = {
        text
        for text, is_special in added
        if is_special and ids[text] >= settings.vocab_size and not {text, ids[text]} & {*needed}
    }
    ids = {text: token_id for text, token_id in ids.items() if text not in left_out}
    if not ids or max(ids.values()) >= settings.vocab_size:
        raise FormatError(
            f"tokenizer.json has token ids up to {max(ids.values(), default=-1)}, the model a "
            f"vocabulary of {settings.vocab_size}; the files belong to different models"
        )
    known = [""] * settings.vocab_size
    for text, token_id in ids.items():
        known[token_id] = text
    types = np.full(settings.vocab_size, TokenType.UNUSED, np.int32)
    types[np.fromiter(ids.values(), np.int64, len(ids))] = TokenType.NORMAL
    unused = np.flatnonzero(types == TokenType.UNUSED).tolist()
    for token_id in unused:
        known[token_id] = f"[UNUSED_{token_id}]"
    if not is_byte_level:
        starts = (text for text in ids if text.startswith("<0x"))
        types[[ids[text] for text in starts if _BYTE_TOKEN.fullmatch(text)]] = TokenType.BYTE
    for text, is_special in added:
        if text not in left_out:
            types[ids[text]] = TokenType.CONTROL if is_special else TokenType.USER_DEFINED
    bos = _find_id(settings.bos, ids) if before is None else before
    eos = _find_id(settings.eos, ids) if after is None else after
    metadata: dict[str, object] = {
        "tokenizer.ggml.tokens": known,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": before is not None,
        "tokenizer.ggml.add_eos_token": after is not None,
    }
    for name, named_id in (("bos", bos), ("eos", eos)):
        if named_id is not None:
            metadata[f"tokenizer.ggml.{name}_token_id"] = named_id
    vocabulary = read_vocabulary(metadata)
    endings = {_find_id(settings.eos, ids), *settings.more_eos}
    ending = {i for i in endings if i is not None and 0 <= i < settings.vocab_size}
    return replace(vocabulary, eog_ids=vocabulary.eog_ids | ending), metadata


def _find_id(value: int | str | None, ids: Mapping[str, int]) -> int | None:
    return ids.get(value) if isinstance(value, str) else value


def _find_added_ids(pipeline: Pipeline) -> tuple[int | None, int | None]:
    """The ids that the post-processor puts before and after a text."""
    plain = pipeline.encode("a", add_special_tokens=False).ids
    full = pipeline.encode("a", add_special_tokens=True).ids
    for n_before in range(len(full) - len(plain) + 1):
        end = n_before + len(plain)
        if full[n_before:end] == plain and n_before <= 1 and len(full) - end <= 1:
            before, after = full[:n_before], full[end:]
            return (before[0] if before else None), (after[0] if after else None)
    raise FormatError(
        f"tokenizer.json adds {len(full) - len(plain)} tokens to every text; one before and one "
        "after it are supported"
    )
