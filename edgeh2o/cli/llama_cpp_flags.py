"""Flags that users of llama.cpp type and edgeh2o has under another name, or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container
from typing import NamedTuple

from ..errors import UsageError
from ..sampler_names import spell_samplers

_BY_PATH = (
    "models are fetched from the Hugging Face Hub alone: -hf org/name:FILE, or 'edgeh2o pull "
    "org/name:FILE'; fetch others yourself and give their path"
)

_NO_DRAFT = (
    "this command has no draft model, which drafts for one answer at a time: 'edgeh2o run', "
    "'chat' and 'serve' have"
)
_ON_DEVICE = "a model, its cache and its experts are on one device (--device)"
_PLACED = "threads run where the system puts them"
_ZERO, _ONE = ("0", "0.0", "0.00"), ("1", "1.0", "1.00")


class _Flag(NamedTuple):
    """``note`` says why there is no such flag; ``becomes`` is our flag that means the same.

    ``takes`` "" or "value", or "switch": one of ``_SWITCHES`` may follow. ``idle`` are the values
    that change nothing; None are all. ``spell`` turns a value into that of our flag.
    """

    note: str
    takes: str = ""
    becomes: str = ""
    idle: tuple[str, ...] | None = ()
    spell: Callable[[str], str] = str


_SWITCHES = ("on", "off", "auto", "0", "1")
_FLAGS = {
    name: flag
    for names, flag in (
        (
            "-ngl --gpu-layers --n-gpu-layers",
            _Flag("a GPU takes all layers (--device cuda)", "value", idle=("0",)),
        ),
        ("-hf --hf-repo", _Flag("this command takes a path", "value")),
        ("-hfr", _Flag("this command takes a path", "value", "--hf-repo")),
        ("-hff --hf-file -mu --model-url", _Flag(_BY_PATH, "value")),
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
            "--spec-type",
            _Flag(
                "write --draft mtp for draft-mtp, --draft FILE for draft-simple, and --lookup for "
                "the ngram kinds",
                "value",
                idle=("none",),
            ),
        ),
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
        ("--jinja --no-jinja", _Flag("chat templates are always read by jinja2", idle=None)),
        ("-cnv --conversation", _Flag("'edgeh2o chat' is a conversation", "", "--chat", idle=None)),
        ("-st --single-turn", _Flag("'edgeh2o run' gives one answer", idle=None)),
        ("--grammar-file", _Flag("", "value", "--grammar")),
        ("--json-schema-file -jf", _Flag("", "value", "--json-schema")),
        (
            "-cb --cont-batching",
            _Flag("requests always share passes over the weights", idle=None),
        ),
        ("-kvu --kv-unified", _Flag("every conversation has memory of its own", idle=None)),
        (
            "--metrics --props --slots --no-slots",
            _Flag("'edgeh2o serve' always has /metrics and /props, and no /slots", idle=None),
        ),
        ("--no-webui --no-ui", _Flag("the page at / is always there", idle=None)),
        ("--threads-http", _Flag("one thread answers connections", "value", idle=None)),
        (
            "--cache-reuse",
            _Flag("what prompts have in common is always kept", "value", idle=None),
        ),
        (
            "--reasoning-format",
            _Flag("reasoning is reasoning_content", "value", idle=("auto", "deepseek")),
        ),
        (
            "--reasoning-budget",
            _Flag(
                "reasoning is as long as it is; many templates leave it out by "
                "--chat-template-kwargs '{\"enable_thinking\": false}'",
                "value",
                idle=("-1",),
            ),
        ),
        (
            "--keep",
            _Flag(
                "--context-full shift always keeps the beginning of a prompt", "value", idle=None
            ),
        ),
        ("--simple-io --log-disable", _Flag("output is plain text", idle=None)),
        ("--perf --no-perf", _Flag("--quiet leaves the statistics out", idle=None)),
        (
            "--numa --prio --poll -C --cpu-mask -Cr --cpu-range --cpu-strict",
            _Flag(_PLACED, "value", idle=None),
        ),
        ("-dev", _Flag("write --device cpu or --device cuda", "value", idle=("none",))),
        (
            "-sm --split-mode -mg --main-gpu -ts --tensor-split",
            _Flag(
                "a model is on one device; --device cuda:1 names it", "value", idle=("none", "0")
            ),
        ),
        (
            "-nkvo --no-kv-offload --no-op-offload -nr --no-repack -cmoe --cpu-moe",
            _Flag(_ON_DEVICE, idle=None),
        ),
        ("-ncmoe --n-cpu-moe -ot --override-tensor", _Flag(_ON_DEVICE, "value", idle=None)),
        ("--list-devices", _Flag("'edgeh2o doctor' lists them")),
        ("--swa-full", _Flag("sliding windows are exact whatever is kept", idle=None)),
        ("-dt --defrag-thold", _Flag("the cache has no holes", "value", idle=None)),
        ("--offline", _Flag("nothing is fetched but what -hf and known names ask for", idle=None)),
        ("--override-kv", _Flag("metadata is taken as the file has it; leave it out", "value")),
        ("-i --interactive", _Flag("'edgeh2o chat' is a conversation", idle=None)),
        ("-sp --special", _Flag("control tokens are never printed", idle=None)),
        ("--verbose-prompt", _Flag("prompts are never printed", idle=None)),
        ("-lv --verbosity --log-verbosity", _Flag("-v says more", "value", idle=None)),
        ("--log-file", _Flag("messages go to stderr; redirect it (2> FILE)", "value")),
        ("-bf --binary-file", _Flag("prompts are UTF-8 text; use -f", "value")),
        (
            "--sampling-seq --sampler-seq",
            _Flag("", "value", "--samplers", spell=spell_samplers),
        ),
        (
            "-td --threads-draft",
            _Flag("one number of threads serves both models; use -t", "value"),
        ),
        (
            "-ngld --gpu-layers-draft --n-gpu-layers-draft",
            _Flag("a draft model is on the CPU", "value", idle=("0",)),
        ),
        ("-cd --ctx-size-draft", _Flag("its context is that of the model", "value", idle=None)),
        ("-np", _Flag("", "value", "--parallel")),
        ("-a", _Flag("", "value", "--alias")),
        ("-to", _Flag("", "value", "--timeout")),
        ("-cram --cache-ram", _Flag("write --prefix-cache-ram SIZE, such as 512M", "value")),
        ("--slot-save-path", _Flag("write --prefix-cache-disk DIR,SIZE", "value")),
        (
            "-sps --slot-prompt-similarity",
            _Flag("the prompt that has most in common is taken", "value", idle=None),
        ),
        ("--embedding --embeddings --rerank --reranking", _Flag("models write texts alone")),
        (
            "--ssl-key-file --ssl-cert-file",
            _Flag("there is no TLS; put a proxy such as Caddy before the server", "value"),
        ),
        ("--models-dir --models-preset", _Flag("a server has one model; start several", "value")),
        (
            "--presence-penalty --frequency-penalty",
            _Flag("each request has its own; --repeat-penalty is for all", "value", idle=_ZERO),
        ),
        ("-l --logit-bias", _Flag("each request has its own (logit_bias)", "value")),
        ("--lora-scaled", _Flag("", "value", "--lora")),
        ("--lora", _Flag("this command takes no adapters; leave it out", "value")),
        (
            "--lora-init-without-apply",
            _Flag("it is for serve; --lora FILE:0 loads an adapter that counts nothing"),
        ),
        (
            "--control-vector --control-vector-scaled",
            _Flag("control vectors are not applied; leave it out", "value"),
        ),
        ("-mm --mmproj", _Flag("models read text alone; leave it out", "value")),
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
        return [f"{flag.becomes}={flag.spell(value)}" if flag.takes and value else flag.becomes]
    if flag.note and (flag.idle is None or value in flag.idle):
        warnings.warn(f"{typed} has no effect: {flag.note}", stacklevel=2)
        return []
    raise UsageError(f"{typed}: {flag.note or 'this command has nothing like it; leave it out'}")
