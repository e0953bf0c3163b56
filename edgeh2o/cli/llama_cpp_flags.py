"""Flags that users of llama.cpp type and edgeh2o has under another name, or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Container
from typing import NamedTuple

from ..errors import UsageError

_BY_PATH = (
    "no model is fetched from there; fetch the file, as by 'edgeh2o pull org/name:FILE', and give "
    "its path"
)

_NO_DRAFT = (
    "this command has no draft model, which serves one answer at a time: 'edgeh2o run' and "
    "'edgeh2o chat' have"
)


class _Flag(NamedTuple):
    """``note`` says why there is no such flag; ``becomes`` is our flag that means the same.

    ``takes`` "" or "value", or "switch": one of ``_SWITCHES`` may follow. ``idle`` are the values
    that change nothing; None are all.
    """

    note: str
    takes: str = ""
    becomes: str = ""
    idle: tuple[str, ...] | None = ()


_SWITCHES = ("on", "off", "auto", "0", "1")
_FLAGS = {
    name: flag
    for names, flag in (
        (
            "-ngl --gpu-layers --n-gpu-layers",
            _Flag("a GPU takes all layers (--device cuda)", "value", idle=("0",)),
        ),
        ("-hf -hfr --hf-repo -hff --hf-file -mu --model-url", _Flag(_BY_PATH, "value")),
        (
            "-tb --threads-batch",
            _Flag("one number of threads serves prompt and answer; use -t", "value"),
        ),
        ("-fa --flash-attn", _Flag("attention is always fused", "switch", idle=None)),
        ("-co --color", _Flag("answers have no colours", "switch", idle=None)),
        ("--mlock", _Flag("weights are packed into memory, and not locked", idle=None)),
        ("--mmap --no-mmap", _Flag("weights are packed into memory, not mapped", idle=None)),
        ("--warmup --no-warmup", _Flag("nothing is run to warm up", idle=None)),
        ("--no-display-prompt", _Flag("prompts are never printed", idle=None)),
        ("-no-cnv --no-conversation", _Flag("'edgeh2o run' answers a prompt", "", "--no-chat")),
        ("--chat-template-file", _Flag("", "value", "--chat-template")),
        (
            "--yarn-ext-factor --yarn-attn-factor",
            _Flag("both follow from --rope-scale", "value", idle=("-1", "-1.0", "1", "1.0")),
        ),
        ("--context-shift", _Flag("", "", "--context-full=shift")),
        ("--no-context-shift", _Flag("", "", "--context-full=stop")),
        ("--draft --model-draft -md", _Flag(_NO_DRAFT, "value")),
        ("--draft-max --draft-n", _Flag(_NO_DRAFT, "value", "--draft-tokens")),
        ("--draft-tokens", _Flag(_NO_DRAFT, "value")),
        (
            "--draft-min --draft-n-min --draft-p-min",
            _Flag("how far a draft goes is learnt from what was right", "value", idle=None),
        ),
        (
            "-c --ctx-size --ctx",
            _Flag(
                "the context is as long as what is read, which --lengths of needle says, and -p, "
                "-n and -d of bench",
                "value",
                idle=(),
            ),
        ),
        ("--prompt-cache", _Flag("", "value", "--session")),
        ("--prompt-cache-ro", _Flag("", "", "--session-read-only")),
    )
    for name in names.split()
}


def translate_flag(word: str, after: list[str], known: Container[str]) -> list[str] | None:
    """What stands for a flag of llama.cpp among ours, or None if ``word`` is no such flag.

    Its value is taken from ``after``, the words that follow; ``known`` are our flags. A flag
    without effect gives nothing but a warning. Raises UsageError for one that asks for what is not
    here, with the cure.
    """
    name, equals, value = word.partition("=")
    flag = _FLAGS.get(name)
    if flag is None or name in known or "--model" not in known:
        return None
    if not equals and after and (flag.takes == "value" or (flag.takes and after[0] in _SWITCHES)):
        value = after.pop(0)
    typed = f"{name} {value}".rstrip()
    if flag.becomes.partition("=")[0] in known:
        return [f"{flag.becomes}={value}" if flag.takes and value else flag.becomes]
    if flag.note and (flag.idle is None or value in flag.idle):
        warnings.warn(f"{typed} has no effect: {flag.note}", stacklevel=2)
        return []
    raise UsageError(f"{typed}: {flag.note or 'this command has nothing like it; leave it out'}")
