"""Whole tiny models on the host device: the tokens and logits of the CPU's decoder."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from edgeh2o.attention.dense import DenseConfig
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model
from edgeh2o.errors import UsageError
from tests.cuda.host_library import SMALL
from tests.cuda.models.architectures import MODELS
from tests.cuda.models.greedy import LOGIT_TOLERANCE, SHAPE, greedy
from tests.model.model_pair import random_tokens, relative_error
from tests.random_blocks import MIXED, rewrite
from tests.reference.decoder import ReferenceDecoder
from tests.reference.dense import DenseLayer
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.model import TENSOR_TYPES

# What the kernels for GPUs lack something of, and what the refusal says.
REFUSED = {
    "gemma3n": r"several residual streams \(AltUp\)",
    "qwen4exp": r"residual streams that are mixed \(hyper-connections\)",
    "gemma4-experts": "experts with norms of their own",
    "apertus": "networks with xIELU",
    "chatglm-fused": "joint biases of queries, keys and values",
    **dict.fromkeys(("afmoe", "laguna", "spark2_5"), "gates of attention by a matrix of their own"),
    "muse-glimmer": "normed embeddings and norms with another epsilon",
    **dict.fromkeys(("grovemoe", "grovemoe-four"), "experts that share others"),
    "smallthinker": "experts chosen by the input of their layer",
    "dots3note": "gates of attention by a matrix of their own",
    "graniteswitch": "adapters that tokens choose",
    "minimax-m3": r"attention to what an indexer chooses \(DSA\)",
    **dict.fromkeys(("maple", "step35"), "networks whose gate has a limit"),
    "mimo2": "values of another size than their keys",
    "bailingmoe3": "delta nets whose rows decay by themselves",
    "kimi-linear": "delta nets whose rows decay by themselves",
    "talkie": "norms without weights",
    "plamo": "feed-forward networks beside attention",
    "qwen": "joint biases of queries, keys and values",
    "phimoe": "biases of norms and of the output",
    "deepseek32": r"attention to what an indexer chooses \(DSA\)",
    "glm-dsa": r"attention to what an indexer chooses \(DSA\)",
    "command-r": "LayerNorm",
    "cohere2": "LayerNorm",
    "stablelm": "LayerNorm",
    **dict.fromkeys(("olmo", "phi2", "gptneox", "falcon", "nemotron", "jais2"), "LayerNorm"),
    **dict.fromkeys(("starcoder2", "rwkv6", "rwkv7"), "LayerNorm"),
    **dict.fromkeys(("codeshell", "cohere2moe", "gpt2", "starcoder"), "LayerNorm"),
    **dict.fromkeys(("bloom", "jais", "mpt"), "LayerNorm"),
    "refact": r"attention with a bias by distance \(ALiBi\)",
    "orion": "LayerNorm",
    **dict.fromkeys(("jamba", "mamba", "plamo2"), "Mamba-1 layers"),
    "llama4": "windows that begin at fixed positions",
    "mistral4": "latent attention whose queries are scaled by their position",
    **dict.fromkeys(
        ("mamba2", "rwkv6qwen2", "arwkv7", "arwkv7-bare", "rwkv6qwen2-plain"),
        "models without attention",
    ),
    "hrm_text": "norms without weights",
    "nanbeige-loops": "layers that are gone through several times",
    "bitnet": "norms behind attention and activations",
}
pytestmark = pytest.mark.usefixtures("host_device")


@pytest.mark.parametrize("name", MODELS)
def test_architectures(tiny_model: TinyModelFactory, name: str) -> None:
    """Every one that is registered, in two calls: the tokens of the CPU, or a refusal by name."""
    path = tiny_model(**{**SMALL, **MODELS[name]})
    if name in REFUSED:
        with pytest.raises(UsageError, match=rf"{REFUSED[name]}.*--device cpu"):
            open_model(path, open_device(0))
        return
    prompt = random_tokens(35)
    shape = {"batch_size": 32, "chunk_size": 16, "all_rows": False}
    expected, tokens = greedy(path, prompt, 4, device=False, **shape)
    logits, same = greedy(path, prompt, 4, device=True, **shape)
    assert same == tokens
    assert relative_error(logits, expected) < LOGIT_TOLERANCE


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q8_0", "F16"])
def test_experts_of_quantised_weights(tiny_model: TinyModelFactory, tensor_type: str) -> None:
    """Of a prompt of several groups, and of tokens: each goes to its own experts."""
    path = tiny_model(
        **{**SMALL, "model_dim": 256, "ffn_dim": 256, "head_dim": 64},
        architecture="qwen3moe",
        tensor_type=tensor_type,
    )
    prompt = random_tokens(21)
    expected, tokens = greedy(path, prompt, 3, device=False)
    logits, same = greedy(path, prompt, 3, device=True)
    assert same == tokens
    assert relative_error(logits, expected) < 0.03


def write_clear_router(path: Path) -> None:
    """Changes a file so that experts are chosen by the sign of one product, by a wide margin."""
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.name.endswith(".ffn_gate_inp.weight"):
            weights = tensor.data
            steps = np.array([3, 2, 0.5, -0.5, -2, -3], np.float32)
            weights[:] = steps[:, None] * weights[0]


@pytest.mark.parametrize("tensor_type", ["Q4_K"])
def test_experts_of_rounded_scales_with_a_clear_router(
    tiny_model: TinyModelFactory, tmp_path: Path, tensor_type: str
) -> None:
    """Scales of two levels are rounded on the device, which may turn a near tie of experts.

    Where there is none, logits are those of the CPU within what 8-bit activations differ by, and
    as near to those of float64.
    """
    sizes = {**SMALL, "model_dim": 256, "ffn_dim": 256, "head_dim": 64}
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_model(**sizes, architecture="qwen3moe", tensor_type=tensor_type), path)
    write_clear_router(path)
    prompt = random_tokens(12)
    rows = []
    for place in (None, open_device(0)):
        with open_model(path, place) as file:
            runner = file.load().start_session(DenseConfig(), SHAPE)
        runner.prefill(prompt, is_last=True)
        of_prompt = np.array(runner.row_logits(0, len(prompt)))
        decoded = [np.array(runner.decode(token)) for token in (9, 99)]
        rows.append(np.concatenate((of_prompt, decoded)))
    errors = [relative_error(row, other) for row, other in zip(rows[1], rows[0], strict=True)]
    assert max(errors) < 0.03
    exact = ReferenceDecoder.from_gguf(path).start(DenseLayer).prefill(prompt)
    cpu, device = (relative_error(each[: len(prompt)], exact) for each in rows)
    assert device < 1.1 * cpu


@pytest.mark.parametrize("name", ["falcon-h1", "nemotron_h_moe"])
def test_mamba2_of_quantised_weights(tiny_model: TinyModelFactory, name: str) -> None:
    more = {"model_dim": 256, "ffn_dim": 256, "head_dim": 64, "ssd_head_dim": 32}
    if name == "nemotron_h_moe":
        more["shared_ffn_dim"] = 256
    path = tiny_model(**{**SMALL, **MODELS[name], **more}, tensor_type="Q8_0")
    prompt = random_tokens(12)
    expected, tokens = greedy(path, prompt, 3, device=False)
    logits, same = greedy(path, prompt, 3, device=True)
    assert same == tokens
    assert relative_error(logits, expected) < 0.03


def test_experts_of_mxfp4(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**{**SMALL, **MODELS["gpt-oss"]}, tensor_type="MXFP4")
    prompt = random_tokens(12)
    expected, tokens = greedy(path, prompt, 3, device=False)
    logits, same = greedy(path, prompt, 3, device=True)
    assert same == tokens
    assert relative_error(logits, expected) < 0.03


@pytest.mark.parametrize("tensor_type", ["Q8_0", "Q4_K"])
def test_inputs_per_token_of_quantised_weights(
    tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch, tensor_type: str
) -> None:
    """From a table in parts."""
    monkeypatch.setattr("edgeh2o.models.hyperparameters.TOKEN_INPUT_ROWS", 100)
    more = {"model_dim": 256, "ffn_dim": 256, "head_dim": 64, "head_dim_sliding": 64}
    more |= {"n_layers": 4, "n_shared_kv": 1, "token_input_dim": 256}
    path = tiny_model(**{**SMALL, **MODELS["gemma4"], **more}, tensor_type=tensor_type)
    prompt = random_tokens(12)
    expected, tokens = greedy(path, prompt, 3, device=False)
    logits, same = greedy(path, prompt, 3, device=True)
    assert same == tokens
    assert relative_error(logits, expected) < 0.03


# Types whose products on the CPU take one activation scale per 256 values, on devices one per 32:
# there logits differ by what the CPU rounds more.
ROUNDED_BY_256 = {"Q6_K", "Q3_K", "Q2_K", "IQ3_S", "IQ3_XXS"}


@pytest.mark.parametrize("tensor_type", TENSOR_TYPES)
def test_tensor_types(tiny_model: TinyModelFactory, tensor_type: str) -> None:
    sizes = {**SMALL, "model_dim": 256, "ffn_dim": 256, "head_dim": 64}
    path = tiny_model(**sizes, tensor_type=tensor_type)
    prompt = random_tokens(9)
    expected, tokens = greedy(path, prompt, 3, device=False)
    logits, same = greedy(path, prompt, 3, device=True)
    assert same == tokens
    # Sums in another order show where an activation rounds to the next of 255 steps; a wrong
    # weight does more. The kernels themselves are held to 1e-6.
    assert relative_error(logits, expected) < (0.05 if tensor_type in ROUNDED_BY_256 else 0.03)


def test_types_that_are_held_as_others(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    sizes = {**SMALL, "model_dim": 256, "ffn_dim": 256, "head_dim": 64}
    path = rewrite(tiny_model(**sizes), tmp_path / "mixed.gguf", MIXED)
    prompt = random_tokens(9)
    expected, tokens = greedy(path, prompt, 3, device=False)
    logits, same = greedy(path, prompt, 3, device=True)
    assert same == tokens
    assert relative_error(logits, expected) < 0.06  # ROUNDED_BY_256 are among them
