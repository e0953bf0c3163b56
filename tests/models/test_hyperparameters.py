"""Hyperparameters that are missing, of the wrong type, out of range or contradictory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from edgeh2o.errors import FormatError
from tests.formats import raw_gguf as raw
from tests.models.llama_file import (
    N_KV_HEADS,
    VOCAB,
    Change,
    array,
    boolean,
    float32,
    int64,
    read,
    string,
    uint32,
)


def key_change(name: str, value: tuple[int, bytes] | None) -> Change:
    return Change({name if "." in name and name.startswith("general") else f"llama.{name}": value})


NAN, INFINITY = float32(math.nan), float32(math.inf)
DIFFERENT = array(raw.UINT32, [N_KV_HEADS, 1])

WRONG_KEYS = [
    ("general.architecture", None, "'general.architecture' .*missing"),
    ("general.architecture", uint32(1), "'general.architecture' is an integer, but must be a str"),
    ("general.architecture", string("xyz\x1b[2J"), r"'xyz\\x1b\[2J'.*supported: .*llama"),
    ("general.architecture", string("bitnet-b1.58"), r"'bitnet-b1\.58'.*Microsoft's bitnet\.cpp"),
    ("general.architecture", string("clip"), r"'clip'.*images or sound .* \(mmproj\); give the f"),
    (
        "general.architecture",
        string("t5encoder"),
        "a bias by distance that is learnt; for vectors of texts give such as bge-m3",
    ),
    ("general.architecture", string("controlvector"), "it is a control vector, which is not appl"),
    ("general.type", string("imatrix"), r"an importance matrix \(imatrix\) and no model; give"),
    ("general.architecture", string("LLAMA"), "'LLAMA'.*not supported"),
    ("block_count", None, "'llama.block_count' .*missing"),
    ("block_count", float32(2.0), "'llama.block_count' is a float, but must be an integer"),
    ("block_count", boolean(True), "is a boolean, but must be an integer"),
    ("block_count", array(raw.UINT32, [2]), "is an array of 1 uint32 values, but must be an int"),
    ("block_count", uint32(0), "'llama.block_count' is 0, but must be from 1 to 512"),
    ("block_count", uint32(513), "is 513, but must be from 1 to 512"),
    ("block_count", uint32(2**31), "is 2147483648"),
    ("block_count", int64(-2), "is -2"),
    ("block_count", uint32(3), "9 tensors of architecture 'llama' missing: 'blk.2.attn_norm"),
    ("block_count", uint32(1), "9 tensors that architecture 'llama' with 1 layers does not use"),
    ("context_length", None, "context_length.*missing"),
    ("context_length", uint32(0), "context_length' is 0"),
    ("context_length", uint32(2**31), "context_length' is 2147483648"),
    ("embedding_length", None, "embedding_length.*missing"),
    ("embedding_length", uint32(0), "embedding_length' is 0"),
    ("embedding_length", uint32(2**31), "embedding_length' is 2147483648"),
    ("embedding_length", uint32(18), "embedding_length' is 18, which does not divide"),
    ("embedding_length", array(raw.UINT32, [16, 18]), "embedding_length' differs from layer to l"),
    ("embedding_length", uint32(24), "has shape .*, but the hyperparameters make it"),
    ("feed_forward_length", None, "feed_forward_length.*missing"),
    ("feed_forward_length", uint32(0), "feed_forward_length' is 0"),
    ("feed_forward_length", array(raw.UINT32, [24, 32]), r"'blk.1.ffn_gate.*\[16, 32\]"),
    ("feed_forward_length", array(raw.UINT32, [24, 0]), "feed_forward_length' is 0"),
    ("feed_forward_length", array(raw.UINT32, [24] * 3), "array of 3 uint32 values"),
    ("attention.head_count", None, "head_count.*missing"),
    ("attention.head_count", uint32(0), "head_count' is 0"),
    ("attention.head_count", uint32(2**31), "head_count' is 2147483648"),
    ("attention.head_count", array(raw.UINT32, [4, 2]), r"'blk.1.attn_q.*\[16, 8\]"),
    (
        "attention.head_count",
        array(raw.UINT32, [4, 3]),
        "head_count' is 3 in layer 1, which is not",
    ),
    ("attention.head_count_kv", uint32(0), "head_count_kv' is 0"),
    ("attention.head_count_kv", uint32(3), "not a multiple of .*head_count_kv' 3"),
    ("attention.head_count_kv", uint32(8), "not a multiple"),
    ("attention.head_count_kv", DIFFERENT, r"'blk.1.attn_k.*\[16, 4\]"),
    ("attention.key_length", array(raw.UINT32, [4, 8]), "key_length' differs from layer to layer"),
    ("attention.head_count_kv", array(raw.UINT32, [2] * 3), "array of 3 uint32 values"),
    ("attention.head_count_kv", array(raw.STRING, ["2", "2"]), "array of 2 strings"),
    ("attention.head_count_kv", array(raw.FLOAT32, [2.0, 2.0]), "is a float, but must be an int"),
    ("attention.key_length", uint32(0), "key_length' is 0"),
    ("attention.key_length", uint32(5), "value_length|even"),
    ("attention.key_length", uint32(2**31), "key_length' is 2147483648"),
    ("attention.value_length", uint32(8), "value_length' is 8, but heads whose values"),
    ("rope.dimension_count", uint32(0), "dimension_count' is 0"),
    ("rope.dimension_count", uint32(3), "dimension_count' is 3, but must be even"),
    ("rope.dimension_count", uint32(6), "at most the head size 4"),
    ("rope.freq_base", float32(0.0), "freq_base' is 0, but must be finite and between 1 and"),
    ("rope.freq_base", float32(-1.0), "freq_base' is -1"),
    ("rope.freq_base", NAN, "freq_base' is nan"),
    ("rope.freq_base", INFINITY, "freq_base' is inf"),
    ("rope.freq_base", uint32(10000), "is an integer, but must be a float"),
    ("rope.scaling.type", string("ntk"), "'llama.rope.scaling.type' is 'ntk'.*not supported"),
    ("rope.scaling.original_context_length", uint32(0), "original_context_length' is 0"),
    ("rope.scaling.yarn_beta_fast", NAN, "yarn_beta_fast' is nan"),
    ("rope.scaling.yarn_beta_slow", float32(0.0), "yarn_beta_slow' is 0"),
    ("rope.scaling.type", uint32(1), "is an integer, but must be a string"),
    ("rope.scaling.factor", float32(-4.0), "scaling.factor' is -4"),
    ("rope.scaling.factor", NAN, "scaling.factor' is nan"),
    ("rope.scaling.attn_factor", float32(0.0), "attn_factor' is 0"),
    ("attention.layer_norm_rms_epsilon", None, "epsilon.*missing"),
    ("attention.layer_norm_rms_epsilon", float32(0.0), "epsilon' is 0"),
    ("attention.layer_norm_rms_epsilon", float32(-1e-5), "epsilon' is -1e-05"),
    ("attention.layer_norm_rms_epsilon", NAN, "epsilon' is nan"),
    ("attention.layer_norm_rms_epsilon", string("1e-5"), "is a string, but must be a float"),
    ("attention.causal", boolean(False), "attention.causal' is false"),
    ("expert_count", uint32(8), "'llama.expert_used_count' .*missing"),
]


@pytest.mark.parametrize(
    ("name", "value", "problem"), WRONG_KEYS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_refuses_wrong_keys(
    tmp_path: Path, name: str, value: tuple[int, bytes] | None, problem: str
) -> None:
    with pytest.raises(FormatError, match=problem) as caught:
        read(tmp_path, key_change(name, value))
    assert str(caught.value).startswith(str(tmp_path))
    assert str(caught.value).isprintable()


def test_refuses_vocabularies_that_do_not_fit(tmp_path: Path) -> None:
    tokens = "tokenizer.ggml.tokens"
    with pytest.raises(FormatError, match=r"'llama.vocab_size' .*missing"):
        read(tmp_path, Change({tokens: None}))
    with pytest.raises(FormatError, match=f"'{tokens}' is empty"):
        read(tmp_path, Change({tokens: array(raw.STRING, [])}))
    with pytest.raises(FormatError, match=f"'{tokens}' is an array of 6 int32 values"):
        read(tmp_path, Change({tokens: array(raw.INT32, [1] * VOCAB)}))
    for n_tokens in (VOCAB - 1, VOCAB + 1):
        problem = rf"'token_embd.weight' has shape \[16, 6\].*\[16, {n_tokens}\]"
        with pytest.raises(FormatError, match=problem):
            read(tmp_path, Change({tokens: array(raw.STRING, ["t"] * n_tokens)}))
