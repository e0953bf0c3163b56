"""Every architecture against the float64 reference: chunks, windows and sparse policies."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from tests.model.model_pair import (
    CHUNK_SIZE,
    HEAVY,
    LOCAL,
    UNEQUAL,
    clear_prompt,
    decisive_prompt,
    layers_of,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
    split,
)
from tests.reference.pairs import pairs_chunked, pairs_dense
from tests.tiny_architectures import FAMILIES
from tests.tiny_models import TinyModelFactory

SHAPE = {"model_dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 96}
# Windows narrower than a chunk, wider than one, and wider than the prompt.
NARROW, WIDE, ALL = 20, CHUNK_SIZE + 30, 1000
MODELS = {
    **{name: {"architecture": name} for name in FAMILIES if name != "gemma2"},
    "nemotron_h": {"architecture": "nemotron_h", "n_layers": 4},
    "nemotron_h_moe": {"architecture": "nemotron_h_moe", "n_layers": 4, "shared_ffn_dim": 80},
    "qwen3moe-one": {"architecture": "qwen3moe", "n_experts_used": 1},
    "qwen3moe-all": {"architecture": "qwen3moe", "n_experts": 3, "n_experts_used": 3},
    "grovemoe-four": {
        **{"architecture": "grovemoe", "n_experts": 8, "n_experts_used": 5},
        **{"n_adjugate_sharers": 4, "adjugate_ffn_dim": 128},
    },
    "rwkv6qwen2-plain": {
        **{"architecture": "rwkv6qwen2", "n_wkv_kv_heads": 0, "has_wkv_biases": False},
    },
    "arwkv7-bare": {"architecture": "arwkv7", "wkv_gate_rank": 0, "has_wkv_norms": False},
    "mimo2": {
        **{"architecture": "mimo2", "n_layers": 3, "n_kv_heads": (2, 4, 1), "value_dim": 8},
        **{"sliding_window": NARROW, "rotary_dim": 8},
    },
    "mimo2-wide": {
        **{"architecture": "mimo2", "n_layers": 4, "sliding_window": WIDE, "n_dense_layers": 2},
        "is_fused": True,
    },
    "step35": {
        **{"architecture": "step35", "n_layers": 4, "n_heads": (4, 2, 4, 2), "tied": False},
        **{"sliding_window": NARROW, "sliding_window_pattern": 2, "shared_ffn_dim": 80},
    },
    "step35-plain": {
        **{"architecture": "step35", "n_layers": 3, "sliding_window": WIDE, "has_qk_norm": False},
        **{"rotary_dim": 8, "rotary_dim_sliding": 8},
    },
    "minimax-m3": {"architecture": "minimax-m3", "n_layers": 3, "rotary_dim": 8},
    "minimax-m3-wide": {
        **{"architecture": "minimax-m3", "n_kv_heads": 4, "index_block_tokens": 6, "tied": False},
        **{"index_local_blocks": 2, "n_dense_layers": 0, "index_key_dim": 16, "index_top_k": 30},
    },
    "graniteswitch-one": {
        **{"architecture": "graniteswitch", "adapter_tokens": ((9, 9),), "adapter_rank": 12},
        "tied": False,
    },
    "dots3note": {
        **{"architecture": "dots3note", "n_layers": 4, "sliding_window": NARROW},
        "n_heads": (4, 2, 4, 4),
    },
    "dots3note-alone": {
        **{"architecture": "dots3note", "n_layers": 3, "sliding_window": WIDE, "tied": False},
        **{"sliding_window_pattern": 2, "n_shared_experts": 2},
    },
    "phi3": {"architecture": "phi3", "rotary_dim": 12},
    "plm": {"architecture": "plm", "q_rank": 0},
    "deepseek2-groups": {
        **{"architecture": "deepseek2", "n_layers": 3, "n_experts": 8, "n_experts_used": 3},
        **{"n_expert_groups": 4, "n_expert_groups_used": 2},
        **{"rope_scaling": "yarn", "original_context": 50},
    },
    "deepseek2-lite": {
        **{"architecture": "deepseek2", "q_rank": 0, "n_shared_experts": 2},
        **{"has_matrices_per_head": False, "has_softmax_gate": True},
    },
    "bailingmoe2": {
        **{"architecture": "bailingmoe2", "n_experts": 8, "n_experts_used": 3, "rotary_dim": 8},
        **{"n_expert_groups": 4, "n_expert_groups_used": 2, "n_shared_experts": 2},
    },
    "qwen4exp": {"architecture": "qwen4exp", "n_layers": 4, "n_conv_taps": 4},
    "qwen4exp-tokens": {
        **{"architecture": "qwen4exp", "n_layers": 5, "index_block_tokens": 1, "ngram_layer": 4},
        **{"ngram_tokens": 4, "ngram_heads": 1, "ngram_taps": 2, "model_dim": 96, "tied": False},
    },
    "qwen4exp-plain": {
        **{"architecture": "qwen4exp", "n_layers": 4, "index_block_tokens": 0},
        **{"ngram_tokens": 0, "n_streams": 2, "stream_rank": 24},
    },
    "bailingmoe3": {"architecture": "bailingmoe3", "n_layers": 4, "n_conv_taps": 4},
    "kimi-linear": {"architecture": "kimi-linear", "n_layers": 4, "n_conv_taps": 4, "q_rank": 0},
    "chatglm-fused": {"architecture": "chatglm", "rotary_dim": 8, "is_fused": True},
    "bailingmoe-shared": {"architecture": "bailingmoe", "n_shared_experts": 2},
    "deepseek-dense-layers": {"architecture": "deepseek", "n_layers": 3, "n_dense_layers": 2},
    "ernie4_5-moe-shared": {"architecture": "ernie4_5-moe", "shared_ffn_dim": 80},
    "deepseek2-dense": {"architecture": "deepseek2", "n_experts": 0, "tied": False},
    "afmoe": {"architecture": "afmoe", "n_layers": 4, "sliding_window": NARROW},
    "laguna": {
        **{"architecture": "laguna", "n_layers": 5, "n_heads": (4, 6, 6, 6, 4)},
        **{"sliding_window": NARROW, "sliding_window_pattern": 4, "shared_ffn_dim": 80},
        **{"rotary_dim": 8, "rotary_dim_sliding": 16},
    },
    "smallthinker-windows": {
        **{"architecture": "smallthinker", "n_layers": 5, "sliding_window": NARROW},
        "has_softmax_gate": True,
    },
    "deci": {
        **{"architecture": "deci", "n_layers": 4, "n_heads": (4, 0, 4, 4)},
        **{"n_kv_heads": (2, 0, 4, 1), "ffn_dim": (96, 64, 96, 128)},
    },
    "llama4-chunks": {
        **{"architecture": "llama4", "n_layers": 5, "sliding_window": NARROW, "biases": False},
        **{"temperature_length": 30, "n_experts_used": 1},
    },
    "llama4-wide-chunks": {
        **{"architecture": "llama4", "n_layers": 4, "sliding_window": WIDE, "experts_step": 2},
        **{"sliding_window_pattern": 2, "n_experts_used": 2},
    },
    "llama4-full": {"architecture": "llama4", "sliding_window": 0},
    "mistral4-yarn": {
        **{"architecture": "mistral4", "rope_scaling": "yarn", "original_context": 50},
        **{"n_layers": 3, "joins_experts": True, "n_shared_experts": 2},
    },
    "nanbeige-loops": {"architecture": "nanbeige", "n_loops": 3},
    "hrm_text": {"architecture": "hrm_text", "n_layers": 1, "n_low_cycles": 3},
    "hrm_text-deep": {"architecture": "hrm_text", "n_layers": 2, "tied": False},
    "nanbeige-skips": {"architecture": "nanbeige", "n_loops": 2, "skips_loop_norm": True},
    "maple": {"architecture": "maple", "n_layers": 4, "sliding_window": NARROW},
    "muse-glimmer": {
        **{"architecture": "muse-glimmer", "n_layers": 4, "sliding_window": NARROW},
        "norm_eps": 0.02,
    },
    "spark2_5": {"architecture": "spark2_5", "n_layers": 3, "sliding_window": NARROW},
    "cohere2": {"architecture": "cohere2", "n_layers": 4, "sliding_window": NARROW},
    "cohere2moe": {"architecture": "cohere2moe", "n_layers": 5, "sliding_window": NARROW},
    "starcoder2": {"architecture": "starcoder2", "biases": True},
    "starcoder2-window": {"architecture": "starcoder2", "sliding_window": NARROW},
    "stablelm": {"architecture": "stablelm", "rotary_dim": 8},
    "phi2-fused": {"architecture": "phi2", "rotary_dim": 8, "is_fused": True, "tied": False},
    "gptneox": {"architecture": "gptneox", "rotary_dim": 8},
    "gptneox-sequential": {"architecture": "gptneox", "is_sequential": True},
    "falcon-two-norms": {"architecture": "falcon", "has_two_norms": True, "tied": False},
    "olmo2": {"architecture": "olmo2", "tied": False},
    "glm-dsa": {"architecture": "glm-dsa", "n_layers": 3, "indexer_period": 2, "n_experts": 0},
    "glm4": {"architecture": "glm4", "rotary_dim": 8},
    "exaone-moe": {
        **{"architecture": "exaone-moe", "n_layers": 4, "sliding_window": NARROW},
        "shared_ffn_dim": 80,
    },
    "exaone4-windows": {"architecture": "exaone4", "n_layers": 4, "sliding_window": NARROW},
    "glm4moe-air": {"architecture": "glm4moe", "has_qk_norm": False, "rotary_dim": 8},
    "granite_swa-shared": {
        **{"architecture": "granite_swa", "n_layers": 4, "shared_ffn_dim": 80},
        **{"sliding_window": NARROW, "rope_pattern": (True, False, False, True)},
    },
    "granite_swa-dense": {
        **{"architecture": "granite_swa", "n_experts": 0, "biases": True},
        **{"sliding_window": WIDE, "sliding_window_pattern": 2},
    },
    "granitemoe-shared": {"architecture": "granitemoe", "shared_ffn_dim": 80},
    "qwen2moe": {"architecture": "qwen2moe", "shared_ffn_dim": 80},
    "mistral3": {"architecture": "mistral3", "original_context": 50},
    "mistral3-yarn": {
        "architecture": "mistral3",
        "rope_scaling": "yarn",
        "original_context": 50,
    },
    "smollm3": {"architecture": "smollm3", "n_layers": 5},
    "mellum-windows": {"architecture": "mellum", "n_layers": 4, "sliding_window": NARROW},
    "hunyuan-moe-shared": {"architecture": "hunyuan-moe", "shared_ffn_dim": 80},
    "nemotron": {"architecture": "nemotron", "rotary_dim": 8},
    "nemotron-biases": {"architecture": "nemotron", "biases": True},
    "mpt-biases": {"architecture": "mpt", "biases": True, "has_qk_norm": False, "tied": False},
    "mpt-table": {"architecture": "mpt", "has_table": True},
    "mistral": {"sliding_window": WIDE},
    "mixtral": {"is_mixture": True, "n_experts": 8, "tied": False},
    "phi3-window": {"architecture": "phi3", "sliding_window": NARROW},
    "phimoe-window": {"architecture": "phimoe", "sliding_window": NARROW},
    "gemma2-narrow": {"architecture": "gemma2", "sliding_window": NARROW},
    "gemma2-wide": {"architecture": "gemma2", "sliding_window": WIDE},
    "gemma2-all": {"architecture": "gemma2", "sliding_window": ALL},
    "gemma3": {
        "architecture": "gemma3",
        "n_layers": 3,
        "sliding_window": NARROW,
        "sliding_window_pattern": 3,
        "rope_base": 1e6,
        "rope_scaling": "linear",
    },
    "gemma3n": {
        **{"architecture": "gemma3n", "n_layers": 6, "sliding_window": NARROW, "n_shared_kv": 3},
        **{"token_input_dim": 8, "n_cut_layers": 4},
    },
    "gemma3n-wide": {
        **{"architecture": "gemma3n", "n_layers": 4, "sliding_window": WIDE, "tied": False},
        **{"sliding_window_pattern": 2, "n_shared_kv": 1, "n_cut_layers": 0},
    },
    "gemma4": {
        **{"architecture": "gemma4", "n_layers": 6, "sliding_window": NARROW},
        **{"head_dim": 32, "head_dim_sliding": 16, "n_shared_kv": 3, "token_input_dim": 8},
        "ffn_dim": (96, 96, 96, 128, 128, 128),
    },
    "gemma4-wide": {
        **{"architecture": "gemma4", "n_layers": 4, "sliding_window": WIDE},
        **{"sliding_window_pattern": 2, "n_shared_kv": 1, "n_kv_heads": (2, 1, 2, 1)},
    },
    "gemma4-experts": {
        **{"architecture": "gemma4", "n_layers": 3, "sliding_window": WIDE},
        **{"head_dim": 32, "head_dim_sliding": 16, "has_values_of_keys": True},
        **{"expert_ffn_dim": 40, "n_experts_used": 3},
    },
    "gemma4-values-of-keys": {
        **{"architecture": "gemma4", "n_layers": 3, "sliding_window": NARROW},
        **{"head_dim": 32, "head_dim_sliding": 16, "has_values_of_keys": True},
    },
    "gpt-oss": {"architecture": "gpt-oss", "n_layers": 4, "sliding_window": WIDE},
    "hunyuan-moe": {"architecture": "hunyuan-moe", "shared_ffn_dim": 80},
    "mellum": {"architecture": "mellum", "n_layers": 4, "sliding_window": NARROW},
    "olmo3": {"architecture": "olmo2", "tied": False, "n_layers": 4, "sliding_window": WIDE},
    "unequal": {**UNEQUAL, "biases": True},
    "unequal-projection-norms": {**UNEQUAL, "architecture": "olmo2", "tied": False},
    "unequal-fused": {**UNEQUAL, "architecture": "phi3"},
    "unequal-openelm": {**UNEQUAL, "architecture": "openelm"},
    "unequal-windows": {**UNEQUAL, "architecture": "gemma2", "sliding_window": NARROW},
    "unequal-alibi": {**UNEQUAL, "architecture": "bloom", "n_heads": (6, 2, 12)},
    "unequal-experts": {**UNEQUAL, "architecture": "qwen3moe", "ffn_dim": 96},
}


@pytest.mark.parametrize("name", MODELS)
def test_dense_logits_over_chunks_and_calls(tiny_model: TinyModelFactory, name: str) -> None:
    pair = load_pair(tiny_model, **{**SHAPE, **MODELS[name]})
    tokens = clear_prompt(pair, 3 * CHUNK_SIZE + 17)
    make_layer, make_policy = layers_of("dense")
    expected = pair.reference.start(make_layer).prefill(tokens)
    session = pair.session(make_policy(), cache_type="f32")
    for lengths in ([len(tokens)], [CHUNK_SIZE, len(tokens) - CHUNK_SIZE], [100, 1, 108]):
        assert relative_error(prefill(session, *split(tokens, lengths)), expected) < 2e-5
    session.reset()
    session.prefill(tokens[:-3], is_last=True)
    decoded = [session.decode(int(token)) for token in tokens[-3:]]
    assert relative_error(np.stack(decoded), expected[-3:]) < 2e-5


# All layers have windows, or sinks, or indexers, or biases by distance.
NO_SPARSE = (
    *("mistral", "phi3-window", "phimoe-window", "starcoder2-window"),
    *("gpt-oss", "deepseek32", "glm-dsa", "mamba", "mamba2", "llama4"),
    *("rwkv6", "rwkv6qwen2", "rwkv6qwen2-plain", "rwkv7", "arwkv7", "arwkv7-bare"),
    *("granite_swa", "granite_swa-shared", "granite_swa-dense", "qwen4exp", "qwen4exp-tokens"),
    *("minimax-m3", "minimax-m3-wide", "dots3note", "dots3note-alone"),
    *("bloom", "unequal-alibi", "refact", "jais", "mpt", "mpt-biases"),
)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NO_SPARSE])
def test_sparse_logits_of_layers_without_a_window(tiny_model: TinyModelFactory, name: str) -> None:
    pair = load_pair(tiny_model, **{**SHAPE, **MODELS[name]})
    tokens = decisive_prompt(pair, 2 * CHUNK_SIZE + 40)
    make_layer, make_policy = layers_of("h2o")
    expected = pair.reference.start(make_layer).prefill(tokens)
    session = pair.session(make_policy(), cache_type="f32")
    assert relative_error(prefill(session, tokens), expected) < 2e-5
    dense = pair.reference.start(layers_of("dense")[0]).prefill(tokens)
    assert relative_error(expected[CHUNK_SIZE:], dense[CHUNK_SIZE:]) > 0.01


def test_observers_see_the_rows_before_a_layer(tiny_model: TinyModelFactory) -> None:
    """Also of one whose network has the same input: nothing has been added to them yet."""
    pair = load_pair(tiny_model, **{**SHAPE, **MODELS["command-r"]})
    tokens, seen = random_tokens(CHUNK_SIZE), {}

    def note(layer: int, residual: np.ndarray, *rest: np.ndarray) -> None:
        seen[layer] = np.array(residual)

    session = pair.session(_core.dense_policy(), cache_type="f32")
    session.prefill(tokens, is_last=True, on_attention=note)
    embedding = pair.reference.weights["token_embd.weight"]
    np.testing.assert_array_equal(seen[0], embedding[tokens])


def test_sinks_under_a_policy_that_reads_all(tiny_model: TinyModelFactory) -> None:
    """In one piece, and in two parts whose column sums are wanted."""
    pair = load_pair(tiny_model, **{**SHAPE, **MODELS["gpt-oss"]})
    tokens = random_tokens(3 * CHUNK_SIZE + 17)
    expected = pair.reference.start(layers_of("dense")[0]).prefill(tokens)
    for policy in (_core.h2o_policy(12, 1000), _core.headwise_policy([1000] * 8, local=8)):
        session = pair.session(policy, cache_type="f32")
        assert relative_error(prefill(session, tokens), expected) < 2e-5


@pytest.mark.parametrize("name", ["mistral", "phi3-window", "starcoder2-window"])
def test_sparse_policies_leave_windows_exact(tiny_model: TinyModelFactory, name: str) -> None:
    pair = load_pair(tiny_model, **{**SHAPE, **MODELS[name]})
    tokens = random_tokens(3 * CHUNK_SIZE)
    dense, sparse = (
        prefill(pair.session(layers_of(attention)[1]()), tokens) for attention in ("dense", "h2o")
    )
    np.testing.assert_array_equal(sparse, dense)


@pytest.mark.parametrize("window", [NARROW, WIDE, ALL])
def test_pairs_are_counted_per_layer(tiny_model: TinyModelFactory, window: int) -> None:
    pair = load_pair(tiny_model, **SHAPE, architecture="gemma2", sliding_window=window)
    n_tokens = 3 * CHUNK_SIZE + 17
    in_window = sum(min(position + 1, window) for position in range(n_tokens))
    session = pair.session(_core.h2o_policy(LOCAL, HEAVY))
    prefill(session, *split(random_tokens(n_tokens), [100, n_tokens - 100]))
    sparse = pairs_chunked(100, chunk_size=CHUNK_SIZE, memory_size=LOCAL + HEAVY)
    sparse += sum(
        pairs_dense(n) + n * (LOCAL + HEAVY) for n in (CHUNK_SIZE, n_tokens - 100 - CHUNK_SIZE)
    )
    assert session.pairs_computed == (in_window + sparse) // 2
    assert session.pairs_dense == (in_window + pairs_dense(n_tokens)) // 2
