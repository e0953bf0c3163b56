"""Numbers of the GGUF format: value types of the metadata, tensor types and their block sizes.

Source: the GGUF specification (ggml/docs/gguf.md) and the block layouts of ggml.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum


class ValueType(IntEnum):
    """Type tag of a metadata value, as stored in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# How one scalar is stored. BOOL is a byte that must be 0 or 1.
SCALAR_CODES: dict[ValueType, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor type: ``block_size`` values are stored in ``block_bytes`` bytes."""

    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}


def stored_bytes(kind: str, n_values: int) -> int:
    """Bytes of so many values of a type, which are whole blocks."""
    item = next(each for each in TENSOR_TYPES.values() if each.name == kind)
    return n_values // item.block_size * item.block_bytes


# What programs of others mean by ids that ggml has dropped, as it ends an error message.
FOREIGN_TENSOR_TYPES: dict[int, str] = {
    36: "; in files of Microsoft's bitnet.cpp it is I2_S, which runs there alone",
}

# Types of ik_llama.cpp, which ggml does not have; from 200 on rows of others, interleaved.
IK_TENSOR_TYPES: dict[int, str] = {
    133: "Q6_0",
    134: "IQ1_BN",
    135: "IQ2_BN",
    137: "IQ2_K",
    138: "IQ3_K",
    139: "IQ4_K",
    140: "IQ5_K",
    141: "IQ6_K",
    142: "IQ2_TN",
    143: "IQ1_TN",
    144: "IQ4_KS",
    145: "IQ2_KS",
    146: "IQ4_KSS",
    151: "Q8_KV",
    152: "IQ5_KS",
    153: "IQ2_KT",
    154: "IQ3_KT",
    155: "IQ4_KT",
    156: "IQ3_KS",
    157: "IQ2_KL",
    158: "IQ1_KT",
    202: "Q4_0_R8",
    206: "Q5_0_R4",
    208: "Q8_0_R8",
    210: "Q2_K_R4",
    211: "Q3_K_R4",
    212: "Q4_K_R4",
    213: "Q5_K_R4",
    214: "Q6_K_R4",
    216: "IQ2_XXS_R4",
    217: "IQ2_XS_R4",
    218: "IQ3_XXS_R4",
    219: "IQ1_S_R4",
    220: "IQ4_NL_R4",
    221: "IQ3_S_R4",
    222: "IQ2_S_R4",
    223: "IQ4_XS_R8",
    229: "IQ1_M_R4",
    230: "BF16_R16",
    233: "Q6_0_R4",
    335: "IQ2_BN_R4",
    337: "IQ2_K_R4",
    338: "IQ3_K_R4",
    339: "IQ4_K_R4",
    340: "IQ5_K_R4",
    344: "IQ4_KS_R4",
    352: "IQ5_KS_R4",
    353: "MXFP4_R8",
    398: "Q8_KV_R8",
    399: "Q8_K_R8",
}

# Ids that early files used; ggml dropped them and can no longer say what their blocks hold.
REMOVED_TENSOR_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
