"""Model files of every kind, opened by what they are, and sessions of what they hold.

What a run of a model needs before its weights are read is imported at the top, and NumPy is not:
what is only needed for an answer is imported while other threads read them.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from .. import isa as instruction_sets
from ..config import MTP_DRAFT, PACKED_OFF, PrefillConfig, RuntimeConfig
from ..errors import ResourceError, UsageError
from ..formats.gguf_folder import refuse_several
from ..formats.model_cache import resolve_model
from ..host import memory
from ..model_config import DecoderConfig
from ..rope_config import ROPE_OF_FILE, RopeConfig
from .context_size import memory_cures
from .memory_fit import check_load
from .plan import OPEN_BATCH_TOKENS, RunPlan, fit_chunks

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig
    from ..formats.gguf import GgufFile
    from ..lora_config import LoraAdapter
    from ..onnx.model import OnnxModelFile
    from .draft_file import DraftFile
    from .draft_model import DraftModel
    from .models import ModelFile
    from .session import OnProgress, Session


def import_answering() -> None:
    """Imports what an answer needs and maps, where addresses are limited: they then count."""
    addresses = memory.address_space_left_bytes()
    if addresses is None:
        return
    memory.keep_one_arena()
    memory.require_library_addresses()
    try:
        import tokenizers  # noqa: F401

        from . import prompt, session  # noqa: F401
    except ImportError:
        raise memory.does_not_hold(addresses, "the libraries") from None


def open_onnx_model(path: Path) -> OnnxModelFile:
    """Opens the folder or ``.onnx`` file of an ONNX model. Raises as ``open_model`` does."""
    memory.require_library_addresses()
    from ..onnx.model import OnnxModelFile

    return OnnxModelFile(path)


def open_model(
    path: Path,
    device: _core.Device | None = None,
    rope: RopeConfig = ROPE_OF_FILE,
    *,
    quantize: str | None = None,
    packed_weights: str = PACKED_OFF,
    lora: Sequence[LoraAdapter] = (),
    opened: GgufFile | None = None,
) -> ModelFile:
    """Opens a GGUF file, a folder of safetensors, or the folder or ``.onnx`` file of an ONNX model.

    For a GPU if that is given. ``quantize`` is the type that the matrices of safetensors get,
    ``packed_weights`` where those of GGUF files are kept packed, ``lora`` what is added to the
    weights of both on the CPU. ``opened`` is a GGUF file of ``path`` that is open already, for the
    CPU; it is closed with what is returned, or if it is refused.
    Raises FormatError for a file that cannot be run, ResourceError for one that cannot be read,
    UsageError if packages for it are missing, it does not run on a GPU, or cannot have ``rope``.
    """
    if os.path.isdir(path) or path.suffix == ".onnx":
        _refuse_packed_weights(path, packed_weights)
        return _open_other(path, device, rope, quantize, lora)
    _refuse_quantize(path, quantize)
    if device is not None:
        _refuse_packed_weights(path, packed_weights)
        _refuse_lora(path, lora)
        from ..runners.cuda import CudaModelFile

        return CudaModelFile(path, device, rope)
    from ..runners.native import NativeModelFile

    return NativeModelFile(path, rope, packed_weights=packed_weights, lora=lora, opened=opened)


def _open_other(
    path: Path,
    device: _core.Device | None,
    rope: RopeConfig,
    quantize: str | None,
    lora: Sequence[LoraAdapter],
) -> ModelFile:
    """What is no GGUF file, by modules that those do without."""
    from ..formats.safetensors import is_safetensors_folder, refuse_adapter

    refuse_adapter(path)
    if is_safetensors_folder(path):
        if device is not None:
            raise UsageError(
                f"{path}: safetensors do not run on a GPU; write a GGUF file with "
                "'edgeh2o quantize' and run that, or use --device cpu"
            )
        from ..runners.safetensors import SafetensorsModelFile

        return SafetensorsModelFile(path, quantize, rope, lora=lora)
    refuse_several(path)
    _refuse_lora(path, lora)
    _refuse_quantize(path, quantize)
    if rope != ROPE_OF_FILE:
        raise UsageError(
            f"{path}: an ONNX model holds the angles of its positions; the flags --rope-* and "
            "--yarn-* are for GGUF files"
        )
    if device is not None:
        raise UsageError(f"{path}: ONNX models do not run on a GPU; use --device cpu")
    return open_onnx_model(path)


def _refuse_quantize(path: Path, quantize: str | None) -> None:
    if quantize is not None:
        raise UsageError(
            f"{path}: quantize (--quantize) is for folders of safetensors; "
            "'edgeh2o quantize' turns a GGUF file into another"
        )


def _refuse_packed_weights(path: Path, packed_weights: str) -> None:
    if packed_weights != PACKED_OFF:
        raise UsageError(
            f"{path}: packed_weights (--packed-weights) are for GGUF files on the CPU; leave it out"
        )


def _refuse_lora(path: Path, lora: Sequence[LoraAdapter]) -> None:
    if lora:
        raise UsageError(
            f"{path}: adapters (--lora) are for GGUF files and folders of safetensors on the CPU; "
            "merge it into the model before"
        )


def load_session(
    model: str | Path,
    attention: SparseAttentionConfig,
    prefill: PrefillConfig,
    runtime: RuntimeConfig,
    *,
    seed: int | None,
    template: str | None,
    variables: Mapping[str, Any] | None,
    on_progress: OnProgress | None,
    check: Callable[[Session], None] | None,
) -> Session:
    """A session of the model in a file, in a folder or of a known name.

    ``check`` gets the session, with its tokenizer, while the weights are read; what it raises ends
    that. The rest is described at ``LLM``. Raises as that does.
    """
    started_at = time.perf_counter()
    if runtime.isa is not None:
        instruction_sets.use(runtime.isa)
    # What can be refused without the model is.
    attention, _ = fit_chunks(attention, prefill)
    instruction_sets.attention_precision(runtime.attention_precision)
    _check_functions(on_progress=on_progress, check=check)
    _check_template(template, variables)
    path = resolve_model(model)
    opened: list[Session] = []
    device, place = _open_device(runtime.device)
    with (
        open_model(
            path,
            device,
            runtime.rope,
            quantize=runtime.quantize,
            packed_weights=runtime.packed_weights,
            lora=runtime.lora,
        ) as file,
        ExitStack() as files,
    ):
        plan = RunPlan.of(file.config, attention, prefill, runtime, **place)
        import_answering()
        draft, layers = _open_drafts(runtime, file, plan, files)
        plan = check_load(plan, file, draft or layers)
        if plan.most_context is not None:
            warnings.warn(
                f"memory has room for a context of {plan.most_context:,} positions, which prompt "
                f"and answer share; {memory_cures()} for more",
                stacklevel=3,
            )
        _core.set_num_threads(plan.threads)  # of the packing; sessions have theirs

        def prepare() -> None:
            from .prompt import PromptReader
            from .session import Session

            prompts = PromptReader(file, plan, template, variables)
            session = Session(
                prompts,
                plan,
                path=path,
                seed=seed,
                on_progress=on_progress,
                adapters=runtime.lora,
            )
            if check is not None:
                check(session)
            opened.append(session)

        weights = file.load(
            check_tensors=runtime.check_tensors,
            on_bytes=None if on_progress is None else partial(on_progress, "load"),
            meanwhile=prepare,
        )
        loaded = None if layers is None else layers.load(weights)
    session = opened[0]
    session.take_weights(weights, time.perf_counter() - started_at, loaded or draft)
    _core.release_threads()  # as behind a generation: another thread may go on
    return session


def _check_functions(**functions: object) -> None:
    """Raises UsageError for what is given and cannot be called."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise UsageError(f"{name} must be a function, got {function!r:.80}")


def _check_template(template: str | None, variables: object) -> None:
    """Raises UsageError for variables that are none, FormatError for a template that is broken."""
    if variables is not None and not isinstance(variables, Mapping):
        raise UsageError(
            f"chat_template_kwargs are variables by name such as {{'enable_thinking': False}}, "
            f"got {variables!r:.80}"
        )
    if template is not None:
        from ..tokenizer.chat_template import compile_template

        compile_template(template)


def _open_drafts(
    runtime: RuntimeConfig, file: ModelFile, plan: RunPlan, files: ExitStack
) -> tuple[DraftModel | None, DraftFile | None]:
    """What drafts for the model of ``file``.

    A smaller model, loaded, or layers of that file or of one that ``files`` close.
    """
    if runtime.draft is None:
        return None, None
    from .draft_model import check_kind

    path = None if runtime.draft == MTP_DRAFT else resolve_model(runtime.draft)
    check_kind(file.config, plan.device, "the model", is_draft=False)
    if path is None:
        return None, _open_own_draft(file, plan)
    if path.is_dir() or path.suffix == ".onnx":
        return _load_draft(path, None, runtime, file, plan), None
    from ..formats.split import open_model_file
    from ..models.drafters import is_drafter

    gguf = open_model_file(path)  # its header takes tens of milliseconds: it is read once
    files.callback(gguf.close)
    if is_drafter(gguf.metadata):
        return None, _open_drafter(path, gguf, file, plan)
    return _load_draft(path, gguf, runtime, file, plan), None


def _open_drafter(path: Path, gguf: GgufFile, target: ModelFile, plan: RunPlan) -> DraftFile:
    """What was made to draft for ``target``, which runs by ``plan``, of the open file ``gguf``.

    Raises UsageError, with the cure, for what was made for another one, and FormatError.
    """
    from ..models.drafters import read_drafter
    from ..tokenizer import build_tokenizer
    from .draft_model import check_draft

    config = target.config
    assert isinstance(config, DecoderConfig)
    drafter = read_drafter(gguf, config)
    check_draft(target.tokenizer, build_tokenizer(gguf.metadata), path)
    names = {"name": str(path), "flag": "--draft"}
    if drafter.reads_cache:
        from ..runners.drafting_layer import LentLayersFile
        from .cache_draft import cache_draft_file

        return cache_draft_file(LentLayersFile(gguf, drafter, config, **names), plan)
    from ..runners.drafting_layer import DraftingLayerFile
    from .own_draft import own_draft_file

    return own_draft_file(DraftingLayerFile(gguf, drafter, **names), plan)


def _open_own_draft(file: ModelFile, plan: RunPlan) -> DraftFile:
    """The layer of the model's own file that drafts. Raises UsageError where that cannot be."""
    from ..runners.native import NativeModelFile
    from .own_draft import own_draft_file

    assert isinstance(file, NativeModelFile)
    return own_draft_file(file.open_drafting_layer(), plan)


def _load_draft(
    path: Path, opened: GgufFile | None, runtime: RuntimeConfig, target: ModelFile, plan: RunPlan
) -> DraftModel:
    """The smaller model that drafts for ``target``, which runs by ``plan``.

    It is read of ``opened``, a GGUF file, if that is given, and closes it. It reads prompts by the
    default attention, sparsely where a table or a profile is known. Raises UsageError, with the
    cure, for one that cannot, and what the opening of any model raises.
    """
    from ..attention.headwise import HeadwiseConfig
    from .draft_model import DraftModel, check_draft, check_kind

    packed_weights = PACKED_OFF if path.is_dir() else runtime.packed_weights
    with open_model(path, packed_weights=packed_weights, opened=opened) as file:
        check_kind(file.config, plan.device, f"the draft model {path}", is_draft=True)
        check_draft(target.tokenizer, file.tokenizer, path)
        own = replace(runtime, context_size=None, rope=ROPE_OF_FILE, draft=None)
        draft_plan = RunPlan.of(
            file.config, HeadwiseConfig(), PrefillConfig(batch_size=OPEN_BATCH_TOKENS), own
        )
        try:
            check_load(draft_plan, file)
        except ResourceError as error:
            raise ResourceError(f"the draft model {path}: {error}") from None
        _core.set_num_threads(draft_plan.threads)
        return DraftModel(file.load(check_tensors=runtime.check_tensors), draft_plan, path)


def _open_device(name: str) -> tuple[_core.Device | None, dict[str, Any]]:
    """The GPU that is asked for, None for the CPU, and what ``RunPlan.of`` takes of it.

    Raises as ``open_device``.
    """
    from ..cuda.devices import choose_device, describe_device, open_device, product_rate

    ordinal = choose_device(name)
    if ordinal is None:
        return None, {}
    device = open_device(ordinal)
    properties = device.properties()
    return device, {
        "device": describe_device(ordinal, properties),
        "has_device_memory": not properties["is_integrated"],
        "gpu_rate": product_rate(properties),
    }
