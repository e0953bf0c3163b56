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
