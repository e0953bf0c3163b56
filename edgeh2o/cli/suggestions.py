"""What was meant, perhaps: commands and flags by the names that other programs have for them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

_VERBS = {
    verb: names.split()
    for verb, names in {
        "run": "generate answer ask cli complete eval exec infer llama-cli llama-completion prompt",
        "chat": "converse interactive repl talk",
        "serve": "api http llama-server server",
        "batch": "batches jobs",
        "pull": "download fetch get install",
        "inspect": "describe dump info metadata model show",
        "bench": "benchmark llama-bench speed",
        "perplexity": "llama-perplexity ppl",
        "quantize": "convert llama-quantize quant quantise requantize",
        "export-onnx": "builder export onnx",
        "doctor": "check devices env system",
        "calibrate": "calibration profile tune",
        "completion": "completions",
    }.items()
}
_FLAGS = {
    flag: names.split()
    for flag, names in {
        "--ctx-size": "--context --context-length --context-size --ctx-len --max-kv-size "
        "--max-model-len --max-seq-len --n-ctx --num-ctx",
        "--max-tokens": "--max-length --max-new-tokens --max-output-tokens --n-tokens "
        "--num-predict --tokens",
        "--prompt": "--query --question --text",
        "--file": "--in-file --input --prompt-path",
        "--system": "--sys --system-message",
        "--chat": "--instruct --interactive --use-chat-template",
        "--stop": "--eos --extra-eos-token --stop-words --stop-sequence",
        "--model": "--gguf --model-id --model-name --model-path",
        "--draft": "--draft-model --speculative-model --assistant-model",
        "--draft-tokens": "--num-draft-tokens",
        "--session": "--cache-file --cache-prompt --prompt-cache-file",
        "--threads": "--cores --n-threads --num-threads --nproc",
        "--device": "--backend --execution-provider --gpu --provider",
        "--cache-type": "--kv-bits --kv-cache-dtype --kv-cache-type",
        "--repeat-penalty": "--rep-pen --repetition-penalty",
        "--repeat-last-n": "--repetition-context-size",
        "--isa": "--arch --kernel --simd",
        "--quiet": "--no-stats --silent",
    }.items()
}


def suggest_verb(words: Sequence[str], verbs: Collection[str]) -> str:
    """Why a command line that begins with no verb is none, and what would be one."""
    from ..formats.known_models import KNOWN_MODELS

    first = words[0]
    if first.startswith("-"):
        flags = {word.partition("=")[0] for word in words}
        is_prompt = flags & {"-p", "--prompt", "-f", "--file", "-no-cnv"}
        verb = "serve" if flags & {"--port", "--host"} else "run" if is_prompt else "chat"
        return f"a command comes before {first:.80}, as in 'edgeh2o {verb} {first:.80} ...'"
    if first in KNOWN_MODELS or first.endswith(".gguf") or os.path.exists(first):
        verb = "run" if len(words) > 1 else "chat"
        return f"{first!r:.80} is no command; a model comes after one, as in 'edgeh2o {verb} MODEL'"
    similar = _similar(first.lower(), _VERBS, verbs)
    hint = f" (did you mean {similar}?)" if similar else ""
    return f"there is no command {first!r:.80}{hint}"


def suggest_flag(flag: str, known: Collection[str]) -> str:
    """The one of the flags ``known`` that ``flag`` may stand for, or ""."""
    if not flag.startswith("--"):
        return ""  # a letter or two are like any other
    written = flag.replace("_", "-").lower()
    return _similar(written, _FLAGS, [each for each in known if each.startswith("--")])


def _similar(word: str, names: dict[str, list[str]], known: Collection[str]) -> str:
    """``word`` is looked up among ``names``, then compared with what is known."""
    from difflib import get_close_matches

    for name, others in names.items():
        if word in (name, *others):
            return name if name in known else ""
    bare = {each.strip("-"): each for each in known}  # dashes are no likeness
    word = word.strip("-")
    similar = get_close_matches(word, bare, n=1) or [each for each in bare if each.startswith(word)]
    return bare[similar[0]] if similar else ""
