"""Tokenizers built from GGUF metadata.

``build_tokenizer`` looks at ``tokenizer.ggml.model``; each model is one file of this package.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ..errors import FormatError
from .base import Tokenizer
from .byte_bpe import ByteBpeTokenizer
from .plamo2 import PlamoTokenizer
from .pre_tokenizers import pre_tokenizer_names as byte_pre_tokenizer_names
from .raw_bpe import RAW_RULES, RawBpeTokenizer
from .rwkv import RwkvTokenizer
from .sentencepiece import SentencePieceTokenizer
from .stream_decoder import StreamDecoder
from .unigram import UnigramTokenizer
from .wordpiece import WordPieceTokenizer

__all__ = [
    "StreamDecoder",
    "Tokenizer",
    "build_tokenizer",
    "pre_tokenizer_names",
    "tokenizer_models",
]

_logger = logging.getLogger(__name__)


def _build_bpe(metadata: Mapping[str, object]) -> Tokenizer:
    name = _read_pre_name(metadata)
    if name in RAW_RULES:
        return RawBpeTokenizer(metadata, model_name="gpt2", pre_name=name)
    return ByteBpeTokenizer(metadata, pre_name=name)


def _build_gemma4(metadata: Mapping[str, object]) -> Tokenizer:
    return RawBpeTokenizer(metadata, model_name="gemma4", pre_name="gemma4")


def _read_pre_name(metadata: Mapping[str, object]) -> str:
    name = metadata.get("tokenizer.ggml.pre", "")
    if not isinstance(name, str):
        raise FormatError(f"tokenizer.ggml.pre must be a string, not {type(name).__name__}")
    if not name:
        _logger.warning(
            "the file does not name its pre-tokenizer (tokenizer.ggml.pre); using 'default', "
            "which may give poorer answers. Convert the model again with a newer converter"
        )
        return "default"
    return name


_BUILDERS: dict[str, Callable[[Mapping[str, object]], Tokenizer]] = {
    "bert": WordPieceTokenizer,
    "gemma4": _build_gemma4,
    "gpt2": _build_bpe,
    "llama": SentencePieceTokenizer,
    "plamo2": PlamoTokenizer,
    "rwkv": RwkvTokenizer,
    "t5": UnigramTokenizer,
}

# Models that GGUF files are known to name; the text says what each of them is.
_NOT_SUPPORTED = {
    "hybriddna": "BPE with DNA k-mers",
    "whitespace": "BPE on words between whitespace",
    "none": "no vocabulary",
    "no_vocab": "no vocabulary",
}


def pre_tokenizer_names() -> list[str]:
    """Values of ``tokenizer.ggml.pre`` that the model "gpt2" takes, sorted."""
    return sorted((*byte_pre_tokenizer_names(), *RAW_RULES))


def tokenizer_models() -> tuple[str, ...]:
    """Values of ``tokenizer.ggml.model`` that ``build_tokenizer`` takes, sorted."""
    return tuple(sorted(_BUILDERS))


def build_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    ``metadata`` maps GGUF keys to values: Python scalars, sequences of ``str`` for string arrays
    and NumPy arrays for numeric arrays. Raises ``FormatError`` if the vocabulary is malformed,
    or if its model or pre-tokenizer is unknown or not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise FormatError(
            "the file has no tokenizer: the key tokenizer.ggml.model is missing; "
            "convert the model again with its vocabulary"
        )
    if not isinstance(model, str):
        raise FormatError(f"tokenizer.ggml.model must be a string, not {type(model).__name__}")
    builder = _BUILDERS.get(model)
    if builder is not None:
        return builder(metadata)
    supported = ", ".join(sorted(_BUILDERS))
    if model in _NOT_SUPPORTED:
        raise FormatError(
            f"the tokenizer model '{model}' ({_NOT_SUPPORTED[model]}) is not supported yet; "
            f"supported: {supported}"
        )
    raise FormatError(f"unknown tokenizer model '{model}'; supported: {supported}")
