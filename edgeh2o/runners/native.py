"""GGUF models in the C++ decoder: opening, packing the weights, starting sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from .. import _core
from ..attention.base import has_equal_kv_heads
from ..config import PACKED_OFF
from ..errors import FormatError, ResourceError, UsageError
from ..formats.fingerprint import with_adapters
from ..formats.gguf import GgufFile
from ..model_config import DecoderConfig
from ..models.lora import add_updates
from ..models.mixed_streams import TABLE_TENSOR
from ..rope_config import ROPE_OF_FILE, RopeConfig
from .base import SessionShape
from .core_config import core_config
from .gguf_model import GgufModel, GgufModelFile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..attention.base import SparseAttentionConfig
    from ..lora_config import LoraAdapter
    from ..models.own_adapters import OwnAdapters
    from ..tokenizer import Tokenizer
    from .adapters import Adapters
    from .drafting_layer import DraftingLayer, DraftingLayerFile, LentLayersFile
    from .packed_weights import KeptWeights
    from .weight_loading import OnBytes

# The least part of a model's weights that memory holds: below, nothing of them stays there.
LEAST_PART = 16


class NativeModelFile(GgufModelFile):
    """A GGUF file for the decoder of the CPU.

    ``packed_weights`` and ``lora`` are those of ``RuntimeConfig``, ``opened`` is that of the base.
    """

    may_stay_on_disk = True  # weights, where packed_weights says so

    def __init__(
        self,
        path: Path,
        rope: RopeConfig = ROPE_OF_FILE,
        *,
        packed_weights: str = PACKED_OFF,
        lora: Sequence[LoraAdapter] = (),
        opened: GgufFile | None = None,
    ) -> None:
        super().__init__(path, rope, opened)
        self._packed_weights = packed_weights
        self._weight_room: int | None = None  # all of them
        self._adapters: Adapters | None = None
        self._own_adapters: OwnAdapters | None = None
        if self.config.adapter_tokens:
            self._open_own_adapters(lora)
        elif lora:
            from .adapters import Adapters

            try:
                self._adapters = Adapters(lora, self._bindings, self._gguf)
            except BaseException:
                self._gguf.close()
                raise
            self.config = replace(
                self.config, update_rank=self._adapters.rank, adapter_scales=self._adapters.scales
            )
            self.n_weight_bytes += self._adapters.n_bytes

    def _open_own_adapters(self, lora: Sequence[LoraAdapter]) -> None:
        """Those of the file itself, which its tokens choose."""
        from ..models.own_adapters import OwnAdapters

        try:
            if lora:
                raise UsageError(
                    f"{self.path} has adapters of its own, which tokens choose, and takes no "
                    "others (--lora)"
                )
            self._own_adapters = OwnAdapters(self._gguf, self.config, self._bindings)
        except BaseException:
            self._gguf.close()
            raise
        self.n_weight_bytes += self._own_adapters.n_bytes

    def __exit__(self, *exception: object) -> None:
        if self._adapters is not None:
            self._adapters.close()
        super().__exit__(*exception)

    @property
    def adapter_fingerprints(self) -> tuple[str, ...]:
        """What tells adapters apart."""
        return () if self._adapters is None else self._adapters.fingerprints

    @property
    def fingerprint(self) -> str:
        """As that of the loaded model."""
        return self.fingerprint_at(self.config.adapter_scales)

    def fingerprint_at(self, adapter_scales: Sequence[float]) -> str:
        """The same of prompts in which the adapters count so much."""
        return with_adapters(super().fingerprint, self.adapter_fingerprints, adapter_scales)

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        """Bytes by purpose that a session of ``shape`` would allocate; nothing is allocated."""
        return estimate_session_bytes(self.config, attention, shape)

    def load(
        self,
        *,
        check_tensors: bool = False,
        on_bytes: OnBytes | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> NativeModel:
        """Packs every tensor for the active instruction set; builds the tokenizer meanwhile.

        One tensor at a time, or 8 MiB of a large one, is held as it is stored, so that the peak
        stays near the packed size. ``check_tensors`` refuses NaN and infinite weights, at the cost
        of one more pass over the data. ``on_bytes(done, total)`` counts bytes of the file.
        ``meanwhile()`` is called once the packing has begun. Matrices that are kept are packed
        before, into their file, and mapped.
        """
        core_model = self._new_core_model()
        self._set_ngram_rows(core_model)
        kept = self._kept_weights(core_model)
        is_mapped = kept is not None and kept.map_or_make(on_bytes)
        tokenizer = self._read_weights(
            core_model,
            check_tensors=check_tensors,
            on_bytes=on_bytes,
            meanwhile=meanwhile,
            bindings=kept.vectors if kept is not None and is_mapped else None,
        )
        if self._adapters is not None:
            self._adapters.add_to(core_model)
        if self._own_adapters is not None:
            add_updates(core_model, self._own_adapters.updates)
        return NativeModel(core_model, self, tokenizer)

    def _set_ngram_rows(self, core_model: _core.Model) -> None:
        """Their table stays in the file, which may be larger than memory."""
        if self.config.ngrams is None:
            return
        assert isinstance(self._gguf, GgufFile)
        info = self._gguf.tensors[TABLE_TENSOR]
        descriptor = self._gguf.source(info).fileno()
        try:
            core_model.set_ngram_rows(descriptor, info.type_name, info.offset, info.rows, info.cols)
        except ValueError as error:
            raise FormatError(f"{self.path}: {error}") from None

    def open_drafting_layer(self) -> DraftingLayerFile:
        """The layer that guesses tokens ahead (MTP), as long as this is open.

        Raises UsageError, with the cure, where the file has none that can draft, and FormatError.
        """
        from ..models.drafting import why_no_drafting_layer
        from .drafting_layer import own_drafting_layer

        if isinstance(self._gguf, GgufFile):
            cause = why_no_drafting_layer(self._gguf)
        else:
            cause = "of safetensors such layers are left out"
        if cause:
            raise UsageError(
                f"{self.path} cannot draft for itself (--draft mtp): {cause}; leave it out, or "
                "name a smaller model of the family with --draft FILE"
            )
        assert isinstance(self._gguf, GgufFile)
        return own_drafting_layer(self._gguf, self.config)

    def leave_on_disk(self, room: int) -> bool:
        """Whether weights beyond ``room`` bytes may stay in the file of packed ones; so be it then.

        They are read whenever they are needed.
        """
        if self._packed_weights == PACKED_OFF or room < self.n_weight_bytes // LEAST_PART:
            return False
        self._weight_room = room
        return True

    def _new_core_model(self) -> _core.Model:
        return _core.Model(core_config(self.config))

    def _kept_weights(self, core_model: _core.Model) -> KeptWeights | None:
        if self._packed_weights == PACKED_OFF:
            return None
        from .packed_weights import KeptWeights

        assert isinstance(self._gguf, GgufFile)
        return KeptWeights(
            self._packed_weights,
            core_model,
            self._new_core_model,
            self._gguf,
            self._bindings,
            self._weight_room,
        )


def can_show_attention(config: DecoderConfig) -> bool:
    """Whether heads' errors can be measured, which is for layers with alike KV heads."""
    return has_equal_kv_heads(config) and config.has_like_layers


class NativeModel(GgufModel):
    """Weights in the layout of one instruction set."""

    writes_rows_later = True  # in small pages; see ``engine.models.may_write_later``

    def __init__(
        self, core_model: _core.Model, file: NativeModelFile, tokenizer: Tokenizer
    ) -> None:
        super().__init__(file, tokenizer)
        self._core_model, self._adapter_fingerprints = core_model, file.adapter_fingerprints
        self._workspaces: WeakValueDictionary[int, _core.Workspace] = WeakValueDictionary()

    @property
    def fingerprint(self) -> str:
        """As that of ``GgufModel``, of the adapters too, as they count where nobody says so."""
        return self.fingerprint_at(self.config.adapter_scales)

    def fingerprint_at(self, adapter_scales: Sequence[float]) -> str:
        """The same of prompts in which the adapters count so much."""
        return with_adapters(super().fingerprint, self._adapter_fingerprints, adapter_scales)

    @property
    def shows_attention(self) -> bool:
        """Whether its heads' errors can be measured."""
        return can_show_attention(self.config)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._core_model.weight_bytes

    @property
    def mapped_weight_bytes(self) -> int:
        """Of these, those that lie in a file (``packed_weights``)."""
        return self._core_model.mapped_bytes

    def load_drafting_layer(self, file: DraftingLayerFile) -> DraftingLayer:
        """What drafts for this model; raises as ``DraftingLayerFile.load``."""
        return file.load(self._core_model)

    def load_lent_layers(self, file: LentLayersFile, threads: int) -> _core.LentReader:
        """What drafts by this model's cache, on so many threads; raises as the others."""
        return _core.LentReader(file.pack(self._core_model), threads)

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """A weight tensor by its name in the file, [rows, cols]."""
        return self._core_model.dequantize(name)

    def output_weights(self, layer: int) -> NDArray[np.float32]:
        """What projects the heads of a layer, [model_dim, n_heads * head_dim]."""
        return self.dequantize(f"blk.{self.config.own_layer(layer)}.attn_output.weight")

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        return estimate_session_bytes(self.config, attention, shape)

    def start_session(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> _core.Sequence:
        policy = attention.make_policy(self.config)
        try:
            # Rows that are looked at after a call must outlast the calls of others.
            workspace = None if shape.all_rows else self._find_workspace(shape.threads)
            return _core.Sequence(
                self._core_model,
                policy,
                workspace=workspace,
                adapter_scales=shape.adapter_scales or None,
                **shape.sizes(),
            )
        except MemoryError:
            raise ResourceError(
                f"the session for {shape.max_context} positions could not be allocated; "
                "use a smaller context (--ctx-size)"
            ) from None

    def check_eviction(self, attention: SparseAttentionConfig, shape: SessionShape) -> None:
        """ValueError, with the cure, where a session of ``shape`` could not evict."""
        policy = attention.make_policy(self.config)
        _core.Sequence.check_eviction(
            core_config(self.config),
            policy,
            max_context=shape.max_context,
            batch_size=shape.batch_size,
            chunk_size=shape.chunk_size,
            cache_type=shape.cache_type,
        )

    def _find_workspace(self, threads: int) -> _core.Workspace:
        """The one that all sequences of so many threads share, as long as one of them lives."""
        workspace = self._workspaces.get(threads)
        if workspace is None:
            workspace = self._workspaces[threads] = _core.Workspace(self._core_model, threads)
        return workspace


def estimate_session_bytes(
    config: DecoderConfig, attention: SparseAttentionConfig, shape: SessionShape
) -> Mapping[str, int]:
    """Bytes by purpose that a session of ``shape`` would allocate; nothing is allocated.

    Raises UsageError for a shape that this model cannot have.
    """
    policy = attention.make_policy(config)
    decoder_config = core_config(config)
    try:
        return _core.Sequence.estimate_bytes(decoder_config, policy, **shape.sizes())
    except ValueError as error:
        raise UsageError(f"the model cannot be run with these options: {error}") from None
