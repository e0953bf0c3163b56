"""Files of qwen4exp: streams that are mixed, indexers of blocks, and a table of n-grams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from edgeh2o import _core
from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError, ResourceError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.models.mixed_streams import TABLE_TENSOR
from edgeh2o.runners.core_config import core_config
from edgeh2o.runners.native import NativeModelFile
from tests.model.model_pair import load_pair, prefill, relative_error
from tests.models.tiny_file import read, read_tiny, write_tiny
from tests.reference.decoder.ngrams import Ngrams, ngram_rows
from tests.reference.dense import DenseLayer
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors

SHAPE = {"n_layers": 4, "model_dim": 32, "n_heads": 2, "n_kv_heads": 2, "head_dim": 16}
SHAPE |= {"ffn_dim": 32, "n_experts": 3, "index_key_dim": 16}


def with_key(monkeypatch: pytest.MonkeyPatch, key: str, value: object) -> None:
    """Files get this value of the key after the architecture's name; None: they lack it."""

    def changed(original: Callable[..., None]) -> Callable[..., None]:
        def add(
            writer: GGUFWriter, name: str, given: object, *rest: object, **more: object
        ) -> None:
            if name == f"qwen4exp.{key}":
                given = value
            if given is not None:
                original(writer, name, given, *rest, **more)

        return add

    for name in ("add_uint32", "add_array", "add_key_value"):
        monkeypatch.setattr(GGUFWriter, name, changed(getattr(GGUFWriter, name)))


def test_layers_of_qwen4exp(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "qwen4exp", **SHAPE)
    assert [layer.mixer for layer in config.layers] == ["delta_net", "attention"] * 2
    assert (config.n_streams, config.stream_rank, config.norm_placement) == (4, 32, "none")
    first, second = config.layers[:2]
    assert first.has_delta_sigmoid and not first.index_top_k
    assert (first.history_rows, first.history_dim) == (3 * 3, 4 * 32)
    assert (second.index_heads, second.index_top_k, second.index_block_tokens) == (8, 24, 4)
    assert not any(layer.history_rows for layer in config.layers[1:])
    ngrams = config.ngrams
    assert ngrams is not None
    assert (ngrams.n_tokens, ngrams.n_heads_per_size, ngrams.row_dim) == (3, 2, 8)
    assert ngrams.factors[0] > 2**44 and ngrams.n_rows == sum(ngrams.sizes) + 5
    plain = read_tiny(tiny_model, "qwen4exp", **SHAPE, ngram_tokens=0, index_block_tokens=0)
    assert plain.ngrams is None and plain.index_top_k == 0 and plain.is_recurrent


def test_the_table_stays_in_the_file(tiny_model: TinyModelFactory) -> None:
    """And a copy of the file that becomes shorter costs an answer, not the process."""
    path = tiny_model(architecture="qwen4exp", **SHAPE)
    plain = tiny_model(architecture="qwen4exp", **SHAPE, ngram_tokens=0)
    config, bindings = read(path)
    assert TABLE_TENSOR not in {binding.info.name for binding in bindings}
    loaded = []
    for each in (path, plain):
        with NativeModelFile(each) as file:
            loaded.append(file.load().weight_bytes)
    assert config.ngrams is not None
    width, streams_dim = config.model_dim, config.n_streams * config.model_dim
    vectors = 4 * streams_dim * (3 + config.ngrams.n_taps)
    assert loaded[0] - loaded[1] == 4 * width * (streams_dim + width) + vectors


def test_a_file_that_becomes_shorter_costs_an_answer(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "qwen4exp", **SHAPE)
    with NativeModelFile(path) as file:
        core = file.load()._core_model
    sizes = {"max_context": 64, "batch_size": 32, "chunk_size": 16}
    session = _core.Sequence(core, _core.dense_policy(), **sizes)
    tokens = np.arange(5, 25, dtype=np.int32)
    session.prefill(tokens, is_last=True)
    with path.open("r+b") as file_to_cut, open_gguf(path) as gguf:
        content = path.read_bytes()
        file_to_cut.truncate(gguf.tensors[TABLE_TENSOR].offset)
    with pytest.raises(ResourceError, match="n-grams in the model's file cannot be read any more"):
        session.decode(7)
    path.write_bytes(content)
    session.reset()
    session.prefill(tokens, is_last=True)


@pytest.mark.parametrize("tensor_type", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_types_of_the_table(tiny_model: TinyModelFactory, tensor_type: str) -> None:
    """Rows that are read one by one are those of the file."""
    sizes = {**SHAPE, "model_dim": 256, "ngram_tokens": 3, "ngram_heads": 1}
    path = tiny_model(architecture="qwen4exp", tensor_type=tensor_type, **sizes)
    pair = load_pair(lambda **_: path)
    assert pair.reference.weights[TABLE_TENSOR].shape[1] == 128
    with open_gguf(path) as file:
        assert file.tensors[TABLE_TENSOR].type_name == tensor_type
    tokens = np.arange(5, 40, dtype=np.int32)
    session = pair.session(_core.dense_policy(), cache_type="f32")
    session.prefill(tokens, is_last=True)
    actual = session.row_logits(0, len(tokens))
    exact = pair.reference.start(DenseLayer).prefill(tokens)
    rounded = pair.as_computed(DenseLayer).prefill(tokens)
    bound = max(1e-5, 1.5 * relative_error(rounded, exact))
    assert relative_error(actual, exact) < bound


def test_an_end_of_text_hides_what_lies_before(tiny_model: TinyModelFactory) -> None:
    """By the reference, which the core is compared with; and by hand."""
    ngrams = Ngrams(0, 3, 1, 2, (1, 100, 10_000), (0, 50_000), (10**9, 10**9))
    assert ngram_rows(ngrams, [5]) == [5 ^ 200, 50_000 + (5 ^ 200 ^ 20_000)]
    assert ngram_rows(ngrams, [7, 6, 5]) == [5 ^ 600, 50_000 + (5 ^ 600 ^ 70_000)]
    hidden = [5 ^ 200, 50_000 + (5 ^ 200 ^ 20_000)]
    assert ngram_rows(ngrams, [7, 2, 5]) == hidden == ngram_rows(ngrams, [9, 2, 5])
    assert ngram_rows(ngrams, [2, 6, 5]) == [5 ^ 600, 50_000 + (5 ^ 600 ^ 20_000)]
    assert ngram_rows(ngrams, [7, 6, 2]) == [2 ^ 600, 50_000 + (2 ^ 600 ^ 70_000)]
    pair = load_pair(tiny_model, architecture="qwen4exp", **SHAPE)
    tokens = np.array([9, 2, 5, 6, 2, 2, 7, 8, 9, 2, 11, 12, 13, 2], np.int32)
    expected = pair.reference.start(DenseLayer).prefill(tokens)
    session = pair.session(_core.dense_policy(), cache_type="f32")
    for lengths in ((14,), (1, 4, 1, 8)):
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        assert relative_error(prefill(session, *parts), expected) < 2e-5


def test_tokens_before_must_be_known(tiny_model: TinyModelFactory) -> None:
    pair = load_pair(tiny_model, architecture="qwen4exp", **SHAPE)
    session, other = (pair.session(_core.dense_policy()) for _ in range(2))
    session.prefill(np.arange(5, 25, dtype=np.int32), is_last=True)
    other.load_state(session.save_state())
    with pytest.raises(ValueError, match="of 20 tokens that were read only 0 are known"):
        other.decode(5)


KEYS: Mapping[str, tuple[object, str]] = {
    "hyper_connection.count": (1, "'qwen4exp.hyper_connection.count' is 1, but must be"),
    "hyper_connection.low_rank": (0, "'qwen4exp.hyper_connection.low_rank' is 0"),
    "attention.indexer.key_length": (8, "'qwen4exp.attention.indexer.key_length' is 8"),
    "attention.indexer.top_k": (26, "top_k' is 26, which is not a multiple of the 4 tokens"),
    "attention.indexer.head_count": (0, "'qwen4exp.attention.indexer.head_count' is 0"),
    "attention.compress_ratios": ([0, 100, 0, 100], "'qwen4exp.attention.compress_ratios' is 100"),
    "ple.layers": ([1], "names layer 1, which is none of the 4 that do not attend"),
    "ple.ngram_size": (1, "'qwen4exp.ple.ngram_size' is 1"),
    "ple.heads_per_ngram": (500, "'qwen4exp.ple.heads_per_ngram' is 500"),
    "ple.conv_kernel": (99, "'qwen4exp.ple.conv_kernel' is 99"),
    "ple.eos_token_id": (320, "'qwen4exp.ple.eos_token_id' is 320"),
    "ple.layer_multipliers": ([1, 2], "'qwen4exp.ple.layer_multipliers' has 2 items, but must"),
    "ple.head_offsets": ([0, 0, 0], "'qwen4exp.ple.head_offsets' has 3 items, but must"),
    "ple.head_vocab_sizes": ([1, 0, 1, 1], "name ranges of no rows"),
    "embedding_length_per_layer_input": (16, "is 16, but 4 such rows must be as wide as"),
}


def test_keys_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more: list[tuple[str, object, str]] = [(key, *case) for key, case in KEYS.items()]
    more += [
        ("ple.layers", [0, 2], "names 2 layers, but only one with n-grams is supported"),
        ("ple.layers", [2**31 - 1], "names layer 2147483647"),
        ("ple.head_offsets", [0, 0, 0, 2**60], "beyond 1099511627776"),
        (
            "ple.head_offsets",
            [0, 0, 0, 1000],
            r"has shape \[8, 309\], .* make it \[8, 1091 or more",
        ),
        ("ple.conv_kernel", None, r"'qwen4exp.ple.conv_kernel' \(an integer\) is missing"),
        (
            "hyper_connection.count",
            None,
            r"'qwen4exp.hyper_connection.count' \(an integer\) is missing",
        ),
    ]

    def check(key: str, value: object, problem: str) -> None:
        with monkeypatch.context() as patch:
            with_key(patch, key, value)
            path = write_tiny(tmp_path, "qwen4exp", **SHAPE)
        with pytest.raises(FormatError, match=problem):
            read(path)

    for case in more:
        check(*case)


def test_tensors_that_cannot_be(tmp_path: Path) -> None:
    def without(tensors: Tensors) -> None:
        del tensors[TABLE_TENSOR]

    def cut(tensors: Tensors) -> None:
        tensors[TABLE_TENSOR] = tensors[TABLE_TENSOR][:300]

    def narrow(tensors: Tensors) -> None:
        tensors["blk.1.hc_ffn_norm.weight"] = tensors["blk.1.hc_ffn_norm.weight"][:-1]

    def many_taps(tensors: Tensors) -> None:
        tensors["blk.0.ple_conv1d.weight"] = np.repeat(tensors["blk.0.ple_conv1d.weight"], 2, 1)

    for edit, problem in (
        (without, "1 tensor of n-grams missing: 'per_layer_token_embd.weight'"),
        (cut, r"has shape \[8, 300\], but the hyperparameters make it \[8, 304 or more\]"),
        (narrow, r"'blk.1.hc_ffn_norm.weight' has shape \[127\]"),
        (many_taps, r"'blk.0.ple_conv1d.weight' has shape \[8, 128\]"),
    ):
        with pytest.raises(FormatError, match=problem):
            read(write_tiny(tmp_path, "qwen4exp", edit=edit, **SHAPE))


def test_indexers_of_layers_that_read_all_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_key(monkeypatch, "attention.compress_ratios", [0, 0, 0, 4])
    config, bindings = read(write_tiny(tmp_path, "qwen4exp", **SHAPE))
    assert [layer.index_block_tokens for layer in config.layers] == [0, 0, 0, 4]
    names = {binding.name for binding in bindings if ".indexer." in binding.name}
    assert names and all(name.startswith("blk.3.") for name in names)


def test_sizes_that_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "qwen4exp", **SHAPE)
    assert config.ngrams is not None
    ngrams = config.ngrams

    def layers(index: int, **changes: int) -> dict[str, object]:
        changed = list(config.layers)
        changed[index] = replace(changed[index], **changes)  # type: ignore[arg-type]
        return {"layers": tuple(changed)}

    for changes, problem in (
        ({"n_streams": 1}, "1 streams, mixed by vectors of 32"),
        ({"stream_rank": 0}, "4 streams, mixed by vectors of 0"),
        ({"norm_placement": "pre"}, "streams that are mixed have the norms of a layer"),
        ({"residual_scale": 0.5}, "streams are mixed before plain attention"),
        (layers(0, history_rows=8), "n-grams are looked up before one delta net"),
        (layers(1, history_rows=9, history_dim=128), "n-grams are looked up before one delta net"),
        (layers(1, index_block_tokens=5), "an indexer of keys of 16 dimensions for 24 tokens"),
        (layers(1, index_block_tokens=0), "an indexer"),
        ({"ngrams": replace(ngrams, layer=9)}, "n-grams are looked up in layer 9 of 4"),
        ({"ngrams": replace(ngrams, n_rows=200)}, "outside a table of 200"),
        ({"ngrams": replace(ngrams, row_dim=16)}, "4 rows of 16 numbers are as wide"),
        ({"ngrams": replace(ngrams, factors=(1, 2))}, "n-grams have a factor per token"),
        ({"ngrams": replace(ngrams, sizes=(0, 1, 1, 1))}, "outside a table"),
    ):
        with pytest.raises(FormatError, match=problem):
            core_config(replace(config, **changes))  # type: ignore[arg-type]
    core = _core.Model(core_config(config))
    with pytest.raises(ValueError, match="is not that of the model's n-grams"):
        core.set_ngram_rows(0, "F32", 0, ngrams.n_rows - 1, ngrams.row_dim)
    with pytest.raises(ValueError, match="no whole Q8_0 blocks"):
        core.set_ngram_rows(0, "Q8_0", 0, ngrams.n_rows, ngrams.row_dim)


def test_a_quantised_file(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    sizes = {**SHAPE, "model_dim": 256, "ffn_dim": 256, "n_layers": 2, "stream_rank": 64}
    sizes |= {"ngram_tokens": 2, "ngram_heads": 1}
    model = tiny_model(architecture="qwen4exp", **sizes)
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), "q4_k_m"]) == 0
    with open_gguf(tmp_path / "out.gguf") as file:
        types = {name: info.type_name for name, info in file.tensors.items()}
    assert types["blk.0.hc_attn_down.weight"] == types["blk.0.ple_key.weight"] == "Q4_K"
    assert types["blk.0.hc_attn_up.weight"] == "Q5_0"
    assert types[TABLE_TENSOR] == "F32"  # as it was
    # As llama-quantize leaves them.
    names = ("ple_conv1d", "hc_attn_norm", "ple_norm_query")
    assert {types[f"blk.0.{name}.weight"] for name in names} == {"F32"}
    assert types["blk.1.indexer.k_proj.weight"] == types["blk.1.indexer.q_proj.weight"] == "F32"
    assert main(["run", str(tmp_path / "out.gguf"), "-p", "the thing", "-n", "3"]) == 0
