"""The vocabulary of tiny models: a byte-level BPE in the style of SmolLM2, and a chat template."""

from __future__ import annotations

from gguf import GGUFWriter, TokenType

from tests.tokenizer.vocabularies import byte_characters

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# To fill in the middle.
MARKERS = ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep")
# Left and right part of each merge, in order of priority; "_" stands for the space byte.
MERGES = (
    "_ t,_ a,i n,h e,r e,o n,e r,_t he,a t,_ s,_ o,e n,_ c,i t,i s,_ w,o r,a l,_ p,in g,_ f,a n,"
    "_a n,_an d,_o f,e s,_ b,e d,_t o,_ in,_ m,_ d,l l,o u,_ is,_ h,a r,_t h,_th at,_f or,"
    "a s,_w as,w as,_ on,_ he,t h,th e,e l,i c,_ l"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (control, bytes, merges) and merges of the smallest vocabulary."""
    characters = byte_characters()
    merges = MERGES.replace("_", characters[ord(" ")]).split(",")
    tokens = [*CONTROL_TOKENS, *characters, *(merge.replace(" ", "") for merge in merges)]
    return list(dict.fromkeys(tokens)), merges


def add_tokenizer(writer: GGUFWriter, vocab_size: int, *, has_markers: bool = False) -> None:
    tokens, merges = vocabulary()
    reserved = [f"<|reserved_{idx}|>" for idx in range(vocab_size - len(tokens))]
    n_control = len(CONTROL_TOKENS)
    types = [TokenType.CONTROL] * n_control + [TokenType.NORMAL] * (len(tokens) - n_control)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens + reserved)
    writer.add_token_types(types + [TokenType.CONTROL] * len(reserved))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(CONTROL_TOKENS.index("<|im_start|>"))
    writer.add_eos_token_id(CONTROL_TOKENS.index("<|im_end|>"))
    writer.add_unk_token_id(CONTROL_TOKENS.index("<|endoftext|>"))
    writer.add_pad_token_id(CONTROL_TOKENS.index("<|im_end|>"))
    if has_markers:  # the last ids
        for i, name in enumerate(MARKERS, vocab_size - len(MARKERS)):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", i)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


WORDPIECE_CONTROL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    "the quick brown fox jump over lazy dog and back again then it all begin an is of to in that "
    "thing there more for with was on he first second text"
)
ENDINGS = "s ing ed er ew ly ment un ness tion able est"


def wordpiece_vocabulary() -> list[str]:
    """Control tokens, letters and digits at the start of words and within, words, endings."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    alone = [f"\u2581{mark}" for mark in "!\"#$%&'()*+,-./:;<=>?@[]_`{|}~"]
    starts = [f"\u2581{letter}" for letter in letters] + [f"\u2581{word}" for word in WORDS.split()]
    tokens = [*WORDPIECE_CONTROL, *alone, *starts, *letters, *ENDINGS.split(), "\u2581\u4e2d"]
    return list(dict.fromkeys(tokens))


def add_wordpiece(writer: GGUFWriter, vocab_size: int) -> None:
    """As llama.cpp's converter writes it: with a blank before pieces that begin a word."""
    tokens = wordpiece_vocabulary()
    reserved = [f"[unused{idx}]" for idx in range(vocab_size - len(tokens))]
    n_control = len(WORDPIECE_CONTROL)
    types = [TokenType.CONTROL] * n_control + [TokenType.NORMAL] * (len(tokens) - n_control)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens + reserved)
    writer.add_token_types(types + [TokenType.CONTROL] * len(reserved))
    for name, text in (
        ("bos", "[CLS]"),
        ("eos", "[SEP]"),
        ("unknown", "[UNK]"),
        ("seperator", "[SEP]"),
        ("padding", "[PAD]"),
        ("mask", "[MASK]"),
    ):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", WORDPIECE_CONTROL.index(text))


UNIGRAM_CONTROL = ("<s>", "<pad>", "</s>", "<unk>")


def unigram_vocabulary() -> list[str]:
    """Control tokens, a blank, letters, digits and marks, words, endings."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'-\"()"
    words = [f"\u2581{word}" for word in WORDS.split()]
    tokens = [*UNIGRAM_CONTROL, "\u2581", *letters, *words, *ENDINGS.split(), "\u4e2d"]
    return list(dict.fromkeys(tokens))


def add_unigram(writer: GGUFWriter, vocab_size: int) -> None:
    """As llama.cpp's converter writes XLM-RoBERTa's; a mask is the last, as there."""
    tokens = unigram_vocabulary()
    reserved = [f"[PAD{idx}]" for idx in range(vocab_size - len(tokens) - 1)]
    n_control, n_own = len(UNIGRAM_CONTROL), len(tokens)
    types = [TokenType.CONTROL] * (n_control - 1) + [TokenType.UNKNOWN]
    types += [TokenType.NORMAL] * (n_own - n_control) + [TokenType.UNUSED] * len(reserved)
    scores = [0.0] * n_control + [-3.0 - idx % 13 / 4 for idx in range(n_own - n_control)]
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, *reserved, "<mask>"])
    writer.add_token_types([*types, TokenType.CONTROL])
    writer.add_token_scores([*scores, *[-10000.0] * len(reserved), 0.0])
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    for name, text in (
        ("bos", "<s>"),
        ("eos", "</s>"),
        ("unknown", "<unk>"),
        ("seperator", "</s>"),
        ("padding", "<pad>"),
    ):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", UNIGRAM_CONTROL.index(text))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_sep_token(True)
