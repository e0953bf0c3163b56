"""Files of what drafts for one model and reads what that has computed, not tokens alone.

An assistant of Gemma 4 attends to keys and values that its model has cached: it has none of its
own. EAGLE-3 (Li et al., 2025) reads the residual stream of its model before three of its layers,
and so does DFlash, which makes keys and values of all its layers of that, and guesses a block at
once.
What the core and the runtime know of either stands in its configuration: how it has the row beside
a token (``hidden_join``), which layers lend keys and values, and before which rows are taken.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import FormatError, UsageError
from ..formats.metadata import Metadata, quote
from . import blocks
from .drafting import GUESSED_TOKENS
from .hyperparameters import CAUSAL_KEY, MAX_LAYERS
from .joined import bind_joined
from .keys import ArchitectureKeys
from .reader import make_config
from .refusals import refuse_unread
from .spec import ArchitectureSpec
from .tensors import TensorBinding, tensor
from .windows import SlidingWindows

if TYPE_CHECKING:
    from pathlib import Path

    from ..formats.model_tensors import ModelTensors
    from ..layer_config import LayerConfig
    from ..model_config import DecoderConfig
    from .hyperparameters import Hyperparameters

MAX_WIDTH = 2**20
# Layers of a model whose rows may go together, and tokens of a block, as the core has them.
MOST_TAKEN = 16
MAX_BLOCK = 2**16
_OUTPUT, _IDS = "output.weight", "d2t"

ASSISTANT = ArchitectureSpec(
    name="gemma4-assistant",
    qk_row_order="half_split",
    rope_factors="rope_freqs.weight",
    norm_placement="both",
    qk_norm="head",
    activation="gelu_tanh",
    windows=SlidingWindows(
        is_required=True, has_own_heads=True, rope_base=10000.0, has_plain_rope=True
    ),
    attention_scale=1.0,
    has_output_scale=True,
    # A shorter list of the most likely tokens, which all of them are compared without.
    unused_tensors=("masked_embd_centroids.weight", "masked_embd_ordering"),
    tensors=(
        *(rule for rule in blocks.EMBEDDINGS if rule.name != _OUTPUT),
        tensor(
            "nextn.pre_projection.weight",
            "hidden_pair_dim",
            "model_dim",
            core_name="hidden_proj.weight",
        ),
        tensor(
            "nextn.post_projection.weight", "model_dim", "hidden_dim", core_name="hidden_out.weight"
        ),
        *blocks.PRE_NORMS,
        *blocks.POST_NORMS,
        tensor("blk.{layer}.attn_q.weight", "model_dim", "q_dim", rotated=True),
        *blocks.ATTENTION_OUTPUT,
        tensor("blk.{layer}.attn_q_norm.weight", "head_dim"),
        *blocks.FEED_FORWARD,
        tensor("blk.{layer}.layer_output_scale.weight", "one"),
    ),
)
EAGLE3 = ArchitectureSpec(
    name="eagle3",
    qk_row_order="interleaved",
    rope_factors="rope_freqs.weight",
    activation="silu",
    tensors=(
        tensor("token_embd.weight", "model_dim", "vocab_size", required=False),
        tensor("output_norm.weight", "model_dim"),
        tensor(_OUTPUT, "model_dim", "n_guessed", required=False),
        tensor("fc.weight", "features_dim", "model_dim", core_name="features.weight"),
        tensor("blk.{layer}.attn_norm.weight", "model_dim", core_name="embedding_norm.weight"),
        tensor("blk.{layer}.attn_norm_2.weight", "model_dim", core_name="hidden_norm.weight"),
        tensor("blk.{layer}.attn_q.weight", "hidden_pair_dim", "q_dim", rotated=True),
        tensor("blk.{layer}.attn_k.weight", "hidden_pair_dim", "kv_dim", rotated=True),
        tensor("blk.{layer}.attn_v.weight", "hidden_pair_dim", "kv_dim"),
        *blocks.ATTENTION_OUTPUT,
        tensor("blk.{layer}.ffn_norm.weight", "model_dim"),
        *blocks.FEED_FORWARD,
    ),
)
DFLASH = ArchitectureSpec(
    name="dflash",
    qk_row_order="half_split",
    rope_factors="rope_freqs.weight",
    qk_norm="head",
    activation="silu",
    windows=SlidingWindows(),
    scales={"embedding_scale": "embedding_scale"},
    tensors=(
        tensor("token_embd.weight", "model_dim", "vocab_size", required=False),
        tensor("output_norm.weight", "model_dim"),
        tensor(_OUTPUT, "model_dim", "n_guessed", required=False),
        tensor("fc.weight", "features_dim", "model_dim", core_name="features.weight"),
        tensor("enc.output_norm.weight", "model_dim", core_name="hidden_norm.weight"),
        *blocks.PRE_NORMS,
        *blocks.ATTENTION,
        *blocks.HEAD_NORMS,
        *blocks.FEED_FORWARD,
    ),
)
MASK_KEY = "tokenizer.ggml.mask_token_id"
# Keys of kinds of DFlash that are computed in other ways, and the values that say "not here".
_OTHER_KINDS = {
    "attention.scale": 0.0,
    "attention.value_scale": 0.0,
    "hyper_connection.count": 0,
    "selector_rank": 0,
}
_FEATURES_NORM = tensor("enc.output_norm.weight", "features_dim", core_name="features_norm.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """What drafts for one model, as read from its file.

    ``hidden_layers`` are those of the model before which it reads the residual stream, none where
    it reads what logits are made of. ``guessed`` are the tokens that its logits are of, in their
    order; None: the first. With a ``block_size`` that is not 0 it guesses so many tokens at the
    most together, the first of which is the text's latest, and the others ``mask_token``.
    """

    config: DecoderConfig
    bindings: list[TensorBinding]
    hidden_layers: tuple[int, ...] = ()
    guessed: array[int] | None = None
    block_size: int = 0
    mask_token: int = 0

    @property
    def reads_cache(self) -> bool:
        """Whether it attends to what its model has cached, and keeps nothing."""
        return self.config.layers[0].are_lent


def is_drafter(metadata: Metadata) -> bool:
    """Whether a file holds what drafts for one model."""
    return metadata.get("general.architecture") in _READERS


def read_drafter(gguf: ModelTensors, main: DecoderConfig) -> Drafter:
    """What drafts for a model of the configuration ``main``, whose tokens are those of the file.

    Raises FormatError that names a key or tensor, and UsageError for the drafter of another model.
    """
    try:
        return _READERS[gguf.metadata.get_str("general.architecture")](gguf, main)
    except FormatError as error:
        raise FormatError(f"{gguf.path}: {error}") from None


def _require(path: Path, what: str, own: int, of_main: int) -> None:
    if own != of_main:
        raise _of_another(path, f"its {what} {own}, the model has {of_main}")


def _of_another(path: Path, cause: str) -> UsageError:
    return UsageError(
        f"{path} drafts for another model (--draft): {cause}; name the one that was made for this "
        "model, or leave --draft out"
    )


def _require_model(path: Path, shape: Hyperparameters, width: int, main: DecoderConfig) -> None:
    _require(path, "hidden rows have a width of", width, main.model_dim)
    _require(path, "vocabulary has so many tokens:", shape.vocab_size, main.vocab_size)
    if main.has_streams or main.n_streams or main.passes:
        raise UsageError(
            f"{path} cannot draft for this model (--draft), which has several residual streams or "
            "goes through its layers several times; leave --draft out"
        )


def _read_assistant(gguf: ModelTensors, main: DecoderConfig) -> Drafter:
    spec = ASSISTANT
    shape = spec.read_shape(gguf.metadata)
    keys = ArchitectureKeys(gguf.metadata, spec.name, len(shape.layers))
    width = keys.integer("embedding_length_out", maximum=MAX_WIDTH)
    _require_model(gguf.path, shape, width, main)
    layers = tuple(_lend(gguf.path, i, layer, shape, main) for i, layer in enumerate(shape.layers))
    shape = replace(shape, layers=layers, hidden_dim=width)
    config = replace(
        make_config(gguf, spec, shape),
        reads_hidden=True,
        hidden_join="plain",
        hidden_dim=width,
        embedding_scale=main.embedding_scale,
    )
    return Drafter(config=config, bindings=_bind(gguf, spec, shape))


def _lend(
    path: Path, index: int, layer: LayerConfig, shape: Hyperparameters, main: DecoderConfig
) -> LayerConfig:
    """The layer, which reads keys and values of the model's last layer of its kind."""
    kind = "with a window" if layer.window else "without a window"
    alike = [
        i
        for i, each in enumerate(main.layers)
        if each.mixer == "attention" and (each.window > 0) == (layer.window > 0)
    ]
    if not alike or main.latent is not None:
        raise _of_another(path, f"it reads a layer {kind}, of which the model has none")
    lender = alike[-1]
    other = main.layers[lender]
    _require(path, f"window in layer {index} is", layer.window, other.window)
    _require(path, f"KV heads in layer {index} are", layer.n_kv_heads, other.n_kv_heads)
    own_dim = layer.head_dim or shape.head_dim
    _require(path, f"head size in layer {index} is", own_dim, main.head_dim_of(other))
    return replace(layer, are_lent=True, lender=lender)


def _read_eagle3(gguf: ModelTensors, main: DecoderConfig) -> Drafter:
    spec = EAGLE3
    shape = spec.read_shape(gguf.metadata)
    keys = ArchitectureKeys(gguf.metadata, spec.name, len(shape.layers))
    if len(shape.layers) != 1:
        raise FormatError(f"{keys.quoted('block_count')} is {len(shape.layers)}, but must be 1")
    width = keys.integer("target_hidden_size", maximum=MAX_WIDTH)
    norms_features = gguf.metadata.get_bool(keys.full("norm_before_fc"), default=False)
    shape = replace(shape, layers=(replace(shape.layers[0], has_mixer_norm=False),))
    if norms_features:
        spec = replace(spec, tensors=(*spec.tensors, _FEATURES_NORM))
    drafter = _read_encoding(gguf, spec, keys, shape, width, main)
    config = replace(
        drafter.config,
        hidden_join="apart",
        norms_features=norms_features,
        residual_is_normed=gguf.metadata.get_bool(keys.full("norm_before_residual"), default=False),
    )
    return replace(drafter, config=config)


def _read_dflash(gguf: ModelTensors, main: DecoderConfig) -> Drafter:
    spec = DFLASH
    causal_key = f"{spec.name}.{CAUSAL_KEY}"  # of blocks, not of the tokens before
    values = {key: gguf.metadata.stored(key) for key in gguf.metadata if key != causal_key}
    shape = spec.read_shape(Metadata({key: value for key, value in values.items() if value}))
    keys = ArchitectureKeys(gguf.metadata, spec.name, len(shape.layers))
    for name, neutral in _OTHER_KINDS.items():
        if gguf.metadata.get(keys.full(name), neutral) != neutral:
            raise FormatError(
                f"{keys.quoted(name)} is of a kind of DFlash that is not supported; leave --draft "
                "out"
            )
    if gguf.metadata.get_bool(causal_key, default=False):
        raise FormatError(
            f"{keys.quoted(CAUSAL_KEY)} is true, which is not supported: tokens of a block "
            "see each other"
        )
    drafter = _read_encoding(gguf, spec, keys, shape, shape.model_dim, main)
    scale = f"{spec.name}.embedding_scale"
    return replace(
        drafter,
        config=replace(
            drafter.config,
            hidden_join="cached",
            embedding_scale=gguf.metadata.get_float(scale, default=1.0, above=0.0, below=1e6),
            tied_embeddings=_OUTPUT not in gguf.tensors,
        ),
        block_size=keys.integer("block_size", minimum=2, maximum=MAX_BLOCK, default=16),
        mask_token=gguf.metadata.get_int(MASK_KEY, minimum=0, maximum=shape.vocab_size - 1),
    )


def _read_encoding(
    gguf: ModelTensors,
    spec: ArchitectureSpec,
    keys: ArchitectureKeys,
    shape: Hyperparameters,
    width: int,
    main: DecoderConfig,
) -> Drafter:
    """What encodes rows of the model, so wide, before layers that its file names."""
    refuse_unread(gguf.metadata, spec.name, spec.scales.values())
    _require_model(gguf.path, shape, width, main)
    taken = _read_taken(gguf.path, keys, main)
    guessed = _read_guessed(gguf, shape.vocab_size)
    shape = replace(
        shape,
        features_dim=len(taken) * width,
        n_guessed=len(guessed) if guessed is not None else shape.vocab_size,
    )
    has_output, has_embedding = (name in gguf.tensors for name in (_OUTPUT, "token_embd.weight"))
    if guessed is not None and not has_output:
        raise FormatError(f"tensor {quote(_IDS)} names tokens, but {quote(_OUTPUT)} is missing")
    if not (has_output and has_embedding):
        _require(gguf.path, "width is", shape.model_dim, main.model_dim)
    shares_output = not has_output and not (has_embedding and spec is DFLASH)
    n_guessed = min(GUESSED_TOKENS, shape.vocab_size) if shares_output else shape.n_guessed
    config = replace(
        make_config(gguf, spec, shape),
        reads_hidden=True,
        n_guessed=n_guessed if n_guessed < shape.vocab_size else 0,
        features_dim=shape.features_dim,
    )
    return Drafter(
        config=config, bindings=_bind(gguf, spec, shape), hidden_layers=taken, guessed=guessed
    )


def _read_taken(path: Path, keys: ArchitectureKeys, main: DecoderConfig) -> tuple[int, ...]:
    """The layers of the model before which rows are taken."""
    name = "target_layers"
    array = keys.metadata.get_array(keys.full(name), kinds="iu")
    taken = tuple(int(number) for number in array.tolist())
    if not 0 < len(taken) <= MOST_TAKEN or min(taken) < 0 or max(taken) >= MAX_LAYERS:
        raise FormatError(f"{keys.quoted(name)} must name 1 to {MOST_TAKEN} layers, got {taken}")
    if list(taken) != sorted({*taken}):
        raise FormatError(f"{keys.quoted(name)} must name layers in their order, got {taken}")
    if taken[-1] >= main.n_layers:
        cause = (
            f"it reads what comes before layer {taken[-1]}, the model has {main.n_layers} layers"
        )
        raise _of_another(path, cause)
    return taken


def _read_guessed(gguf: ModelTensors, vocab_size: int) -> array[int] | None:
    """The tokens that logits are of, by the tensor that maps them."""
    info = gguf.tensors.get(_IDS)
    if info is None:
        return None
    if info.type_name != "I64" or len(info.shape) != 1:
        raise FormatError(
            f"tensor {quote(_IDS)} is of type {info.type_name} and shape {list(info.shape)}, but "
            "must be a vector of I64"
        )
    ids = array("q", bytes(gguf.tensor_bytes(info)))
    if not ids or min(ids) < 0 or max(ids) >= vocab_size or len({*ids}) != len(ids):
        raise FormatError(
            f"tensor {quote(_IDS)} must name different tokens of 0 to {vocab_size - 1}; the file "
            "is damaged"
        )
    return array("i", ids)


def _bind(
    gguf: ModelTensors, spec: ArchitectureSpec, shape: Hyperparameters
) -> list[TensorBinding]:
    return bind_joined(
        gguf.tensors,
        spec.tensors,
        shape,
        architecture=spec.name,
        interleaved=spec.qk_row_order == "interleaved",
        read_elsewhere=[str(spec.rope_factors), *spec.unused_tensors, _IDS],
    )


_READERS: dict[str, Callable[[ModelTensors, DecoderConfig], Drafter]] = {
    ASSISTANT.name: _read_assistant,
    EAGLE3.name: _read_eagle3,
    DFLASH.name: _read_dflash,
}
