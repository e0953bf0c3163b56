"""What every verb that runs a model shares: its options, and opening it with progress bars."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..config import PrefillConfig, RuntimeConfig
from ..errors import UsageError
from ..formats.known_models import HubName
from ..rope_config import RopeConfig
from ..sampling_config import AUTO_DRAFT, DRAFT_OFF, STOP_WHEN_FULL, SamplingParams
from .attention_options import add_attention_options, read_attention
from .options import add_config_options, read_config
from .progress import ProgressBars, progress_on_stderr

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig
    from ..engine.session import Session
    from ..host.memory_profile import MemoryProfile
    from ..llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """A model and how it is to be run; every value was found good.

    ``quiet`` shows no progress, ``verbose`` tells stderr what was loaded.
    """

    model: str
    runtime: RuntimeConfig
    prefill: PrefillConfig
    attention: SparseAttentionConfig
    quiet: bool = False
    verbose: bool = False


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, which may also be given by ``-m``."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=argparse.SUPPRESS,  # not to undo -m
        help="GGUF file, folder of safetensors or of an ONNX model, or a known model such as "
        "smollm2-135m",
    )
    group.add_argument("-m", "--model", metavar="MODEL", help="MODEL given by a flag")
    group.add_argument(
        "-hf",
        "--hf-repo",
        dest="model",
        type=_read_hub_name,
        metavar="NAME",
        help="org/name[:file] of the Hugging Face Hub in place of MODEL, fetched as by 'edgeh2o "
        "pull' unless it is there (needs edgeh2o[pull])",
    )


def _read_hub_name(text: str) -> HubName:
    """An argparse type: the name of a model of the hub, or its address."""
    from ..formats.hub import read_hub_name

    try:
        name = read_hub_name(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if name is None:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not of the form org/name or org/name:FILE, such as org/name:Q4_K_M"
        )
    return HubName(name)


def add_model_options(
    parser: argparse.ArgumentParser, *, skip: Collection[str] = (), attention: bool = True
) -> None:
    """Adds the flags of the machine, the prefill and, with ``attention``, its attention.

    ``skip`` names fields of ``RuntimeConfig`` that the verb sets itself.
    """
    add_config_options(parser, RuntimeConfig, title="machine", skip=skip)
    add_config_options(parser, RopeConfig, title="positions")
    add_config_options(parser, PrefillConfig, title="prefill")
    if attention:
        add_attention_options(parser)


def add_draft_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--draft MODEL|mtp``."""
    parser.add_argument(
        "--draft",
        "-md",
        "--model-draft",
        metavar="MODEL|mtp",
        help="a smaller model of the same vocabulary, which guesses tokens that MODEL then checks "
        "several at a time, or a file that was made to draft for MODEL (gemma4-assistant, eagle3, "
        "dflash); the text stays the same. mtp: the layer of MODEL's own file that guesses tokens "
        "ahead, which files of Qwen3.5 and some mixtures of experts may have",
    )


def read_sampling(args: argparse.Namespace) -> SamplingParams:
    """The parsed flags of ``SamplingParams``, beside those of ``add_draft_option``.

    Raises UsageError for a value out of range, and for a number of draft tokens that nobody writes.
    """
    sampling = read_config(args, SamplingParams)
    if args.draft is None and sampling.draft_tokens not in (AUTO_DRAFT, DRAFT_OFF):
        raise UsageError(
            f"--draft-tokens {sampling.draft_tokens} needs a draft model; name one with --draft, "
            "or leave it out (--lookup drafts without a model)"
        )
    return sampling


def add_verbosity_options(parser: argparse._ActionsContainer) -> None:
    """Adds ``--quiet`` and ``--verbose``, of which one may be given."""
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quiet", action="store_true", help="print the answer only")
    level.add_argument("-v", "--verbose", action="store_true", help="say what is loaded and how")


def read_model_options(args: argparse.Namespace) -> ModelOptions:
    """The parsed flags. Raises UsageError for a value out of range, or without a model."""
    if not args.model:
        raise UsageError("no model given: name a GGUF file, the folder of a model, or smollm2-135m")
    attention = read_attention(args)
    prefill = read_config(args, PrefillConfig)
    prefill.with_chunk_size(attention.preferred_chunk_size)  # before the model is looked at
    draft = getattr(args, "draft", None)
    runtime = read_config(args, RuntimeConfig)
    return ModelOptions(
        model=args.model,
        runtime=replace(runtime, rope=read_config(args, RopeConfig), draft=draft),
        prefill=prefill,
        attention=attention,
        quiet=getattr(args, "quiet", False),
        verbose=getattr(args, "verbose", False),
    )


def check_together(sampling: SamplingParams, options: ModelOptions) -> None:
    """Raises UsageError for flags that do not go together, whatever the model."""
    if sampling.context_full != STOP_WHEN_FULL:  # else there are none, and nothing to import
        from ..engine.request_checks import check_settings

        check_settings(sampling, options.runtime, options.attention)


@contextmanager
def open_model(
    options: ModelOptions,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    profile: MemoryProfile | None = None,
    check: Callable[[Session], None] | None = None,
    must_write: bool = True,
) -> Iterator[tuple[LLM, ProgressBars]]:
    """Loads the model, showing its progress; closes both at the end.

    A known model that is missing is fetched first. ``chat_template`` takes the place of the model's
    own, ``chat_template_kwargs`` are its variables; ``profile`` follows the progress; ``check`` is
    that of ``LLM``. Unless it ``must_write`` a model may be one that makes vectors only.
    """
    from ..formats.model_cache import resolve_model
    from ..llm import LLM

    show_warnings()
    path = resolve_model(options.model, on_message=None if options.quiet else print_note)
    bars = progress_on_stderr(quiet=options.quiet)
    runtime = options.runtime

    def report(stage: str, done: int, total: int) -> None:
        bars(stage, done, total)
        if profile is not None:
            profile.on_progress(stage, done, total)

    def check_all(session: Session) -> None:
        if must_write:
            from ..engine.request_checks import require_writing

            require_writing(session.plan.config)
        if check is not None:
            check(session)

    try:
        with LLM(
            path,
            context_size=runtime.context_size,
            threads=runtime.threads,
            isa=runtime.isa,
            cache_type=runtime.cache_type,
            cache_type_k=runtime.cache_type_k,
            cache_type_v=runtime.cache_type_v,
            attention_precision=runtime.attention_precision,
            check_tensors=runtime.check_tensors,
            device=runtime.device,
            rope=runtime.rope,
            quantize=runtime.quantize,
            packed_weights=runtime.packed_weights,
            lora=runtime.lora,
            draft=runtime.draft,
            prefill=options.prefill,
            attention=options.attention,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            on_progress=report,
            check=check_all,
        ) as llm:
            if options.verbose:
                bars.close()
                print_note(_describe(llm))
            yield llm, bars
    finally:
        bars.close()


def _describe(llm: LLM) -> str:
    config = llm.config
    precisions = dict.fromkeys(
        [llm.attention_precision, llm.choose_precision(config.context_length)]
    )
    return (
        f"{llm.model_path}: {config.architecture}, {config.n_layers} layers, "
        f"{config.n_heads} query heads, {config.n_kv_heads} KV heads of {config.head_dim}, "
        f"vocabulary {config.vocab_size}, trained on {config.context_length} positions\n"
        f"kernels: {llm.isa}, attention in {' or '.join(precisions)}, threads: {llm.threads}"
        + ("" if llm.device == "cpu" else f"\ndevice: {llm.device}")
    )


def show_warnings() -> None:
    """Lets what the reading of a file warns of look as the program's other warnings."""
    import logging

    class Lines(logging.Formatter):
        def formatMessage(self, record: logging.LogRecord) -> str:
            kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            return f"edgeh2o: {kind}{record.message}"

    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    logging.basicConfig(handlers=[handler])


def print_note(message: str) -> None:
    """Prints to stderr: stdout is for the answer."""
    print(message, file=sys.stderr, flush=True)
