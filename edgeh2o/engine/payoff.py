"""Whether a prompt is read faster sparse, and tokens after it: what both take is counted.

Nothing is timed, so that the same prompt is read the same way on every run and machine of a kind.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from ..attention.base import SparseAttentionConfig
from ..attention.headwise import HeadwiseConfig
from ..attention.headwise_settings import DECODE_FROM, DECODES_ALL, NOT_MEASURED
from ..layer_config import LayerConfig
from ..model_config import DecoderConfig
from ..option_fields import MAX_CONTEXT

if TYPE_CHECKING:
    from .plan import RunPlan

# What a multiply-add of prefill attention costs in those of quantised weights, by the type of its
# products: 512 tokens against 4,096, dense (f32: 2.5 with AVX512-VNNI, 3.2 on Zen 4, 3.0 to 3.7
# with AVX2; bf16 2.3; int16 1.7 to 2.0 with AVX512-VNNI; int8 1.0 and 1.4 with it, SmolLM2-135M
# and Qwen2.5-Coder-0.5B, 1.7 by the cycles predicted for a Cortex-A76, as f16 is).
ATTENTION_COST = {"f32": 3.0, "bf16": 2.3, "f16": 2.5, "int16": 1.8, "int8": 1.2}
# What a pair costs in a sparse prefill (gathered rows, merged parts), and what a query costs
# besides (choices, landmarks, samples), as so many keys at the cost of weights. Both models above,
# 2,048 to 8,192 tokens in int8; in f32 this is within 10 % of what was measured with AVX2.
SPARSE_COST = 1.1
SPARSE_KEYS = 600
# The same on a GPU, and seconds that a chunk of a layer waits for what the CPU chooses (an H100,
# Llama-3.2-1B's shape, 4,096 to 65,536 tokens in chunks of 256 to 2,048: docs/devices.md).
GPU_ATTENTION_COST = 1.2
GPU_SPARSE_COST = 2.5
GPU_WAIT = 400e-6
# Of the dense time that a sparse prefill has to save: it is not exact, and estimates err by half of
# this (Qwen2.5-Coder-1.5B, 4,602 tokens in f32: 3 % less than dense estimated, 2 % more measured).
LEAST_SAVING = 0.08
# What decode takes, as so many bytes of weights: a byte of the cache, and a multiply-add of its
# attention (docs/quality.md, "Where headwise decode pays").
CACHED_BYTE_COST = 0.7
CACHED_PRODUCT_COST = 0.25
# Bytes of a cached number.
NUMBER_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}
# Numbers that share a scale in q8_0: rows of whole blocks are kept so beside a cache in f16
# (PromptMemory::row_type).
BLOCK_NUMBERS = 32
# Of the time of a token that headwise decode has to save: estimates of so much err by two points,
# and what it reads less may cost an answer ("Tasks" in docs/quality.md).
LEAST_DECODE_SAVING = 0.1
# Tokens by which the length from which it does so is rounded up.
DECODE_STEP = 64


class WeighedModel(Protocol):
    """What is asked of a model, loaded or not: see ``LoadedModel``."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def shows_attention(self) -> bool: ...


def choose_reading(plan: RunPlan, model: WeighedModel, n_tokens: int) -> RunPlan:
    """The plan for a prompt so long: its budgets, or one that reads it dense if that is as fast.

    And the length from which on tokens after it read less, where that was not asked for. Settings
    chosen by hand stay as they are. Plans for an ONNX model, of whose products nothing is known
    here, get the budgets alone.
    """
    return choose_decode(_choose_prefill(plan, model, n_tokens), model)


def _choose_prefill(plan: RunPlan, model: WeighedModel, n_tokens: int) -> RunPlan:
    plan = plan.for_length(n_tokens)
    if sparse_prefill_pays(plan, model, n_tokens) is False:
        return plan.reading_all(saves_time=True).for_length(n_tokens)
    return plan


def sparse_prefill_pays(plan: RunPlan, model: WeighedModel, n_tokens: int) -> bool | None:
    """Whether a prompt so long is read faster by the plan for its length than densely.

    None where that is not known, or nobody asks: the plan says how it is read.
    """
    config = plan.config
    if plan.attention.reads_all and not model.shows_attention:
        return None  # it will not be known either
    if not isinstance(config, DecoderConfig) or n_tokens <= plan.chunk_size:
        return None
    reads_past = [_reads_past(layer) for layer in config.layers]
    keys = plan.settings.expected_keys(plan.attention, n_tokens, reads_past)
    if keys is None:
        return None
    if plan.is_on_gpu:
        return not plan.gpu_rate or saves_time_on_gpu(config, plan, n_tokens, keys)
    dense = plan.reading_all(saves_time=True).for_length(n_tokens).precision
    return saves_time(config, plan.precision, n_tokens, keys, dense_precision=dense)


def choose_decode(plan: RunPlan, model: WeighedModel) -> RunPlan:
    """The plan with the length from which on headwise decode saves enough of a token's time.

    And the longest of which it was measured that it loses nothing. Its policy compares every prompt
    with both when it has been read, so that a conversation that grows gets such a decode once it is
    long, and reads everything again where nobody knows. One that was asked for stays as it is.
    """
    config, attention = plan.config, plan.attention
    if not plan.settings.leaves_decode_open or not isinstance(config, DecoderConfig):
        return plan
    if attention.decode_rows(DECODE_FROM) is None:
        if not attention.chooses_in_decode:
            return plan
        return replace(plan, attention=attention.decoding_densely())  # no head has a budget
    weights = count_weight_bytes(config, model.weight_bytes)

    length = _least_decode_length(config, attention, plan.cache_type, weights, LEAST_DECODE_SAVING)
    if length is None:
        return replace(plan, attention=attention.decoding_densely())
    return replace(plan, attention=attention.decoding_from(length))


@lru_cache(maxsize=64)  # it takes milliseconds, which a server would take for every request
def _least_decode_length(
    config: DecoderConfig,
    attention: SparseAttentionConfig,
    cache_type: str,
    weight_bytes: float,
    least_saving: float,
) -> int | None:
    """From which length on so large a part of a token's time is saved; None: from none."""

    def pays(n_tokens: int) -> bool:
        saving = decode_saving(config, attention, cache_type, weight_bytes, n_tokens)
        return saving >= least_saving

    lengths = range(DECODE_FROM, MAX_CONTEXT, DECODE_STEP)
    found = bisect_left(lengths, True, key=pays)
    return None if found == len(lengths) else lengths[found]


def describe_decode(plan: RunPlan, n_tokens: int) -> str:
    """Why tokens after a long prompt read all of it; empty where they do not, or never did."""
    is_chosen = plan.settings.leaves_decode_open and n_tokens >= DECODE_FROM
    report = plan.attention.report(plan.config, n_tokens)
    if is_chosen and report.get("decode") == NOT_MEASURED:
        return (
            "generated tokens read everything: after prompts as long as this one it was not "
            "measured what they lose by less (edgeh2o calibrate --length measures it; "
            "--decode-attention headwise reads less anyhow)"
        )
    if not is_chosen or report.get("decode") != DECODES_ALL:
        return ""
    return (
        "generated tokens read everything: less would save under "
        f"{100 * LEAST_DECODE_SAVING:.0f} % of their time before {report['decode_from']:,} tokens "
        "(--decode-attention headwise reads less anyhow)"
    )


def decode_saving(
    config: DecoderConfig,
    attention: SparseAttentionConfig,
    cache_type: str,
    weight_bytes: float,
    n_tokens: int,
) -> float:
    """The part of a token's time that it saves to read a prompt so long as ``attention`` has it.

    ``weight_bytes`` are read for every token. What ``attention`` reads of a prompt is kept in q8_0
    beside a cache in f16. 0 where the attention does not say what it reads.
    """
    rows, first = attention.decode_rows(n_tokens), 0
    if rows is None:
        return 0.0
    dense, sparse = weight_bytes, weight_bytes
    for layer in config.layers:
        read = rows[first : first + layer.n_kv_heads]
        first += layer.n_kv_heads
        if _reads_past(layer):
            cost = _row_cost(config, layer, cache_type)
            kept_cost = _row_cost(config, layer, cache_type, is_kept=True)
            dense += cost * n_tokens * layer.n_kv_heads
            sparse += kept_cost * SPARSE_COST * sum(read)
    return 1 - sparse / dense


def _row_cost(
    config: DecoderConfig, layer: LayerConfig, cache_type: str, *, is_kept: bool = False
) -> float:
    """What a token takes for a row of a KV head, as so many bytes of weights.

    One of the cache, or one that ``is_kept`` of a prompt.
    """
    types = cache_type.split("/")
    dims = config.head_dim_of(layer), config.value_dim_of(layer)
    rows = [(types[0], dims[0])]
    if config.latent is None:  # else the row of a key is that of a value too
        rows.append((types[-1], dims[1]))
    if is_kept:
        rows = [(_kept_type(name, dim), dim) for name, dim in rows]
    n_bytes = sum(NUMBER_BYTES[name] * dim for name, dim in rows)
    products = layer.n_heads / layer.n_kv_heads * sum(dims)
    return CACHED_BYTE_COST * n_bytes + CACHED_PRODUCT_COST * products


def _kept_type(cached: str, dim: int) -> str:
    """The type of a cached row of so many numbers where it is kept for generated tokens."""
    return "q8_0" if cached == "f16" and dim % BLOCK_NUMBERS == 0 else cached


def count_weight_bytes(config: DecoderConfig, held: int) -> float:
    """Bytes of weights that a token reads, of those ``held``: not all experts, and one embedding.

    As if a number took as many bytes everywhere.
    """
    output = float(config.vocab_size * config.model_dim)
    read, n_experts = output, max(config.n_experts, 1)
    all_of_them = output if config.tied_embeddings else 2 * output
    for layer in config.layers:
        mixer = _count_mixer(config, layer)
        read += mixer + _count_feed_forward(config, layer, config.n_experts_used)
        all_of_them += mixer + _count_feed_forward(config, layer, n_experts)
    return held * read / all_of_them


def saves_time(
    config: DecoderConfig,
    precision: str,
    n_tokens: int,
    keys: float,
    *,
    dense_precision: str | None = None,
) -> bool:
    """Whether a prompt is read faster when its queries read so many ``keys`` in the mean.

    With products of ``precision``, and of ``dense_precision`` if all is read.
    """
    products, per_key = count_products(config)
    dense = products + ATTENTION_COST[dense_precision or precision] * per_key * n_tokens / 2
    sparse = products + per_key * (ATTENTION_COST[precision] * SPARSE_COST * keys + SPARSE_KEYS)
    return sparse < (1 - LEAST_SAVING) * dense


def saves_time_on_gpu(config: DecoderConfig, plan: RunPlan, n_tokens: int, keys: float) -> bool:
    """The same on the plan's GPU, where queries read their own chunk besides."""
    products, per_key = count_products(config)
    attention = GPU_ATTENTION_COST * per_key
    n_layers = sum(map(_reads_past, config.layers))
    waits = GPU_WAIT * plan.gpu_rate * n_layers / plan.chunk_size
    keys += (plan.chunk_size - HeadwiseConfig.preferred_chunk_size) / 2  # those are counted in
    dense = products + attention * n_tokens / 2
    sparse = products + attention * GPU_SPARSE_COST * keys + waits
    return sparse < (1 - LEAST_SAVING) * dense


def _reads_past(layer: LayerConfig) -> bool:
    """Whether what a layer reads depends on the rule."""
    return bool(layer.n_heads and not layer.window and not layer.index_top_k)


def count_products(config: DecoderConfig) -> tuple[float, float]:
    """Multiply-adds per token of a prompt: of the weights, and of attention for every key read.

    Layers with a window are left out of the second: what they read does not depend on the rule.
    """
    weights, per_key = 0.0, 0.0
    for layer in config.layers:
        weights += _count_mixer(config, layer)
        weights += _count_feed_forward(config, layer, config.n_experts_used)
        if _reads_past(layer):
            per_key += layer.n_heads * (config.head_dim_of(layer) + config.value_dim_of(layer))
    return weights, per_key


def _count_mixer(config: DecoderConfig, layer: LayerConfig) -> float:
    width = config.model_dim
    inner = 0
    if layer.mixer in ("attention", "attention_mamba2"):
        dims = config.head_dim_of(layer) + config.value_dim_of(layer)
        inner += dims * (layer.n_heads + layer.n_kv_heads)
    if layer.mixer == "short_conv":
        inner += 4 * width
    inner += 2 * layer.delta_head_dim * (layer.n_delta_key_heads + 2 * layer.n_delta_value_heads)
    inner += layer.ssd_head_dim * 3 * layer.n_ssd_heads
    if layer.mixer == "rwkv7":
        inner += 4 * width
        ranks = (layer.wkv_decay_rank, layer.wkv_rate_rank, layer.wkv_value_rank)
        inner += 2 * (sum(ranks) + layer.wkv_gate_rank)
    if rank := layer.wkv_shift_rank:  # with a gate of what the network gives, if that is shifted
        inner += (3 + layer.has_shifted_network) * width + 2 * layer.wkv_decay_rank + 10 * rank
        inner += 2 * layer.n_wkv_kv_heads * layer.wkv_head_dim
    channels = layer.n_scan_channels
    inner += 3 * channels
    selected = 2 * channels * (layer.scan_step_rank + layer.scan_state_dim)
    if rank := layer.ssd_step_rank:
        selected += layer.ssd_head_dim * layer.n_ssd_heads * (rank + 2 * layer.ssd_state_dim)
        selected += layer.n_ssd_heads * rank
    if config.n_streams:  # of both branches
        selected += 2 * config.n_streams * width * (2 * config.stream_rank + config.n_streams)
    return float(width * inner + selected)


def _count_feed_forward(config: DecoderConfig, layer: LayerConfig, n_experts: int) -> float:
    n_matrices = 3 if config.is_gated else 2
    has_experts = config.n_experts > 0 and not layer.is_dense
    width = layer.ffn_dim * (n_experts if has_experts else 1)
    if has_experts:
        width += config.shared_ffn_dim + n_experts * config.adjugate_ffn_dim
    return float(n_matrices * config.model_dim * width)
