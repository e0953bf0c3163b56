"""What files of an architecture hold: a declarative table, by which ``reader`` reads them.

A family is an ``ArchitectureSpec`` passed to ``register_architecture``: no code, only the names
of its tensors, the sizes of their dimensions and a few flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ..errors import FormatError
from ..formats.metadata import Metadata, quote
from . import blocks
from .experts import ExpertRule
from .families import import_families, import_family
from .hybrids import HybridRule
from .hyperparameters import Hyperparameters, read_hyperparameters
from .latent import LatentRule
from .latent_tensors import ALL_TENSORS, latent_tensors
from .ranking import RankRule
from .rope import PLAIN_ROPE, RopeRule
from .streams import StreamRule
from .tensors import TensorRule, tensors_of
from .windows import SlidingWindows
from .xielu import with_xielu


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthScales:
    """Scales of a family without keys for them (MiniCPM 3).

    Embeddings are multiplied by ``embedding``, what a branch adds by ``depth / sqrt(n_layers)``,
    and logits by ``base_width / model_dim``.
    """

    embedding: float
    depth: float
    base_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureSpec:
    """How files of one ``general.architecture`` are read.

    Attributes:
        qk_row_order: how pairs of rotated rows lie in the file.
        has_norm_weights, has_parallel_norm: see ``DecoderConfig``.
        parallel_switch: key, after the architecture's name, that files say ``is_parallel`` by.
        fused_tensors: the tensors of files whose Q, K and V are one matrix, if others have three.
        unused_tensors: those that files may have and nothing is computed with.
        norm_placement, is_parallel, qk_norm, qk_norm_after_rope, activation: see ``DecoderConfig``.
        has_optional_qk_norm: files may lack the norms of queries and keys.
        has_optional_second_norm: they may have a second norm behind attention.
        has_any_network: tensors of the first layer say what their networks are, which have a GELU
            (gate and up are two matrices or one, or there is no gate), and which norms there are.
        max_alibi_bias: see ``DecoderConfig``; of the model with ``alibi_depth`` layers alone, which
            has no rotary embedding then, if that is not None.
        alibi_key: whether files say it by a key, which is "required" or "optional", or have the
            above ("none").
        has_optional_first_norm: they may lack the norm of the first mixer's input.
        named_activations: what ``activation`` is by the key of it, if files have that.
        norms_rotated: see ``DecoderConfig``; not so the model with ``n_unnormed_experts`` experts,
            as no key says.
        is_causal: see ``DecoderConfig``.
        norm: "rms" norms, also with biases ("biased_rms"), or "layer" norms, which may have some.
        rope: which layers have a rotary embedding, and what else files say of it.
        rope_factors: optional tensor of frequency divisors.
        long_rope_factors: optional tensors of frequency divisors for sessions within the original
            context and beyond it.
        rope_switch: key, after the architecture's name, that turns the rotary embedding off if it
            is false.
        windows: None: the family has no sliding windows.
        hybrid: None: every layer has attention.
        latent: None: attention is not of the latent kind; else its tensors are not in ``tensors``.
        experts: None: the feed-forward network is one, not a mixture of experts.
        scales: keys that set a scale or soft cap of ``DecoderConfig``.
        divisors: keys whose inverse is a scale of ``DecoderConfig``.
        required_scales: those of both that a file must have.
        default_soft_caps: soft caps of files without the key.
        scales_embedding_by_width: embeddings are multiplied by ``sqrt(model_dim)``.
        depth_scales: scales that follow from width and depth, which files do not say; None: none.
        attention_scale: factor of attention logits; None: one over the root of the head size.
        scales_by_head_dim: it is one over the head size.
        norms_embeddings, has_embedding_norm, has_output_norm, post_norm_eps, norms_values,
            has_output_scale: see ``DecoderConfig``.
        has_sub_norms, has_head_gains, output_gate, head_gate: see there too.
        has_sinks: all heads have sinks, or, if it is "optional", those of layers whose tensors say
            so.
        has_other_values: values of heads may differ in size from their keys.
        shares_kv: the last layers may read the keys and values of others.
        has_token_inputs: layers may have inputs of their own per token.
        streams: None: every token has one residual stream.
        mixes_streams: every token has several, which are mixed before every branch, and n-grams may
            be looked up for them.
        scores_blocks: layers with attention may have an indexer that scores blocks of tokens.
        chooses_by_head: layers with experts have one that chooses blocks for every KV head.
        chooses_adapters: files have adapters, which tokens choose.
        has_drafting_layers: files may have layers behind the last that guess tokens ahead. Nothing
            that they compute goes into the answer.
        can_draft: where there is one such layer, with attention, it may do so; else they are left
            out.
        drafts_as_first: it is as the first layer, with one network, as no key says; else as the
            last one that attends.
        has_token_types: files may have vectors for types of tokens, of which the first is taken.
        ranking: how files rank documents that have the matrices for it; None: they have none.
        has_dense_modules: files may have matrices that vectors are multiplied with.
        has_position_table: positions are rows of a table, added to embeddings, or may be
            ("optional").
        has_joint_width: files give the widths of gate and up together as that of the network.
        has_loops: files may say that their layers are gone through several times.
        has_two_stacks: there are two stacks of layers, with a state each, which are gone through by
            cycles (HRM).
        n_layers_scaled_by_width: the model of the family with so many layers divides attention
            logits by ``sqrt(model_dim / n_heads)``, not by the root of the head size.
    """

    name: str
    tensors: tuple[TensorRule, ...]
    qk_row_order: Literal["interleaved", "half_split"]
    activation: str
    norm: Literal["rms", "biased_rms", "layer"] = "rms"
    norm_placement: Literal["pre", "post", "both", "sum", "none"] = "pre"
    is_causal: bool = True
    has_norm_weights: bool = True
    is_parallel: bool = False
    has_parallel_norm: bool = False
    parallel_switch: str | None = None
    fused_tensors: tuple[TensorRule, ...] = ()
    unused_tensors: tuple[str, ...] = ()
    qk_norm: Literal["none", "head", "own_head", "projection", "layer"] = "none"
    qk_norm_after_rope: bool = False
    has_optional_qk_norm: bool = False
    has_optional_second_norm: bool = False
    has_any_network: bool = False
    max_alibi_bias: float = 0.0
    alibi_depth: int | None = None
    alibi_key: Literal["none", "optional", "required"] = "none"
    has_optional_first_norm: bool = False
    norms_rotated: bool = False
    n_unnormed_experts: int | None = None
    rope: RopeRule = PLAIN_ROPE
    rope_factors: str | None = None
    long_rope_factors: tuple[str, str] | None = None
    rope_switch: str | None = None
    windows: SlidingWindows | None = None
    hybrid: HybridRule | None = None
    latent: LatentRule | None = None
    experts: ExpertRule | None = None
    scales: Mapping[str, str] = field(default_factory=dict)
    divisors: Mapping[str, str] = field(default_factory=dict)
    required_scales: tuple[str, ...] = ()
    default_soft_caps: Mapping[str, float] = field(default_factory=dict)
    scales_embedding_by_width: bool = False
    norms_embeddings: bool = False
    has_embedding_norm: bool = False
    has_output_norm: bool = True
    has_token_types: bool = False
    post_norm_eps: float = 0.0
    depth_scales: DepthScales | None = None
    attention_scale: float | None = None
    scales_by_head_dim: bool = False
    norms_values: bool = False
    has_sinks: bool | Literal["optional"] = False
    has_other_values: bool = False
    has_output_scale: bool = False
    has_sub_norms: bool = False
    has_head_gains: bool = False
    output_gate: Literal["none", "of_queries", "per_output", "per_head"] = "none"
    head_gate: Literal["sigmoid", "softplus"] = "sigmoid"
    shares_kv: bool = False
    has_token_inputs: bool = False
    streams: StreamRule | None = None
    mixes_streams: bool = False
    scores_blocks: bool = False
    chooses_by_head: bool = False
    chooses_adapters: bool = False
    has_drafting_layers: bool = False
    can_draft: bool = False
    drafts_as_first: bool = False
    ranking: RankRule | None = None
    has_dense_modules: bool = False
    has_position_table: bool | Literal["optional"] = False
    has_joint_width: bool = False
    has_loops: bool = False
    has_two_stacks: bool = False
    named_activations: Mapping[str, str] = field(default_factory=dict)
    n_layers_scaled_by_width: int | None = None

    @property
    def all_tensors(self) -> tuple[TensorRule, ...]:
        """Those of all files together."""
        latent = ALL_TENSORS if self.latent is not None else ()
        networks = blocks.FEED_FORWARD if self.has_any_network else ()
        return (*self.tensors, *self.fused_tensors, *latent, *networks)

    def read_shape(self, metadata: Metadata) -> Hyperparameters:
        """The hyperparameters of a file. Raises ``FormatError`` that names the key."""
        shape = read_hyperparameters(
            metadata,
            self.name,
            self.windows,
            experts=self.experts,
            rope=self.rope,
            shares_kv=self.shares_kv,
            has_token_inputs=self.has_token_inputs,
            streams=self.streams,
            mixes_streams=self.mixes_streams,
            scores_blocks=self.scores_blocks,
            chooses_by_head=self.chooses_by_head,
            hybrid=self.hybrid,
            has_drafting_layers=self.has_drafting_layers,
            latent=self.latent,
            has_layer_norm=self.norm == "layer",
            has_joint_width=self.has_joint_width,
            has_loops=self.has_loops,
            has_two_stacks=self.has_two_stacks,
            is_causal=self.is_causal,
            has_token_types=self.has_token_types,
            has_other_values=self.has_other_values,
        )
        if self.alibi_depth == len(shape.layers):
            layers = tuple(replace(layer, has_rope=False) for layer in shape.layers)
            shape = replace(shape, layers=layers)
        if self.activation != "xielu":
            return shape
        return replace(shape, layers=with_xielu(metadata, shape.layers))

    def rules(self, shape: Hyperparameters, *, is_fused: bool = False) -> tuple[TensorRule, ...]:
        """The tensors of files of this shape, whose Q, K and V may be one matrix."""
        tensors = self.fused_tensors if is_fused and self.fused_tensors else self.tensors
        latent = latent_tensors(shape.latent) if shape.latent else ()
        if self.hybrid is not None:
            latent = tensors_of("attention", latent)
        return tensors + latent


_ARCHITECTURES: dict[str, ArchitectureSpec] = {}
# Of files that hold no model to write texts with, or one of another program's own: what they are.
_OTHERS = {
    name: what
    for names, what in (
        ("bitnet-25 bitnet-b1.58", "it is of Microsoft's bitnet.cpp, which runs its files"),
        (
            "clip",
            "it reads images or sound for a language model (mmproj); give the file of that model, "
            "which reads texts without it",
        ),
        (
            "gemma4-assistant eagle3 dflash",
            "it drafts for one other model, which is run with --draft and this file",
        ),
        ("controlvector", "it is a control vector, which is not applied; give a model"),
        (
            "t5encoder",
            "its attention has a bias by distance that is learnt; for vectors of texts give such "
            "as bge-m3, jina-embeddings-v3 or Qwen3-Embedding",
        ),
    )
    for name in names.split()
}


def register_architecture(spec: ArchitectureSpec) -> ArchitectureSpec:
    """Lets ``read_model`` accept files of this architecture. Raises ValueError for a known name."""
    if spec.name in _ARCHITECTURES:
        raise ValueError(f"architecture {spec.name!r} is registered already")
    _ARCHITECTURES[spec.name] = spec
    return spec


def registered_architectures() -> tuple[str, ...]:
    """Names of the architectures that can be read, sorted."""
    import_families()
    return tuple(sorted(_ARCHITECTURES))


def find_architecture(name: str) -> ArchitectureSpec:
    """The table of an architecture. Raises ``FormatError`` for one that is not registered."""
    if name not in _ARCHITECTURES:
        import_family(name)
    spec = _ARCHITECTURES.get(name)
    if spec is None and name in _OTHERS:
        raise FormatError(
            f"architecture {quote(name)} (metadata key 'general.architecture') is not supported; "
            f"{_OTHERS[name]}"
        )
    if spec is None:
        from difflib import get_close_matches  # here, because models that run do not need it

        known = registered_architectures()
        common = [each for each in ("llama", "qwen3", "gemma3") if each in known]
        shown = get_close_matches(name, known, n=3) or common
        raise FormatError(
            f"architecture {quote(name)} (metadata key 'general.architecture') is not supported; "
            f"supported: {', '.join(shown)} and {len(known) - len(shown)} more, which "
            "docs/models.md lists"
        )
    return spec
