r"""How text is cut into words before byte-pair merging, by ``tokenizer.ggml.pre`` name.

A rule is a list of regexes in Oniguruma syntax. The first cuts the text into its matches and the
stretches between them; each next one cuts every piece so obtained. The regexes are those of the
published tokenizers. Compared with llama.cpp, which has to make do with narrower engines, they

- know the letters and digits that Unicode 16 added;
- in the ``gpt-4o``, ``tekken``, ``tiny_aya``, ``youtu`` and ``kimi-k2`` families tell upper from
  lower case and combining marks outside ASCII too, as these models were trained;
- in ``deepseek-coder`` and ``deepseek-llm`` take the ideographic space and its like for what
  their ranges say;
- where digits go in groups from the right, keep the text before a number apart from its first
  digits, and group the digits of every script.

llama.cpp's other flags of a rule have no counterpart: ``add_sep`` is of no use to byte-level BPE,
and ``clean_spaces`` would make the whole of a decoded text differ from its streamed pieces.

``CUT_POINT`` relies on what most rules below have in common: letters and digits are always part of
a match, no match reaches from them across a blank, and none looks back. Other rules name their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import FormatError, UsageError

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
CUT_POINT = (
    r"(?<=[^\W_])(?<=[\u0030-\u1c7f\u1e00-\u1fff\u3041-\u9fa5\uac00-\ud7a3])"
    r"(?=[ \t\n\u3001\u3002\uff0c])"
)

# Rules that leave some letters unmatched, or whose words go on across blanks, take fewer cuts.
_CUT_AFTER_ASCII = r"(?<=[A-Za-z])(?=[ \t\n])|(?=\n)"
_CUT_AFTER_DIGIT = r"(?<=[0-9])(?=[ \t\n])"
_CUT_BEFORE_LINE_END = CUT_POINT.replace(r"[ \t\n", r"[\t\n")

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
# Groups of three counted from the right. The second pattern sees one run of digits at a time; its
# first branch takes what is left over at the front.
_GROUPED_DIGITS = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})++\z)|\p{N}{3}")
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
# Letters of the Latin, Greek, Cyrillic and a few more cased scripts.
_CASED_LETTERS = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}"
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}"
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}"
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}"
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}"
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}"
    r"\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}"
    r"\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}"
    r"\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}"
    r"\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}"
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}"
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}"
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}"
    r"\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}"
)
_HAN_OR_HANGUL = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_ASIAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}"
    r"\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}"
    r"\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_NOT_HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_NOT_HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BLANKS_BY_POWERS = "|".join(
    [rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)] + [r"\s{1,2}(?!\S)", r"\s"]
)
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One rule: regexes, whether a word of the vocabulary skips merging, default for BOS."""

    name: str
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    cut_point: str = CUT_POINT

    def build(self) -> pre_tokenizers.Sequence:
        """The ``tokenizers`` object that cuts text by this rule and byte-encodes it."""
        from tokenizers import Regex, pre_tokenizers

        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])


def _rules(
    names: str,
    *patterns: str,
    ignore_merges: bool = False,
    add_bos: bool = False,
    cut_point: str = CUT_POINT,
) -> list[PreTokenizer]:
    return [
        PreTokenizer(name, patterns, ignore_merges, add_bos, cut_point) for name in names.split()
    ]


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
        _DEEPSEEK3,
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
        _HAN_OR_HANGUL,
        r"\p{N}",
    ),
    _rules(
        "deepseek-llm",
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        # The published \s+$, in linear time.
        r"(?<!\s)\s++\z",
        _HAN_OR_HANGUL,
        r"\p{N}+",
        cut_point=_CUT_AFTER_ASCII,
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
    _rules(
        "jais-2",
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|{_BLANKS_BY_POWERS}",
    ),
    _rules(
        "youtu",
        r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
        r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}"
        r"\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"
        rf"|[\x{{3105}}-\x{{312F}}]+|{_KANA_AND_HAN}",
        _cased(f"(?:{_CONTRACTION})?", r"\p{N}"),
        ignore_merges=True,
    ),
    _rules(
        "chameleon",
        r"<sentinel:[0-9]+>",
        r"IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
        add_bos=True,
    ),
    _rules("granite-embed-multi-97m", _GPT4O, ignore_merges=True),
    _rules("tiny_aya cohere2moe", *_GROUPED_DIGITS, _GPT4O),
    _rules("afmoe", *_GROUPED_DIGITS, _ASIAN, _DEEPSEEK3),
    _rules("superbpe", *_GROUPED_DIGITS, cut_point=_CUT_AFTER_DIGIT),
    _rules(
        "exaone-moe",
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*+(?: \p{{L}}\p{{M}}*+)*+)++"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_BLANKS}",
        cut_point=_CUT_BEFORE_LINE_END,
    ),
    _rules(
        "kimi-k2",
        rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+(?:{_CONTRACTION})?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*(?:{_CONTRACTION})?"
        rf"|\p{{N}}{{1,3}}|{_SYMBOLS}|{_LINES}",
    ),
)

_BY_NAME = {rule.name: rule for rules in _RULES for rule in rules}


def pre_tokenizer_names() -> list[str]:
    """Every value of ``tokenizer.ggml.pre`` that has a rule here, sorted."""
    return sorted(_BY_NAME)


def all_pre_tokenizers() -> list[PreTokenizer]:
    """Every rule, those that are alike side by side."""
    return list(_BY_NAME.values())


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The rule of that name; raises ``FormatError`` rather than guess."""
    rule = _BY_NAME.get(name)
    if rule is not None:
        return rule
    if name == "whitespace":
        raise FormatError(
            "the pre-tokenizer 'whitespace' (tokenizer.ggml.pre), of jina-embeddings-v2-base-zh, "
            "is not supported; use another model for vectors of texts"
        )
    raise FormatError(
        f"unknown pre-tokenizer {name[:40]!r} (tokenizer.ggml.pre); the token ids would be a "
        "guess. Use a file of a supported model family or a newer edgeh2o"
    )


def cut_text(
    text: str, *, cut_point: str = CUT_POINT, piece_length: int = PIECE_LENGTH
) -> Iterator[str]:
    """Yields pieces of about ``piece_length`` characters that tokenise like the whole text.

    ``cut_point`` is that of the rule which the pieces are for.

    Raises ``UsageError`` for a run of more than ``MAX_RUN_LENGTH`` characters without a place to
    cut.
    """
    start = 0
    while len(text) - start > piece_length:
        # Compiled here, where ``re`` remembers it: 3 ms that short prompts need not wait.
        pattern = re.compile(cut_point)
        cut = pattern.search(text, start + piece_length, start + MAX_RUN_LENGTH)
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
