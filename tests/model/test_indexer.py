"""Sparse attention of the model's own (DSA): its choice, its cache, what is refused beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from edgeh2o import _core
from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError
from edgeh2o.runners.core_config import core_config
from tests.model.model_pair import (
    CHUNK_SIZE,
    MAX_CONTEXT,
    ModelPair,
    clear_prompt,
    decode_noting_reads,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
    split,
)
from tests.models.tiny_file import changed_key, read
from tests.reference.decoder import ReferenceDecoder
from tests.reference.dense import DenseLayer
from tests.tiny_models import TinyModelFactory
from tools.make_tiny_model import write_tiny_model

SHAPE = {"n_layers": 3, "model_dim": 64, "n_heads": 4, "ffn_dim": 32, "n_experts": 0}
KINDS: dict[str, dict[str, object]] = {
    "deepseek32": {"architecture": "deepseek32", **SHAPE},
    "glm-dsa": {"architecture": "glm-dsa", "indexer_period": 2, **SHAPE},
}
TOP_K, KEY_DIM, ROW_DIM = 24, 32, 48 + 16
N_TOKENS = 3 * CHUNK_SIZE + 17


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tiny_model: TinyModelFactory) -> ModelPair:
    return load_pair(tiny_model, **KINDS[request.param])


def reading_all(pair: ModelPair) -> ReferenceDecoder:
    """The model without its indexers."""
    config = replace(pair.reference.config, index_top_k=0)
    return ReferenceDecoder(config, pair.reference.weights)


def test_as_few_tokens_as_are_read_are_all_read(pair: ModelPair) -> None:
    tokens = clear_prompt(pair, N_TOKENS)
    dense = reading_all(pair).start(DenseLayer).prefill(tokens)
    actual = prefill(pair.session(_core.dense_policy(), cache_type="f32"), tokens)
    assert relative_error(actual[:TOP_K], dense[:TOP_K]) < 2e-5
    assert relative_error(actual[TOP_K:], dense[TOP_K:]) > 0.05


@pytest.mark.parametrize("architecture", KINDS)
def test_a_large_top_k_is_dense(tiny_model: TinyModelFactory, architecture: str) -> None:
    tokens = random_tokens(N_TOKENS)
    for top_k in (N_TOKENS, 2**24):
        pair = load_pair(tiny_model, **KINDS[architecture], index_top_k=top_k)
        expected = reading_all(pair).start(DenseLayer).prefill(tokens)
        session = pair.session(_core.dense_policy(), cache_type="f32")
        assert relative_error(prefill(session, tokens), expected) < 2e-5
        # Nothing is chosen, but sessions and longer contexts have the indexers' keys.
        assert [rows.nbytes for rows in session.cached_rows()] == rows_of(architecture, 4)


def rows_of(architecture: str, value_bytes: int) -> list[int]:
    """Bytes of every layer's rows, and of its indexer's keys, of the tokens of a prompt."""
    own = [layer % KINDS[architecture].get("indexer_period", 1) == 0 for layer in range(3)]  # type: ignore[operator]
    return [
        N_TOKENS * dim * value_bytes
        for has_own in own
        for dim in ((ROW_DIM, KEY_DIM) if has_own else (ROW_DIM,))
    ]


@pytest.mark.parametrize(("cache_type", "bound"), [("f32", 2e-5), ("f16", 1e-3), ("q8_0", 1e-2)])
def test_cache_types(pair: ModelPair, cache_type: str, bound: float) -> None:
    """A key that is rounded the other way decides near ties otherwise: that moves single rows."""
    tokens = clear_prompt(pair, N_TOKENS)
    expected = pair.reference.start(DenseLayer, cache_type=cache_type).prefill(tokens)
    session = pair.session(_core.dense_policy(), cache_type=cache_type)
    actual = prefill(session, tokens)
    errors = np.sqrt(np.mean((actual - expected) ** 2, axis=1)) / np.std(expected)
    assert np.median(errors) < bound and np.quantile(errors, 0.9) < 3 * bound
    session.reset()
    session.prefill(tokens[:-5], is_last=True)
    decoded = np.stack([session.decode(int(token)) for token in tokens[-5:]])
    assert relative_error(decoded, actual[-5:]) < 1e-3


def test_what_is_kept(tiny_model: TinyModelFactory) -> None:
    """The keys of indexers have 16 bits where rows have 8."""
    for architecture, options in KINDS.items():
        pair = load_pair(tiny_model, **options)
        session = pair.session(_core.dense_policy(), cache_type="f16")
        session.prefill(random_tokens(N_TOKENS), is_last=True)
        kept = rows_of(architecture, 2)
        assert [rows.nbytes for rows in session.cached_rows()] == kept
        of_context = sum(kept) // N_TOKENS * MAX_CONTEXT
        assert session.memory_bytes["kv_cache"] == of_context
        small = pair.session(_core.dense_policy(), cache_type="q8_0")
        n_rows, n_keys = 3, len(kept) - 3
        bytes_per_token = n_rows * ROW_DIM // 32 * 34 + n_keys * KEY_DIM * 2
        assert small.memory_bytes["kv_cache"] == MAX_CONTEXT * bytes_per_token
        # A generated token reads all keys of indexers, and the rows that they choose.
        before = session.decode_bytes
        session.decode(5)
        read_bytes = (n_keys * (N_TOKENS + 1) * KEY_DIM + n_rows * TOP_K * ROW_DIM) * 2
        assert n_keys == 3 - (architecture == "glm-dsa")
        assert session.decode_bytes - before == read_bytes


def test_threads_and_calls_change_nothing(pair: ModelPair) -> None:
    tokens = random_tokens(N_TOKENS)
    sizes = {"max_context": MAX_CONTEXT, "batch_size": MAX_CONTEXT, "chunk_size": CHUNK_SIZE}

    def run(threads: int, *lengths: int) -> np.ndarray:
        workspace = _core.Workspace(pair.core, threads)
        session = _core.Sequence(pair.core, _core.dense_policy(), workspace=workspace, **sizes)
        for i, part in enumerate(split(tokens, lengths)):
            logits = session.prefill(part, is_last=i == len(lengths) - 1)
        return np.stack([logits, session.decode(5), session.decode(6)])

    expected = run(1, N_TOKENS)
    for threads in (2, 3):
        np.testing.assert_array_equal(run(threads, N_TOKENS), expected)
    halves = (2 * CHUNK_SIZE, N_TOKENS - 2 * CHUNK_SIZE)
    np.testing.assert_array_equal(run(2, *halves), run(1, *halves))
    assert relative_error(run(1, *halves), expected) < 1e-3


def test_a_batch_of_tokens_is_decoded_as_one_by_one(pair: ModelPair) -> None:
    """Also where the first of them still see everything."""
    for n in (TOP_K - 3, 90):
        session = pair.session(_core.dense_policy())
        session.prefill(random_tokens(n), is_last=True)
        tokens = np.array([5, 9, 11, 300, 17, 4, 200, 8], np.int32)
        together = session.decode_batch(tokens)
        session.rewind(n)
        alone = np.stack([session.decode(int(token)) for token in tokens])
        np.testing.assert_allclose(together, alone, atol=2e-4)


@pytest.mark.parametrize("n", [TOP_K - 5, N_TOKENS - 1])
def test_generated_tokens_read_what_was_chosen(pair: ModelPair, n: int) -> None:
    tokens = clear_prompt(pair, N_TOKENS)
    run, (first, second, last) = decode_noting_reads(pair, tokens, n)
    np.testing.assert_array_equal(last, run.chosen[0])
    assert len(last) == min(n + 1, TOP_K)
    shares = "blk.1.indexer.proj.weight" not in pair.reference.weights
    assert np.array_equal(second, first) == (shares or n < TOP_K)


@pytest.mark.parametrize(
    ("tensor", "factor", "chosen"),
    [("proj.weight", 0.0, range(TOP_K)), ("k_norm.bias", np.nan, [N_TOKENS - 1])],
)
def test_of_equal_scores_the_first_are_read_and_without_any_the_token_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensor: str,
    factor: float,
    chosen: Sequence[int],
) -> None:
    """Heads without weight make all scores 0, and keys that are no numbers make none."""
    original = GGUFWriter.add_tensor

    def add(writer: GGUFWriter, name: str, values: np.ndarray, **options: object) -> None:
        is_it = name.endswith(f"indexer.{tensor}")
        original(writer, name, values * np.float32(factor if is_it else 1.0), **options)

    monkeypatch.setattr(GGUFWriter, "add_tensor", add)
    path = write_tiny_model(tmp_path / "tiny.gguf", **KINDS["deepseek32"])
    pair = load_pair(lambda **_: path)
    tokens = random_tokens(N_TOKENS)
    run = pair.reference.start(DenseLayer)
    expected = run.prefill(tokens)
    np.testing.assert_array_equal(run.chosen[-1], chosen)
    session = pair.session(_core.dense_policy(), cache_type="f32")
    assert relative_error(prefill(session, tokens), expected) < 2e-5


def test_rules_beside_it_are_refused_by_the_core(pair: ModelPair) -> None:
    for rule in (_core.h2o_policy(12, 4), _core.quest_policy(page_size=2, tokens=8)):
        with pytest.raises(ValueError, match=r"what this model reads its own indexer chooses"):
            pair.session(rule)


def test_rules_beside_it_are_refused_by_name(
    tiny_model: TinyModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny_model(**KINDS["deepseek32"], context_length=512))
    flags = ["-p", "the art of war " * 40, "-n", "4", "--temp", "0"]
    outputs = []
    for more in ([], ["--attention", "dense"], ["--lookup", "off"], ["-t", "2"]):
        assert main(["run", path, *flags, *more]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1 and outputs[0].strip()
    # A smaller chunk clamps what is asked for by default, and is no wish for another rule.
    assert main(["run", path, *flags, "-ub", "64", "-b", "128", "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["attention"] == {"algorithm": "dense", "indexer_top_k": TOP_K}
    for more in (
        ["--attention", "h2o"],
        ["--budget", "64"],
        ["--decode-attention", "headwise"],
    ):
        assert main(["run", path, *flags, *more]) == 2
        message = capsys.readouterr().err
        assert "queries of this model (deepseek32) read what its own indexer chooses" in message
        assert "leave --attention and its flags out" in message
    assert main(["calibrate", path, "-o", str(tmp_path / "table.json")]) == 2
    assert "calibration is for models that have no indexer" in capsys.readouterr().err
    assert main(["inspect", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attention"]["indexer_top_k"] == TOP_K
    assert main(["run", path, *flags, "-n", "600", "-c", "512", "--context-full", "evict"]) == 2
    assert "its own indexer chooses" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"index_key_dim": 8}, "an indexer with keys of 8 dimensions, of which 16 are rotated"),
        ({"index_heads": 0}, "an indexer of 0 heads of 32"),
        ({"index_heads": 0, "index_key_dim": 0}, "a layer reads what no layer before it has"),
        ({"window": 8}, "an indexer chooses for latent attention without a window"),
    ],
)
def test_layers_that_the_core_refuses(
    tiny_model: TinyModelFactory, change: dict[str, int], problem: str
) -> None:
    config, _ = read(tiny_model(**KINDS["deepseek32"]))
    layers = (replace(config.layers[0], **change), *config.layers[1:])  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=problem):
        core_config(replace(config, layers=layers))


def test_layers_that_share(tiny_model: TinyModelFactory) -> None:
    config, bindings = read(tiny_model(**KINDS["glm-dsa"]))
    assert [layer.index_heads for layer in config.layers] == [8, 0, 8]
    assert {layer.index_top_k for layer in config.layers} == {TOP_K} == {config.index_top_k}
    reordered = {each.name for each in bindings if ".indexer." in each.name and each.row_order}
    assert reordered == {
        f"blk.{layer}.indexer.{name}"
        for layer in (0, 2)
        for name in ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias")
    }
    _, bindings = read(tiny_model(**KINDS["deepseek32"]))
    own = [each for each in bindings if ".indexer." in each.name]
    assert len(own) == 3 * 5 and not any(each.row_order for each in own)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("indexer.key_length", 8, "'glm-dsa.attention.indexer.key_length' is 8, but must be"),
        ("indexer.top_k", 0, "'glm-dsa.attention.indexer.top_k' is 0, but must be"),
        ("indexer.head_count", 2**20, "'glm-dsa.attention.indexer.head_count'"),
        ("indexer.types", [False, True, True], "says that the first layer reads what a layer"),
        ("indexer.types", [True, False], "'glm-dsa.attention.indexer.types'"),
        ("indexer.types", [1, 0, 1], "'glm-dsa.attention.indexer.types' is"),
        ("q_lora_rank", 0, "'glm-dsa.attention.q_lora_rank' is missing or 0"),
    ],
)
def test_numbers_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, problem: str
) -> None:
    with changed_key(monkeypatch, f"glm-dsa.attention.{key}", value):
        path = write_tiny_model(tmp_path / "tiny.gguf", **KINDS["glm-dsa"])
    with pytest.raises(FormatError, match=problem):
        read(path)
