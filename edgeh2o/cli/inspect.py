"""``edgeh2o inspect``: what is in a model file, and what it needs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EdgeH2OError, UsageError
from .model_options import (
    add_model_argument,
    add_model_options,
    print_note,
    read_model_options,
    show_warnings,
)
from .report import add_json_option, print_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..engine.memory_fit import SessionEstimate
    from ..engine.plan import RunPlan
    from ..formats.gguf import GgufFile
    from ..formats.model_tensors import ModelTensors
    from ..model_config import DecoderConfig, ModelConfig
    from ..models.tensors import TensorBinding
    from ..tokenizer import Tokenizer
    from .model_options import ModelOptions

MAX_TEXT = 200

HELP = "show a model file: metadata, tensors, tokenizer, memory"
DESCRIPTION = (
    "Show what is in a model file, and the memory that it needs for a context "
    "(-c, default: the model's trained length). No weights are loaded, but an ONNX model is tried "
    "on a few tokens; with --check-tensors every weight is looked at."
)
EXAMPLES = """\
  edgeh2o inspect model.gguf
  edgeh2o inspect model.gguf -c 32768 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_model_argument(parser)
    add_json_option(parser)
    parser.add_argument(
        "--tensors", action="store_true", help="list every tensor, rows last, as GGUF files do"
    )
    add_model_options(parser, skip=("packed_weights", "lora"))


def execute(args: argparse.Namespace) -> int:
    """Prints the report; parts that this version cannot read say why."""
    options = read_model_options(args)

    from .. import isa
    from ..engine.plan import fit_chunks
    from ..formats.model_cache import resolve_model
    from ..formats.safetensors import is_safetensors_folder
    from ..formats.split import open_model_file
    from ..onnx.folder import is_onnx

    show_warnings()
    if options.runtime.isa is not None:
        isa.use(options.runtime.isa)
    path = resolve_model(options.model, on_message=print_note)
    options = replace(options, attention=fit_chunks(options.attention, options.prefill)[0])
    is_folder = is_safetensors_folder(path)
    if is_onnx(path) and not is_folder:
        if options.runtime.check_tensors or args.tensors:
            raise UsageError(
                "inspect looks into the tensors of GGUF files only; "
                "'edgeh2o run --check-tensors' checks those of ONNX models"
            )
        report = _report_onnx(path, options)
    elif is_folder:
        if options.runtime.check_tensors:
            raise UsageError("weights of safetensors are checked whenever they are loaded")
        report = _report_safetensors(path, options, lists_tensors=args.tensors)
    else:
        with open_model_file(path) as gguf:
            report = _report_gguf(path, gguf, options, lists_tensors=args.tensors)
    print_report(report, as_json=args.json)
    return 0


def _report_gguf(
    path: Path, gguf: GgufFile, options: ModelOptions, *, lists_tensors: bool
) -> dict[str, Any]:
    from ..cuda.devices import choose_device
    from ..formats.metadata import TEMPLATE_KEY
    from ..models.reader import read_model
    from ..runners.native import estimate_session_bytes
    from ..runners.tensor_checks import check_tensors
    from ..runners.weight_loading import mapped_bytes
    from ..tokenizer import build_tokenizer

    read_shape = partial(read_model, gguf, options.runtime.rope)

    def estimate_memory() -> dict[str, Any]:
        config, bindings = read_shape()
        ordinal = choose_device(options.runtime.device)
        if ordinal is not None:
            return _describe_device_memory(config, bindings, options, ordinal)
        sizes = [binding.held_bytes for binding in bindings]
        estimate = partial(estimate_session_bytes, config)
        plan = _make_plan(config, options)
        needs = _describe_memory(plan, sum(sizes), mapped_bytes(sizes), estimate)
        return {**needs, **_describe_own_draft(gguf, config, plan, needs["context"])}

    def describe_attention() -> dict[str, Any]:
        config, bindings = read_shape()
        return _describe_attention(config, options, sum(each.held_bytes for each in bindings))

    template = gguf.metadata.get(TEMPLATE_KEY)
    read_tokenizer = cache(lambda: build_tokenizer(gguf.metadata))  # it warns each time
    if options.runtime.check_tensors:
        check_tensors(gguf)
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "gguf_version": gguf.header.version,
        "metadata": {key: _describe(value) for key, value in gguf.metadata.items()},
        "tensors": _count_tensors(gguf),
        **({"tensor_list": _list_tensors(gguf)} if lists_tensors else {}),
        "tokenizer": _try(lambda: _describe_tokenizer(read_tokenizer())),
        "chat_template": _try(lambda: _render(template, read_tokenizer())),
        "attention": _try(describe_attention),
        "memory_bytes": _try(estimate_memory),
    }


def _report_safetensors(
    path: Path, options: ModelOptions, *, lists_tensors: bool
) -> dict[str, Any]:
    """Types and sizes are those that the weights get as they are loaded."""
    from ..runners.safetensors import SafetensorsModelFile

    with SafetensorsModelFile(path, options.runtime.quantize, options.runtime.rope) as file:
        converted = file.converted
        sizes = (file.n_weight_bytes, file.n_mapped_bytes)
        return {
            "file": str(path),
            "metadata": {key: _describe(value) for key, value in converted.metadata.items()},
            "tensors": _count_tensors(converted),
            **({"tensor_list": _list_tensors(converted)} if lists_tensors else {}),
            "tokenizer": _try(lambda: _describe_tokenizer(file.tokenizer)),
            "chat_template": _try(lambda: _render(file.chat_template, file.tokenizer)),
            "attention": _try(lambda: _describe_attention(file.config, options, sizes[0])),
            "memory_bytes": _try(
                lambda: _describe_memory(
                    _make_plan(file.config, options), *sizes, file.estimate_session_bytes
                )
            ),
        }


def _report_onnx(path: Path, options: ModelOptions) -> dict[str, Any]:
    from ..engine.opening import open_onnx_model

    def estimate_memory() -> dict[str, Any]:
        plan = _make_plan(file.config, options)
        sizes = (file.n_weight_bytes, file.n_mapped_bytes)
        return _describe_memory(plan, *sizes, file.estimate_session_bytes)

    with open_onnx_model(path) as file:
        file.check()
        return {
            **file.describe(),
            "tokenizer": _describe_tokenizer(file.tokenizer),
            "chat_template": _try(lambda: _render(file.chat_template, file.tokenizer)),
            "attention": _try(
                lambda: _describe_attention(file.config, options, file.n_weight_bytes)
            ),
            "memory_bytes": _try(estimate_memory),
        }


def _describe_own_draft(
    gguf: GgufFile, config: DecoderConfig, plan: RunPlan, context: int
) -> dict[str, Any]:
    """What a layer of the file takes besides, if one can draft."""
    from ..models.drafting import why_no_drafting_layer

    if why_no_drafting_layer(gguf):
        return {}
    from ..engine.own_draft import own_draft_file
    from ..runners.drafting_layer import own_drafting_layer

    own = own_draft_file(own_drafting_layer(gguf, config), plan)
    sizes = {
        "draft_weights": own.n_weight_bytes,
        "draft_session": own.estimate_session_bytes(context),
    }
    return {"with --draft mtp": sizes}


def _describe_device_memory(
    config: DecoderConfig, bindings: Sequence[TensorBinding], options: ModelOptions, ordinal: int
) -> dict[str, Any]:
    """What fits on a GPU. Raises UsageError for a model that it does not run, and ResourceError."""
    from ..cuda.devices import describe_device, memory_left, open_device
    from ..engine.plan import RunPlan
    from ..runners import cuda

    device = open_device(ordinal)
    place, room = describe_device(ordinal, device.properties()), memory_left(device)
    cuda.require_supported(config)
    weights = cuda.estimate_weight_bytes(bindings)
    estimate = partial(cuda.estimate_session_bytes, config)
    settings = (options.attention, options.prefill, options.runtime)
    plan = RunPlan.of(config, *settings, place, room is not None)
    if room is None:
        return {"device": place, **_describe_memory(plan, weights, 0, estimate)}
    own = _describe_memory(
        plan, weights, 0, lambda *sizes: cuda.on_device(estimate(*sizes)), available=room
    )
    plan = plan.for_length(own["context"])
    host = cuda.on_host(estimate(plan.attention, plan.shape(own["context"])))
    return {"device": place, **own, "on_the_host": sum(host.values())}


def _try(describe: Any) -> Any:
    try:
        return describe()
    except EdgeH2OError as error:
        return f"not usable: {error}"


def _describe(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}... ({len(value)} chars)"
    kind = "strings" if isinstance(value, tuple) else str(value.dtype)
    return f"{len(value)} {kind}"


def _count_tensors(gguf: ModelTensors) -> dict[str, Any]:
    types: dict[str, dict[str, int]] = {}
    for info in gguf.tensors.values():
        entry = types.setdefault(info.type_name, {"tensors": 0, "elements": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["elements"] += info.rows * info.cols
        entry["bytes"] += info.n_bytes
    total = {
        name: sum(entry[name] for entry in types.values())
        for name in ("tensors", "elements", "bytes")
    }
    return {**types, "all": total}


def _list_tensors(gguf: ModelTensors) -> dict[str, str]:
    return {
        info.name: f"{info.type_name} {' x '.join(map(str, info.shape))}"
        for info in gguf.tensors.values()
    }


def _describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "model": tokenizer.model_name,
        "pre": tokenizer.pre_name,
        "tokens": tokenizer.vocab_size,
        "bos": tokenizer.bos_text or None,
        "eos": tokenizer.eos_text or None,
        "adds_bos": tokenizer.add_bos,
        "adds_eos": tokenizer.add_eos,
        "ends_generation": [tokenizer.token_text(i) for i in sorted(tokenizer.eog_ids)],
        "control_tokens": len(tokenizer.control_texts),
    }


def _render(template: object, tokenizer: Tokenizer) -> str | None:
    from ..tokenizer.chat_template import ChatTemplate, read_chat_template

    source = read_chat_template(template)
    if source is None:
        return None
    rendered = ChatTemplate(source, tokenizer).render([{"role": "user", "content": "Hello"}])
    return rendered.plain_text


def _make_plan(config: ModelConfig, options: ModelOptions) -> RunPlan:
    from ..engine.plan import RunPlan

    return RunPlan.of(config, options.attention, options.prefill, options.runtime)


@dataclass(frozen=True, slots=True)
class _Weighed:
    """A model that is not loaded, as ``engine.payoff`` asks for it."""

    weight_bytes: int
    shows_attention: bool


def _describe_attention(
    config: ModelConfig, options: ModelOptions, weight_bytes: int
) -> dict[str, Any]:
    from ..engine.context_size import context_limit
    from ..engine.payoff_lengths import describe_lengths
    from ..model_config import DecoderConfig
    from ..runners.native import can_show_attention

    plan = _make_plan(config, options)
    shows = isinstance(config, DecoderConfig) and can_show_attention(config)
    lengths = describe_lengths(plan, _Weighed(weight_bytes, shows))
    plan = plan.for_length(context_limit(plan))
    return {**plan.attention.report(config), "chunk_size": plan.chunk_size, **lengths}


def _describe_memory(
    plan: RunPlan,
    weights: int,
    mapped: int,
    estimate: SessionEstimate,
    *,
    available: int | None = None,
) -> dict[str, Any]:
    """Of the host's memory, or of ``available`` bytes of a GPU."""
    from ..engine.context_size import context_limit
    from ..engine.memory_fit import find_largest_context, find_room, session_sizes
    from ..engine.opening import import_answering
    from ..host import memory

    import_answering()
    context = context_limit(plan)
    plan = plan.for_length(context)
    parts = dict(estimate(plan.attention, plan.shape(context)))
    room = find_room(plan.threads, weights, mapped) if available is None else available - weights
    most = max(context, plan.config.context_length)
    return {
        "context": context,
        "weights": weights,
        **parts,
        "total": weights + sum(parts.values()),
        "available": memory.available_bytes() if available is None else available,
        "largest_context_that_fits": find_largest_context(
            most, session_sizes(plan.for_length(most), plan.shape(most), estimate), room
        ),
    }
