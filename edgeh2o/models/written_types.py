"""Which type each tensor of a model gets that is quantised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import FormatError
from ..formats.gguf_types import TENSOR_TYPES, TensorType

_TYPES: Mapping[str, TensorType] = {item.name: item for item in TENSOR_TYPES.values()}
# Names of whole models, and the type of most of their matrices.
_MIXTURES = {"q4_k_s": "Q4_K", "q4_k_m": "Q4_K", "q5_k_s": "Q5_K", "q5_k_m": "Q5_K"}
# general.file_type, which other programs show.
FILE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q6_k": 18, "q5_k": 16, "q5_1": 9, "q5_0": 8,
    "q4_k": 14, "q4_1": 3, "q4_0": 2, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17,
}  # fmt: skip
# For rows that are no whole blocks of 256.
_OF_SHORT_ROWS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# Parts of names.
_KEPT = (
    *(".ffn_gate_inp", "altup_", ".laurel_", "position_embd."),
    *(".indexer.q_proj", ".indexer.k_proj"),
    *(f".time_mix_{name}{i}." for name in (*"wavg", "decay_w") for i in (1, 2)),
)
_LARGE_ENOUGH = ("F32", "F16", "BF16", "Q8_0")


def is_kept(name: str) -> bool:
    """Whether a matrix of that name stays as it is: it is small, its errors are not."""
    return any(part in name for part in _KEPT)


def choose_type(
    name: str, shape: Sequence[int], target: str, *, n_layers: int, is_tied: bool
) -> str:
    """The type of a tensor of that name and shape (contiguous dimension first).

    ``target`` is one of ``config.QUANTISED_TYPES``. Vectors and what ``is_kept`` stay F32. The
    output matrix, or the embedding where it is that too, gets Q6_K at least, as in llama-quantize;
    the ``_m`` mixtures give it to half of the values' and down matrices as well. Rows that are no
    whole blocks get a type that is a little larger. Raises FormatError if there is none.
    """
    if not name.endswith(".weight") or len(shape) < 2 or is_kept(name):
        return "F32"
    kind = _MIXTURES.get(target, target.upper())
    is_output = name == "output.weight" or (is_tied and name == "token_embd.weight")
    gets_more = is_output or (target.endswith("_m") and _gets_more_bits(name, n_layers))
    if gets_more and kind not in _LARGE_ENOUGH:
        kind = "Q6_K"
    while shape[0] % _TYPES[kind].block_size:
        if kind not in _OF_SHORT_ROWS:
            raise FormatError(
                f"tensor {name!r} has rows of {shape[0]} values, which are no whole blocks of "
                f"{kind}; quantise to f16 or bf16"
            )
        kind = _OF_SHORT_ROWS[kind]
    return kind


def _gets_more_bits(name: str, n_layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    if not name.startswith("blk.") or not any(
        part in name for part in (".attn_v.", ".attn_qkv.", ".ffn_down")
    ):
        return False
    layer, eighth = int(name.split(".")[1]), n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
