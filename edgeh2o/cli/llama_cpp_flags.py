"""Flags that users of llama.cpp type and edgeh2o has under another name, or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Container

from ..errors import UsageError
from ..sampler_names import spell_samplers
from ..sampling_config import MAX_LOOKUP
from .foreign_flag import Flag
from .llama_server_flags import SERVER_FLAGS

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


def _limit_draft(text: str) -> str:
    """No more tokens than are drafted here: llama.cpp has 16 by default."""
    return str(min(int(text), MAX_LOOKUP)) if text.isdecimal() else text


_SWITCHES = ("on", "off", "auto", "0", "1")
_FLAGS = SERVER_FLAGS | {
    name: flag
    for names, flag in (
        (
            "-ngl --gpu-layers --n-gpu-layers",
            Flag("a GPU takes all layers (--device cuda)", "value", idle=("0",)),
        ),
        ("-hf --hf-repo", Flag("this command takes a path", "value")),
        ("-hfr", Flag("this command takes a path", "value", "--hf-repo")),
        ("-hff --hf-file -mu --model-url -dr --docker-repo", Flag(_BY_PATH, "value")),
        (
            "-tb --threads-batch",
            Flag("one number of threads serves prompt and answer; use -t", "value"),
        ),
        ("-fa --flash-attn", Flag("attention is always fused", "switch", idle=None)),
        ("-co --color", Flag("answers have no colours", "switch", idle=None)),
        ("--mlock", Flag("weights are packed into memory, and not locked", idle=None)),
        ("--mmap --no-mmap", Flag("weights are packed into memory, not mapped", idle=None)),
        ("-lm --load-mode", Flag("weights are packed into memory", "value", idle=None)),
        ("--warmup --no-warmup", Flag("nothing is run to warm up", idle=None)),
        (
            "--no-display-prompt --display-prompt --verbose-prompt",
            Flag("prompts are never printed", idle=None),
        ),
        ("-no-cnv --no-conversation", Flag("'edgeh2o run' answers a prompt", "", "--no-chat")),
        ("--chat-template-file", Flag("", "value", "--chat-template")),
        (
            "--yarn-ext-factor --yarn-attn-factor",
            Flag("both follow from --rope-scale", "value", idle=("-1", "-1.0", "1", "1.0")),
        ),
        ("--context-shift", Flag("", "", "--context-full=shift")),
        ("--no-context-shift", Flag("", "", "--context-full=stop")),
        ("--draft --model-draft -md", Flag(_NO_DRAFT, "value")),
        ("--spec-draft-model", Flag(_NO_DRAFT, "value", "--draft")),
        (
            "--spec-draft-hf -hfd -hfrd --hf-repo-draft",
            Flag("fetch it by 'edgeh2o pull' and write --draft FILE", "value"),
        ),
        (
            "--draft-max --draft-n --spec-draft-n-max",
            Flag(_NO_DRAFT, "value", "--draft-tokens", spell=_limit_draft),
        ),
        ("--draft-tokens", Flag(_NO_DRAFT, "value")),
        (
            "--spec-type",
            Flag(
                "a draft model drafts where --draft FILE names it; write --draft mtp for "
                "draft-mtp of the model's own file, and --lookup for the ngram kinds",
                "value",
                idle=("none", "draft-simple", "draft-eagle3", "draft-dflash"),
            ),
        ),
        (
            "--draft-min --draft-n-min --draft-p-min --spec-draft-n-min --spec-draft-p-min "
            "--draft-p-split --spec-draft-p-split",
            Flag("how far a draft goes is learnt from what was right", "value", idle=None),
        ),
        (
            "-c --ctx-size --ctx",
            Flag(
                "the context is as long as what is read, which --lengths of needle says, and -p, "
                "-n and -d of bench",
                "value",
                idle=(),
            ),
        ),
        ("--jinja --no-jinja", Flag("chat templates are always read by jinja2", idle=None)),
        ("-cnv --conversation", Flag("'edgeh2o chat' is a conversation", "", "--chat", idle=None)),
        ("-st --single-turn", Flag("'edgeh2o run' gives one answer", idle=None)),
        ("--grammar-file", Flag("", "value", "--grammar")),
        ("--json-schema-file -jf", Flag("", "value", "--json-schema")),
        (
            "--reasoning-format",
            Flag("reasoning is reasoning_content", "value", idle=("auto", "deepseek")),
        ),
        (
            "--reasoning-effort",
            Flag('write --chat-template-kwargs \'{"reasoning_effort": "low"}\'', "value"),
        ),
        ("-rea", Flag("", "value", "--reasoning")),
        ("--skip-chat-parsing", Flag("/completion answers raw text as it is")),
        ("--no-skip-chat-parsing", Flag("answers are parsed", idle=None)),
        (
            "--prefill-assistant",
            Flag("a last message of the assistant is gone on with", idle=None),
        ),
        (
            "--no-prefill-assistant",
            Flag('each request says so ("continue_final_message": false)'),
        ),
        (
            "--reasoning-budget-message",
            Flag("thoughts have no budget", "value", idle=None),
        ),
        (
            "--reasoning-budget",
            Flag(
                "reasoning is as long as it is; --reasoning off leaves it out",
                "value",
                idle=("-1",),
            ),
        ),
        (
            "--keep",
            Flag("--context-full shift always keeps the beginning of a prompt", "value", idle=None),
        ),
        (
            "--simple-io --log-disable --log-jsonl --no-log-jsonl --log-prefix --no-log-prefix "
            "--log-timestamps --no-log-timestamps",
            Flag("output is plain text", idle=None),
        ),
        ("--log-colors", Flag("output is plain text", "switch", idle=None)),
        (
            "--perf --no-perf --show-timings --no-show-timings",
            Flag("--quiet leaves the statistics out", idle=None),
        ),
        (
            "--numa --prio --poll -C --cpu-mask -Cr --cpu-range --cpu-strict --prio-batch "
            "--poll-batch -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch -Cd "
            "--cpu-mask-draft -Crd --cpu-range-draft --cpu-strict-draft --prio-draft --poll-draft "
            "--spec-draft-cpu-mask --spec-draft-cpu-range --spec-draft-cpu-strict "
            "--spec-draft-prio --spec-draft-poll",
            Flag(_PLACED, "value", idle=None),
        ),
        ("-dev", Flag("write --device cpu or --device cuda", "value", idle=("none",))),
        (
            "-sm --split-mode -mg --main-gpu -ts --tensor-split",
            Flag("a model is on one device; --device cuda:1 names it", "value", idle=("none", "0")),
        ),
        (
            "-nkvo --no-kv-offload --no-op-offload -nr --no-repack -cmoe --cpu-moe -kvo "
            "--kv-offload --op-offload --repack --no-host -nopo -cmoed --cpu-moe-draft "
            "--spec-draft-cpu-moe",
            Flag(_ON_DEVICE, idle=None),
        ),
        (
            "-ncmoe --n-cpu-moe -ot --override-tensor -ncffn --n-cpu-ffn -lzm --lazy-mode -otd "
            "--override-tensor-draft -ncmoed --n-cpu-moe-draft --spec-draft-override-tensor "
            "--spec-draft-n-cpu-moe --spec-draft-ncmoe",
            Flag(_ON_DEVICE, "value", idle=None),
        ),
        ("--rpc -rpc", Flag("a model runs on one machine; leave it out", "value")),
        ("-fit --fit", Flag("what memory has room for is found anyway", "switch", idle=None)),
        (
            "-fitp --fit-print",
            Flag("'edgeh2o inspect' says what memory it takes", "switch", idle=None),
        ),
        (
            "-fitt --fit-target -fitc --fit-ctx",
            Flag("what memory has room for is found anyway", "value", idle=None),
        ),
        (
            "-bs --backend-sampling --spec-draft-backend-sampling",
            Flag("tokens are drawn on the CPU", idle=None),
        ),
        ("--list-devices", Flag("'edgeh2o doctor' lists them")),
        ("--swa-full", Flag("sliding windows are exact whatever is kept", idle=None)),
        ("-dt --defrag-thold", Flag("the cache has no holes", "value", idle=None)),
        ("--offline", Flag("nothing is fetched but what -hf and known names ask for", idle=None)),
        ("--override-kv", Flag("metadata is taken as the file has it; leave it out", "value")),
        (
            "-i --interactive -if --interactive-first",
            Flag("'edgeh2o chat' is a conversation", idle=None),
        ),
        (
            "-mli --multiline-input",
            Flag("a line that ends with \\ goes on in the next; a paste is one message", idle=None),
        ),
        (
            "-p --prompt -f --file",
            Flag("'edgeh2o run' answers a prompt; messages are typed or sent", "value", "--text"),
        ),
        ("-sysf --system-prompt-file", Flag('write --system "$(cat FILE)"', "value")),
        (
            "--in-prefix --in-suffix",
            Flag("the chat template is around messages; write --chat-template FILE", "value"),
        ),
        ("--in-prefix-bos", Flag("the chat template is around messages; leave it out")),
        ("--spm-infill", Flag("the model says in which order code is filled in", idle=None)),
        ("-o --output --output-file", Flag("answers go to stdout; write > FILE", "value")),
        ("-ptc --print-token-count", Flag("tokens are counted at the end", "value", idle=None)),
        ("--usage", Flag("", "", "--help")),
        ("--version", Flag("write 'edgeh2o --version'")),
        ("--completion-bash", Flag("write 'edgeh2o completion bash'")),
        ("--log-verbose", Flag("", "", "--verbose")),
        ("-sp --special", Flag("control tokens are never printed", idle=None)),
        ("-lv --verbosity --log-verbosity", Flag("-v says more", "value", idle=None)),
        ("--log-file", Flag("messages go to stderr; redirect it (2> FILE)", "value")),
        ("-bf --binary-file", Flag("prompts are UTF-8 text; use -f", "value")),
        (
            "--sampling-seq --sampler-seq",
            Flag("", "value", "--samplers", spell=spell_samplers),
        ),
        (
            "-td --threads-draft --spec-draft-threads -tbd --threads-batch-draft "
            "--spec-draft-threads-batch",
            Flag("one number of threads serves both models; use -t", "value"),
        ),
        (
            "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl",
            Flag("a draft model is on the CPU", "value", idle=("0",)),
        ),
        (
            "-ctkd --cache-type-k-draft --spec-draft-type-k -ctvd --cache-type-v-draft "
            "--spec-draft-type-v",
            Flag("its cache has types of its own", "value", idle=None),
        ),
        (
            "-devd --device-draft --spec-draft-device",
            Flag("a draft model is on the CPU", "value", idle=("none", "cpu")),
        ),
        ("--mtp", Flag(_NO_DRAFT, "", "--draft=mtp")),
        (
            "--dflash --eagle3",
            Flag("a smaller model drafts (--draft FILE), or the model's own layer (--draft mtp)"),
        ),
        ("--spec-default", Flag("lookup is on by default", idle=None)),
        (
            "--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --spec-ngram-mod-n-min "
            "--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits "
            "--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits "
            "--spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n "
            "--spec-ngram-simple-size-m --spec-ngram-simple-min-hits",
            Flag("--lookup finds by itself how much to guess", "value", idle=None),
        ),
        (
            "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic",
            Flag("--lookup looks into the prompt and the answer; leave it out", "value"),
        ),
        (
            "--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default "
            "--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default "
            "--gpt-oss-120b-default",
            Flag("name the model: -hf org/name:FILE"),
        ),
        ("-cd --ctx-size-draft", Flag("its context is that of the model", "value", idle=None)),
        ("--lora-scaled", Flag("", "value", "--lora")),
        ("--lora", Flag("this command takes no adapters; leave it out", "value")),
        (
            "--lora-init-without-apply",
            Flag("it is for serve; --lora FILE:0 loads an adapter that counts nothing"),
        ),
        (
            "--control-vector --control-vector-scaled --control-vector-layer-range",
            Flag("control vectors are not applied; leave it out", "value"),
        ),
        (
            "-mm --mmproj -mmu --mmproj-url --image --audio --video",
            Flag("models read text alone; leave it out", "value"),
        ),
        (
            "--media-path --image-min-tokens --image-max-tokens -mmdev --mmproj-device",
            Flag("models read text alone", "value", idle=None),
        ),
        (
            "--no-mmproj --mmproj-auto --no-mmproj-auto --mmproj-offload --no-mmproj-offload",
            Flag("models read text alone", idle=None),
        ),
        ("--prompt-cache", Flag("", "value", "--session")),
        ("--prompt-cache-ro", Flag("", "", "--session-read-only")),
        ("--prompt-cache-all", Flag("--session keeps answers too", idle=None)),
        ("-hft --hf-token", Flag("set the variable HF_TOKEN", "value")),
        (
            "-gan --grp-attn-n -gaw --grp-attn-w",
            Flag("longer contexts are by --rope-scaling yarn", "value"),
        ),
        ("--chunks", Flag("it is for 'edgeh2o perplexity'", "value", "--windows")),
        ("--ppl-stride", Flag("windows follow each other; leave it out", "value", idle=("0",))),
        (
            "--hellaswag --winogrande --multiple-choice",
            Flag("lm-eval asks such questions of 'edgeh2o serve'"),
        ),
        ("--kl-divergence", Flag("sparse attention is always compared with dense", idle=None)),
        (
            "--kl-divergence-base --save-all-logits",
            Flag("sparse attention is compared with dense in one run; leave it out", "value"),
        ),
        ("-pg", Flag("-n N with -d N times tokens after a prompt", "value")),
        ("--delay", Flag("runs follow each other", "value", idle=None)),
        ("-oe --output-err", Flag("results go to stdout", "value", idle=("none",))),
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
