"""Flags that users of llama.cpp type and edgeh2o has under another name, or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container
from typing import NamedTuple

from ..errors import UsageError
from ..sampler_names import spell_samplers
from ..sampling_config import MAX_LOOKUP

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


def _limit_draft(text: str) -> str:
    """No more tokens than are drafted here: llama.cpp has 16 by default."""
    return str(min(int(text), MAX_LOOKUP)) if text.isdecimal() else text


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
        ("-lm --load-mode", _Flag("weights are packed into memory", "value", idle=None)),
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
        ("--spec-draft-model", _Flag(_NO_DRAFT, "value", "--draft")),
        (
            "--spec-draft-hf -hfd -hfrd --hf-repo-draft",
            _Flag("fetch it by 'edgeh2o pull' and write --draft FILE", "value"),
        ),
        (
            "--draft-max --draft-n --spec-draft-n-max",
            _Flag(_NO_DRAFT, "value", "--draft-tokens", spell=_limit_draft),
        ),
        ("--draft-tokens", _Flag(_NO_DRAFT, "value")),
        (
            "--spec-type",
            _Flag(
                "a draft model drafts where --draft FILE names it; write --draft mtp for "
                "draft-mtp, and --lookup for the ngram kinds",
                "value",
                idle=("none", "draft-simple"),
            ),
        ),
        (
            "--draft-min --draft-n-min --draft-p-min --spec-draft-n-min --spec-draft-p-min "
            "--draft-p-split --spec-draft-p-split",
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
        (
            "-kvu --kv-unified -no-kvu --no-kv-unified",
            _Flag("every conversation has memory of its own", idle=None),
        ),
        ("-nocb --no-cont-batching", _Flag("requests share passes over the weights", idle=None)),
        (
            "--cache-idle-slots --no-cache-idle-slots",
            _Flag("conversations at rest are kept while memory has room", idle=None),
        ),
        (
            "-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step",
            _Flag("where prompts may go on from is marked by itself", "value", idle=None),
        ),
        (
            "--metrics --props --slots --no-slots",
            _Flag("'edgeh2o serve' always has /metrics, /props and /slots", idle=None),
        ),
        (
            "--ui --webui --no-webui --no-ui --no-ui-mcp-proxy --no-webui-mcp-proxy",
            _Flag("the page at / is always there, and calls this server alone", idle=None),
        ),
        ("--no-agent -no-ag", _Flag("tools are run by clients", idle=None)),
        ("--cache-prompt --no-cache-prompt", _Flag("what was read is always kept", idle=None)),
        ("--reasoning-preserve --no-reasoning-preserve", _Flag("templates decide", idle=None)),
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
            "--reasoning-effort",
            _Flag('write --chat-template-kwargs \'{"reasoning_effort": "low"}\'', "value"),
        ),
        ("-rea", _Flag("", "value", "--reasoning")),
        ("--skip-chat-parsing", _Flag("/completion answers raw text as it is")),
        ("--no-skip-chat-parsing", _Flag("answers are parsed", idle=None)),
        (
            "--prefill-assistant",
            _Flag("a last message of the assistant is gone on with", idle=None),
        ),
        (
            "--no-prefill-assistant",
            _Flag('each request says so ("continue_final_message": false)'),
        ),
        (
            "--reasoning-budget",
            _Flag(
                "reasoning is as long as it is; --reasoning off leaves it out",
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
        (
            "--simple-io --log-disable --log-jsonl --no-log-jsonl --log-prefix --no-log-prefix "
            "--log-timestamps --no-log-timestamps",
            _Flag("output is plain text", idle=None),
        ),
        ("--log-colors", _Flag("output is plain text", "switch", idle=None)),
        ("--perf --no-perf", _Flag("--quiet leaves the statistics out", idle=None)),
        (
            "--numa --prio --poll -C --cpu-mask -Cr --cpu-range --cpu-strict --prio-batch "
            "--poll-batch -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch",
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
            "-nkvo --no-kv-offload --no-op-offload -nr --no-repack -cmoe --cpu-moe -kvo "
            "--kv-offload --op-offload --repack --no-host -cmoed --cpu-moe-draft",
            _Flag(_ON_DEVICE, idle=None),
        ),
        ("-ncmoe --n-cpu-moe -ot --override-tensor", _Flag(_ON_DEVICE, "value", idle=None)),
        ("-fit --fit", _Flag("what memory has room for is found anyway", "switch", idle=None)),
        (
            "-fitt --fit-target -fitc --fit-ctx",
            _Flag("what memory has room for is found anyway", "value", idle=None),
        ),
        ("-bs --backend-sampling", _Flag("tokens are drawn on the CPU", idle=None)),
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
            "-td --threads-draft --spec-draft-threads -tbd --threads-batch-draft",
            _Flag("one number of threads serves both models; use -t", "value"),
        ),
        (
            "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl",
            _Flag("a draft model is on the CPU", "value", idle=("0",)),
        ),
        (
            "-ctkd --cache-type-k-draft --spec-draft-type-k -ctvd --cache-type-v-draft "
            "--spec-draft-type-v",
            _Flag("its cache has types of its own", "value", idle=None),
        ),
        ("--spec-default", _Flag("lookup is on by default", idle=None)),
        (
            "--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --spec-ngram-mod-n-min "
            "--spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n "
            "--spec-ngram-simple-size-m --spec-ngram-simple-min-hits",
            _Flag("--lookup finds by itself how much to guess", "value", idle=None),
        ),
        (
            "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic",
            _Flag("--lookup looks into the prompt and the answer; leave it out", "value"),
        ),
        (
            "--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default "
            "--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default "
            "--gpt-oss-120b-default",
            _Flag("name the model: -hf org/name:FILE"),
        ),
        ("-cd --ctx-size-draft", _Flag("its context is that of the model", "value", idle=None)),
        ("-np", _Flag("", "value", "--parallel")),
        ("-a", _Flag("", "value", "--alias")),
        ("-to", _Flag("", "value", "--timeout")),
        (
            "-cram --cache-ram",
            _Flag(
                "--prefix-cache-ram of 'edgeh2o serve' bounds the memory of conversations",
                "value",
                "--prefix-cache-ram",
                idle=("-1",),
                spell="{}M".format,
            ),
        ),
        (
            "-sps --slot-prompt-similarity",
            _Flag("the prompt that has most in common is taken", "value", idle=None),
        ),
        (
            "--embedding --embeddings --rerank --reranking",
            _Flag("models write texts alone; leave it out, or use another server for vectors"),
        ),
        ("--pooling --embd-normalize", _Flag("models write texts alone", "value", idle=None)),
        (
            "--ssl-key-file --ssl-cert-file",
            _Flag("there is no TLS; put a proxy such as Caddy before the server", "value"),
        ),
        ("--models-dir --models-preset", _Flag("a server has one model; start several", "value")),
        ("--models-max", _Flag("a server has one model", "value", idle=None)),
        ("--models-autoload --no-models-autoload", _Flag("a server has one model", idle=None)),
        (
            "--sleep-idle-seconds",
            _Flag("a model stays in memory as long as its server runs", "value", idle=None),
        ),
        ("--cors-origins", _Flag("", "value", "--cors")),
        (
            "--cors-methods --cors-headers",
            _Flag("origins of --cors may send GET and POST with any headers", "value", idle=None),
        ),
        ("--cors-credentials", _Flag("keys are sent as headers, not as cookies")),
        ("--no-cors-credentials", _Flag("keys are sent as headers, not as cookies", idle=None)),
        ("--api-prefix", _Flag("put a proxy before the server", "value")),
        (
            "--ui-mcp-proxy --webui-mcp-proxy --agent -ag",
            _Flag("tools are run by clients; leave it out"),
        ),
        (
            "--tools --tools-runtime --mcp-servers-config --mcp-servers-json",
            _Flag("tools are run by clients; leave it out", "value"),
        ),
        ("-j --json-schema --grammar", _Flag("each request has its own", "value")),
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
        ("-mm --mmproj -mmu --mmproj-url", _Flag("models read text alone; leave it out", "value")),
        ("--media-path", _Flag("models read text alone", "value", idle=None)),
        (
            "--no-mmproj --mmproj-auto --no-mmproj-auto --mmproj-offload --no-mmproj-offload",
            _Flag("models read text alone", idle=None),
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
    if name.startswith("--") and "_" in name:  # which llama.cpp takes for dashes
        dashed = name.replace("_", "-")
        if dashed in known:
            return [f"{dashed}{equals}{value}"]
        name = dashed
    flag = _FLAGS.get(name)
    if flag is None or name in known or "--model" not in known:
        return None
    if not equals and after and (flag.takes == "value" or (flag.takes and after[0] in _SWITCHES)):
        value = after.pop(0)
    typed = f"{name} {value}".rstrip()
    is_idle = flag.idle is None or value in flag.idle
    if flag.becomes and not (flag.idle and is_idle) and flag.becomes.partition("=")[0] in known:
        return [f"{flag.becomes}={flag.spell(value)}" if flag.takes and value else flag.becomes]
    if flag.note and is_idle:
        warnings.warn(f"{typed} has no effect: {flag.note}", stacklevel=2)
        return []
    raise UsageError(f"{typed}: {flag.note or 'this command has nothing like it; leave it out'}")
