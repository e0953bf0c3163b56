"""Reads and checks the hyperparameters of a decoder from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import FormatError
from ..formats.metadata import Metadata, quote

TOKENS_KEY = "tokenizer.ggml.tokens"
DEFAULT_FREQ_BASE = 10000.0

MAX_LAYERS = 512
MAX_WIDTH = 2**20
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**13
MAX_VOCAB = 2**24
MAX_CONTEXT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Shape of a decoder and the numbers that its RoPE frequencies are made of."""

    n_layers: int
    model_dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary_dim: int
    ffn_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_base: float
    rope_linear_factor: float
    rope_attention_factor: float

    @property
    def sizes(self) -> Mapping[str, int]:
        """Named sizes that tensor shapes are declared in."""
        return {
            "model_dim": self.model_dim,
            "ffn_dim": self.ffn_dim,
            "vocab_size": self.vocab_size,
            "head_dim": self.head_dim,
            "q_dim": self.n_heads * self.head_dim,
            "kv_dim": self.n_kv_heads * self.head_dim,
        }


def read_hyperparameters(metadata: Metadata, architecture: str) -> Hyperparameters:
    """Read ``<architecture>.*`` keys. Raises ``FormatError`` that names the key and its range."""
    n_layers = metadata.get_int(f"{architecture}.block_count", minimum=1, maximum=MAX_LAYERS)
    keys = _Keys(metadata, architecture, n_layers)
    keys.refuse_unsupported()

    model_dim = keys.integer("embedding_length", maximum=MAX_WIDTH)
    n_heads = keys.integer("attention.head_count", maximum=MAX_HEADS)
    n_kv_heads = keys.integer("attention.head_count_kv", maximum=MAX_HEADS, default=n_heads)
    if n_heads % n_kv_heads:
        raise FormatError(
            f"{keys.quoted('attention.head_count')} is {n_heads}, which is not a multiple of "
            f"{keys.quoted('attention.head_count_kv')} {n_kv_heads}"
        )
    head_dim = _read_head_dim(keys, model_dim, n_heads)
    rotary_dim = keys.integer("rope.dimension_count", maximum=MAX_HEAD_DIM, default=head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise FormatError(
            f"{keys.quoted('rope.dimension_count')} is {rotary_dim}, but must be even and at most "
            f"the head size {head_dim}"
        )
    return Hyperparameters(
        n_layers=n_layers,
        model_dim=model_dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        ffn_dim=keys.integer("feed_forward_length", maximum=MAX_WIDTH),
        vocab_size=_read_vocab_size(keys),
        context_length=keys.integer("context_length", maximum=MAX_CONTEXT),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", above=0.0, below=1.0),
        rope_base=keys.number("rope.freq_base", above=1.0, below=1e15, default=DEFAULT_FREQ_BASE),
        rope_linear_factor=_read_linear_factor(keys),
        rope_attention_factor=keys.number(
            "rope.scaling.attn_factor", above=0.0, below=1e3, default=1.0
        ),
    )


class _Keys:
    """Metadata read by the part of the key after the architecture's name."""

    __slots__ = ("architecture", "metadata", "n_layers")

    def __init__(self, metadata: Metadata, architecture: str, n_layers: int) -> None:
        self.metadata = metadata
        self.architecture = architecture
        self.n_layers = n_layers

    def full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def quoted(self, key: str) -> str:
        return f"metadata key {quote(self.full(key))}"

    def has(self, key: str) -> bool:
        return self.full(key) in self.metadata

    def integer(self, key: str, *, maximum: int, default: int | None = None) -> int:
        """An integer above 0; an array of one per layer counts if all layers agree."""
        name = self.full(key)
        metadata = self.metadata
        value = metadata.get(name, 0)
        if not isinstance(value, (int, float, str, tuple)) and len(value) == self.n_layers:
            if (value != value[0]).any():
                raise FormatError(
                    f"{self.quoted(key)} differs from layer to layer; "
                    "only models whose layers are all alike are supported"
                )
            metadata = Metadata({name: value[0].item()})
        return metadata.get_int(name, default=default, minimum=1, maximum=maximum)

    def number(
        self, key: str, *, above: float, below: float, default: float | None = None
    ) -> float:
        return self.metadata.get_float(self.full(key), default=default, above=above, below=below)

    def refuse_unsupported(self) -> None:
        """Features that would be computed wrongly if their keys were ignored."""
        n_experts = self.metadata.get_int(self.full("expert_count"), default=0)
        if n_experts:
            raise FormatError(
                f"{self.quoted('expert_count')} is {n_experts}: mixture-of-experts models are not "
                "supported; use a dense model"
            )
        if not self.metadata.get_bool(self.full("attention.causal"), default=True):
            raise FormatError(
                f"{self.quoted('attention.causal')} is false: this is an encoder, "
                "which cannot generate text; use a decoder model"
            )


def _read_head_dim(keys: _Keys, model_dim: int, n_heads: int) -> int:
    if not keys.has("attention.key_length") and model_dim % n_heads:
        raise FormatError(
            f"{keys.quoted('embedding_length')} is {model_dim}, which does not divide by "
            f"{keys.quoted('attention.head_count')} {n_heads}, and "
            f"{keys.quoted('attention.key_length')} is missing"
        )
    head_dim = keys.integer(
        "attention.key_length", maximum=MAX_HEAD_DIM, default=model_dim // n_heads
    )
    value_dim = keys.integer("attention.value_length", maximum=MAX_HEAD_DIM, default=head_dim)
    if value_dim != head_dim:
        raise FormatError(
            f"{keys.quoted('attention.value_length')} is {value_dim}, but heads whose values "
            f"differ in size from their keys ({head_dim}) are not supported"
        )
    if head_dim % 2:
        raise FormatError(
            f"the head size {head_dim} ({keys.quoted('attention.key_length')} or embedding_length "
            "/ head_count) must be even"
        )
    return head_dim


def _read_vocab_size(keys: _Keys) -> int:
    """The number of tokens; ``<architecture>.vocab_size`` is for files without a tokenizer."""
    if TOKENS_KEY not in keys.metadata:
        return keys.integer("vocab_size", maximum=MAX_VOCAB)
    n_tokens = len(keys.metadata.get_strings(TOKENS_KEY))
    if not n_tokens:
        raise FormatError(f"metadata key {TOKENS_KEY!r} is empty; the model has no vocabulary")
    return n_tokens


def _read_linear_factor(keys: _Keys) -> float:
    """Divisor of all RoPE frequencies. Older files call it ``rope.scale_linear``; 0 means none."""
    kind = keys.metadata.get_str(keys.full("rope.scaling.type"), default="linear")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise FormatError(
            f"{keys.quoted('rope.scaling.type')} is {quote(kind)}, which is not supported; "
            "only 'none', 'linear' and the rope_freqs.weight table are"
        )
    key = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    factor = keys.metadata.get_float(keys.full(key), default=0.0)
    return keys.number(key, above=1e-3, below=1e6) if factor else 1.0
