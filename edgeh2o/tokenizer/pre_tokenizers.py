r"""How text is cut into words before byte-pair merging, by ``tokenizer.ggml.pre`` name.

A rule is a list of regexes in Oniguruma syntax. The first cuts the text into its matches and the
stretches between them; each next one cuts every piece so obtained. The regexes are those of the
published tokenizers. Compared with llama.cpp, which has to make do with narrower engines, they

- know the letters and digits that Unicode 16 added;
- in the ``gpt-4o`` and ``tekken`` families tell upper from lower case and combining marks outside
  ASCII too, as these models were trained;
- in ``deepseek-coder`` take the ideographic space and its like for what its ranges say.

``CUT_POINT`` relies on what every rule below has in common: letters and digits are always part of
a match, no match reaches from them across a blank, and none looks back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgeh2o.errors import FormatError, UsageError

if TYPE_CHECKING:
    from tokenizers import pre_tokenizers

# Pieces of this many characters keep the memory of the regex passes small and the caches warm.
PIECE_LENGTH = 16384
# Oniguruma gives up after ten million backtracks, which a longer run could need in one match.
MAX_RUN_LENGTH = 1 << 21

# Where text may be cut without a change of ids: before a blank, a newline or an ideographic comma
# or full stop, after a letter or digit. (After a symbol it may not: some rules match neither the
# symbol nor the blank, and what no rule matches stays together.) The second look behind keeps to
# scripts that no new version of Unicode is likely to touch, so that Python and Oniguruma agree.
CUT_POINT = re.compile(
    r"(?<=[^\W_])(?<=[\u0030-\u1c7f\u1e00-\u1fff\u3041-\u9fa5\uac00-\ud7a3])"
    r"(?=[ \t\n\u3001\u3002\uff0c])"
)

_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_BLANKS = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _BLANKS
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_KANA_AND_HAN = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _BLANKS
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_LINES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_LINES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    """Words that end where upper case begins, with an optional ``suffix``."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{suffix}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
    )


_GPT4O = _cased(f"(?:{_CONTRACTION})?", r"\p{N}{1,3}")
_DEEPSEEK3_WORDS = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One rule: regexes, whether a word of the vocabulary skips merging, default for BOS."""

    name: str
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.Sequence:
        """Return the ``tokenizers`` object that cuts text by this rule and byte-encodes it."""
        from tokenizers import Regex, pre_tokenizers

        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])


def _rules(
    names: str, *patterns: str, ignore_merges: bool = False, add_bos: bool = False
) -> list[PreTokenizer]:
    return [PreTokenizer(name, patterns, ignore_merges, add_bos) for name in names.split()]


_RULES = (
    _rules("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    _rules(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        ignore_merges=True,
        add_bos=True,
    ),
    _rules("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    _rules("glm4 glm5", _LLAMA3, ignore_merges=True),
    _rules(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 "
        "bailingmoe bailingmoe2 llada-moe",
        _QWEN2,
    ),
    _rules("qwen35", _QWEN35),
    _rules(
        "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat mellum modern-bert a.x-4.0 "
        "granite-docling jina-es jina-de jina-v2-es jina-v2-de roberta-bpe jina-v1-en "
        "jina-v2-code",
        _GPT2,
    ),
    _rules(
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", r"\p{N}", _GPT2
    ),
    _rules("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    _rules("tekken", _cased("", r"\p{N}"), ignore_merges=True, add_bos=True),
    _rules(
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        r"\p{N}{1,3}",
        _KANA_AND_HAN,
        rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}",
    ),
    _rules(
        "spark2_5",
        r"\p{N}{1,3}",
        _KANA_AND_HAN,
        rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_BLANKS}",
        r"\p{N}",
    ),
    _rules(
        "deepseek-coder",
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
        r"\p{N}",
    ),
    _rules("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    _rules("bloom poro-chat gpt3-finnish", _BLOOM),
    _rules("viking", _BLOOM, r"\p{N}"),
    _rules(
        "minicpm5",
        r"\p{N}{1,3}",
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_LINES}",
        ignore_merges=True,
    ),
    _rules("seed-coder", rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"),
    _rules("ufakzeka", rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_LINES}"),
    _rules("laguna", r"[^\n]+|[\n]+", _QWEN2),
)

# Named by model files, but their rules need more than a list of regexes, look across words, take
# quadratic time, or work on text that is not byte-encoded.
_NOT_SUPPORTED = frozenset(
    (
        "afmoe",
        "chameleon",
        "cohere2moe",
        "deepseek-llm",
        "exaone-moe",
        "gemma4",
        "granite-embed-multi-311m",
        "granite-embed-multi-97m",
        "jais-2",
        "kimi-k2",
        "sarvam-moe",
        "superbpe",
        "tiny_aya",
        "whitespace",
        "youtu",
    )
)

_BY_NAME = {rule.name: rule for rules in _RULES for rule in rules}


def pre_tokenizer_names() -> list[str]:
    """Return every supported value of ``tokenizer.ggml.pre``, sorted."""
    return sorted(_BY_NAME)


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Return the rule of that name; raises ``FormatError`` rather than guess."""
    rule = _BY_NAME.get(name)
    if rule is not None:
        return rule
    if name in _NOT_SUPPORTED:
        raise FormatError(f"the pre-tokenizer '{name}' (tokenizer.ggml.pre) is not supported yet")
    raise FormatError(
        f"unknown pre-tokenizer '{name}' (tokenizer.ggml.pre); the token ids would be a guess. "
        "Use a file of a supported model family or a newer edgeh2o"
    )


def cut_text(text: str, *, piece_length: int = PIECE_LENGTH) -> Iterator[str]:
    """Yield pieces of about ``piece_length`` characters that tokenize like the whole text.

    Raises ``UsageError`` for a run of more than ``MAX_RUN_LENGTH`` characters without a place to
    cut.
    """
    start = 0
    while len(text) - start > piece_length:
        cut = CUT_POINT.search(text, start + piece_length, start + MAX_RUN_LENGTH)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    if len(text) - start > MAX_RUN_LENGTH:
        raise UsageError(
            f"the text has no word that a blank or line end follows in {MAX_RUN_LENGTH} characters "
            f"from character {start}; put blanks or line ends in"
        )
    if start < len(text):
        yield text[start:]
