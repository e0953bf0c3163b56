"""Short convolutions between attention layers (LFM2): an ONNX file reads as its GGUF sister does.

test_exported.py compares whole files with onnxruntime's own run of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edgeh2o import LLM, HeadwiseConfig, SamplingParams, UsageError, _core
from edgeh2o.errors import FormatError
from edgeh2o.evaluation.calibration import calibrate
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.formats.gguf_header import TensorInfo
from edgeh2o.formats.gguf_writer import write_gguf
from edgeh2o.runners.base import Runner, RunnerState
from tests.onnx.editing import set_attribute
from tests.onnx.exported import unpack
from tests.onnx.reading import RUNTIME, make_tokens, open_llm, read_all
from tests.tiny_models import TinyModelFactory

pytestmark = pytest.mark.skipif(RUNTIME < (1, 24), reason="the files are for newer runtimes")
SPARSE = HeadwiseConfig(budget=14, local=6, sinks=1, landmark_size=8)
# Of the fixture, as tools/make_onnx_exports.py makes it.
SISTER: dict[str, object] = {
    "architecture": "lfm2",
    "n_layers": 5,
    "model_dim": 32,
    "n_heads": 4,
    "n_kv_heads": (0, 2, 0, 2, 0),
    "head_dim": 16,
    "ffn_dim": 64,
    "context_length": 256,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("builder_lfm2_fp32", tmp_path_factory.mktemp("lfm2") / "model")[0]


@pytest.fixture(scope="module")
def sister(folder: Path, tiny_model: TinyModelFactory) -> Path:
    """A GGUF file of the same weights."""
    graph = onnx.load(folder / "model.onnx").graph
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    path = folder.with_suffix(".gguf")
    with open_gguf(tiny_model(**SISTER)) as gguf:
        metadata = {key: gguf.metadata.stored(key) for key in gguf.metadata}
        metadata["lfm2.rope.freq_base"] = _rope_base(arrays["cos_cache"])
        metadata["lfm2.attention.layer_norm_rms_epsilon"] = 1e-5

        def read(info: TensorInfo) -> list[bytes]:
            array = _find_weights(arrays, info.name)
            assert array.size == info.rows * info.cols
            return [np.ascontiguousarray(array, np.float32).tobytes()]

        write_gguf(path, metadata, list(gguf.tensors.values()), read)  # type: ignore[arg-type]
    return path


def _rope_base(cos: NDArray[np.float32]) -> float:
    """From the angle of the second pair at position 1: base^(-1 / pairs)."""
    return float(np.round(np.arccos(cos[1, 1].astype(np.float64)) ** -cos.shape[1], -2))


def _find_weights(arrays: dict[str, Any], name: str) -> NDArray[Any]:
    parts = name.split(".")
    if parts[0] == "token_embd":
        return np.asarray(arrays["lm_head.MatMul.weight"].T)
    if parts[0] == "token_embd_norm":
        return np.asarray(arrays["model.layers.5.final_norm_layernorm.weight"])
    place, what = f"model.layers.{parts[1]}", parts[2]
    if what == "shortconv" and parts[3] == "conv":
        return np.asarray(arrays[f"{place}.conv.conv.weight"])[:, 0]
    if what.endswith("norm"):
        norms = {
            "attn_norm": "operator_layernorm",
            "ffn_norm": "ffn_layernorm",
            "attn_q_norm": "attn.q_norm.layernorm",
            "attn_k_norm": "attn.k_norm.layernorm",
        }
        return np.asarray(arrays[f"{place}.{norms[what]}.weight"])
    if what in ("attn_q", "attn_k", "attn_v"):
        fused = arrays[f"{place}.attn.qkv_proj.MatMul.weight"].T
        return np.split(fused, [64, 96])["qkv".index(what[-1])]
    matrices = {
        "shortconv": f"conv.{parts[3]}",
        "attn_output": "attn.o_proj",
        **{f"ffn_{which}": f"mlp.{which}_proj" for which in ("gate", "up", "down")},
    }
    return np.asarray(arrays[f"{place}.{matrices[what]}.MatMul.weight"].T)


def test_logits_equal(folder: Path, sister: Path) -> None:
    """Of a prompt in batches of several blocks, and token by token."""
    rows = []
    for path in (folder, sister):
        with open_llm(path) as llm:
            rows.append(read_all(llm, make_tokens(200), 170))
    np.testing.assert_allclose(*rows, atol=2e-5 * rows[0].std())


def test_memory_sets_equal(folder: Path, sister: Path) -> None:
    tokens = make_tokens(157)
    sets, logits, pairs = [], [], []
    for path in (folder, sister):
        with open_llm(path, attention=SPARSE) as llm:
            runner = llm.start_runner(200)
            for first in (0, 64, 128):
                last = runner.prefill(tokens[first : first + 64], is_last=first == 128)
            sets.append([runner.policy.memory_set(i, head) for i in (1, 3) for head in range(2)])
            logits.append([last, runner.decode(7), runner.decode(8)])
            pairs.append((runner.pairs_computed, runner.pairs_dense))
    assert pairs[0] == pairs[1] and pairs[0][0] < pairs[0][1]
    for one, other in zip(*sets, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-4)


def _read(runner: Runner, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    logits = runner.prefill(tokens, is_last=True, stays_open=True)
    assert logits is not None
    return logits


def test_it_goes_back_to_marks_alone(folder: Path) -> None:
    """To the end of a prompt that stays open, which is marked by itself, and to nothing."""
    with open_llm(folder) as llm:
        runner = llm.start_runner(100)
        tokens = make_tokens(60)
        first = _read(runner, tokens[:40])
        answer = [runner.decode(5).copy(), runner.decode(6).copy()]
        second = _read(runner, tokens[40:])
        with pytest.raises(ValueError, match="nothing is noted"):
            runner.rewind(41)
        assert runner.find_mark(61) == 40
        runner.rewind(40)
        np.testing.assert_array_equal(runner.decode(5), answer[0])
        np.testing.assert_array_equal(runner.decode(6), answer[1])
        np.testing.assert_array_equal(_read(runner, tokens[40:]), second)
        runner.rewind(0)
        np.testing.assert_array_equal(_read(runner, tokens[:40]), first)


def test_its_state_goes_into_saved_sessions(folder: Path) -> None:
    with open_llm(folder, attention=SPARSE) as llm:
        runner, other = llm.start_runner(100), llm.start_runner(100)
        _read(runner, make_tokens(50))
        runner.decode(5)
        assert RunnerState.copy(runner, other)
        np.testing.assert_array_equal(other.decode(6), runner.decode(6))
        with pytest.raises(FormatError, match="does not fit"):
            RunnerState((1, 2), runner.save_state()[:-8], None).restore(other)


def test_turns_of_a_chat(folder: Path, tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with open_llm(folder, attention=SPARSE) as llm:
        first = llm.generate("the heart of the matter is ", greedy, keep_cache=True)
        llm.save_session(tmp_path / "session")
        text = "the heart of the matter is " + first.text + " all of it"
        whole = llm.generate(text, greedy, keep_cache=True)
        assert whole.stats.cached_tokens > 0
        assert whole.stats.memory_bytes["recurrent_state"] > 0
    with open_llm(folder, attention=SPARSE) as llm:
        llm.load_session(tmp_path / "session")
        assert llm.generate(text, greedy, keep_cache=True).token_ids == whole.token_ids


def test_what_knows_no_recurrent_layers_refuses(folder: Path) -> None:
    with open_llm(folder) as llm:
        assert llm.config.is_recurrent
        with pytest.raises(UsageError, match="without recurrent layers"):
            calibrate(llm, length=2048)


def _with_bias(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "CausalConvWithState")
    bias = onnx.numpy_helper.from_array(np.zeros(32, np.float32), "bias")
    graph.initializer.append(bias)
    node.input[2] = "bias"


def _with_silu(graph: onnx.GraphProto) -> None:
    set_attribute(
        next(n for n in graph.node if n.op_type == "CausalConvWithState"), "activation", "silu"
    )


def _with_other_gates(graph: onnx.GraphProto) -> None:
    mul = next(node for node in graph.node if node.name.endswith("conv/Mul_1"))
    mul.input[0], mul.input[1] = mul.input[0], mul.input[0]


def _without_gates(graph: onnx.GraphProto) -> None:
    next(node for node in graph.node if node.name.endswith("conv/Mul_2")).op_type = "Add"


def _with_unequal_parts(graph: onnx.GraphProto) -> None:
    split = next(node for node in graph.node if node.name.endswith("conv/Split"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([16, 48, 32]), "parts"))
    split.input[1] = "parts"


def _with_another_state(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "CausalConvWithState")
    node.op_type = "LinearAttention"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_with_bias, "a bias"),
        (_with_silu, "'activation' = 'silu'"),
        (_with_other_gates, "readers|parts of one projection"),
        (_without_gates, "goes to node .*Add"),
        (_with_unequal_parts, "does not part 96 channels in three"),
        (_with_another_state, "keeps a state of its own"),
    ],
)
def test_others_are_refused(
    folder: Path, tmp_path: Path, edit: Callable[[onnx.GraphProto], None], message: str
) -> None:
    copy = unpack("builder_lfm2_fp32", tmp_path / "model")[0]
    model = onnx.load(copy / "model.onnx", load_external_data=False)
    edit(model.graph)
    (copy / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FormatError, match=message):
        LLM(copy)


def test_the_core_s_convolution() -> None:
    """Against NumPy in float64, in pieces; wrong sizes are refused."""
    rng = np.random.default_rng(0)
    dim, n_taps, n = 40, 3, 11
    sizes = {"chunk_size": 8, "batch_size": 16, "max_context": 12, "n_layers": 2}
    attention = _core.ChunkedAttention(
        _core.dense_policy(), 2, 1, 8, **sizes, recurrent=[(n_taps - 1) * dim, 0]
    )
    bcy = rng.standard_normal((n, 3 * dim), np.float32)
    taps = rng.standard_normal((n_taps, dim), np.float32)
    b, c, y = np.split(bcy.astype(np.float64), 3, axis=1)
    u = np.concatenate([np.zeros((n_taps - 1, dim)), b * y])
    expected = c * sum(taps[j] * u[j : j + n] for j in range(n_taps))
    out = np.empty((n, dim), np.float32)
    for first, end in ((0, 5), (5, 6), (6, n)):
        attention.short_conv(0, bcy[first:end].copy(), taps, out[first:end])
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    assert attention.position(0) == n and attention.position(1) == 0
    q = np.zeros((1, 2, 8), np.float32)
    for call, message in (
        (lambda: attention.short_conv(1, bcy[:1], taps, out[:1]), "no recurrent state"),
        (lambda: attention.short_conv(2, bcy[:1], taps, out[:1]), "does not exist"),
        (lambda: attention.short_conv(0, bcy[:1], taps[:2], out[:1]), "do not go with"),
        (lambda: attention.short_conv(0, bcy[:1], taps, out[:2]), "writable arrays"),
        (lambda: attention.short_conv(0, bcy[:2], taps, out[:2]), "exceed the context"),
        (lambda: attention.run(0, q, q[:, :1], q[:, :1], is_last=True), "does not attend"),
        (lambda: attention.cache.keys(0), "does not attend"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
