"""What drafts for one model in the core, against float64 references and against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.formats.split import open_model_file
from edgeh2o.models.drafters import read_drafter
from edgeh2o.runners.drafting_layer import DraftingLayerFile
from edgeh2o.runners.native import NativeModel, NativeModelFile
from tests.drafter_cases import CASES, PROMPT
from tests.reference import drafters as reference
from tests.reference.decoder import ReferenceDecoder
from tests.reference.dense import DenseLayer

SIZES: dict[str, Any] = {
    "max_context": 256,
    "batch_size": 128,
    "chunk_size": 16,
    "cache_type": "f32",
}
EPS = 1e-5
TOLERANCE = 2e-4


def _load(paths: tuple[Path, Path]) -> tuple[NativeModel, _core.Model, Any]:
    """The model, what drafts for it, and how that was read."""
    with NativeModelFile(paths[0]) as file:
        model = file.load()
        gguf = open_model_file(paths[1])
        drafter = read_drafter(gguf, file.config)
        own = DraftingLayerFile(gguf, drafter, name="drafter", flag="--draft").pack(
            model._core_model
        )
        gguf.close()
    return model, own, drafter


def _weights(path: Path) -> dict[str, np.ndarray]:
    from gguf import GGUFReader

    return {
        each.name: np.asarray(each.data, np.float64).reshape(each.shape[::-1])
        for each in GGUFReader(path).tensors
        if each.name != "d2t"
    }


def _start(model: _core.Model, **options: Any) -> _core.Sequence:
    return _core.Sequence(model, _core.dense_policy(), **{**SIZES, **options})


@pytest.mark.parametrize("case", ["assistant", "assistant_own_keys"])
def test_an_assistant_reads_the_cache(case: str, tmp_path: Path) -> None:
    paths = CASES[case].write_both(tmp_path)
    model, own, drafter = _load(paths)
    # Keys that are cached by factors are read by their inverses.
    assert model._core_model.balances_keys is (case == "assistant_own_keys")
    tokens, latest = np.array(PROMPT, np.int32), 77
    main = _start(model._core_model)
    main.keeps_hidden = main.keeps_last_hidden = True
    main.prefill(tokens, is_last=True)
    assert main.hidden is not None and main.hidden.shape == (1, model.config.model_dim)
    of_main = ReferenceDecoder.from_gguf(paths[0])
    run = of_main.start(DenseLayer)
    run.prefill(tokens)
    np.testing.assert_allclose(main.hidden, run.hidden[-1:], atol=TOLERANCE)
    lenders = [layer.lender for layer in drafter.config.layers]
    config = of_main.config
    assert lenders == [4, 4, 5]
    kv = run._attention._kv
    weights, embedding = _weights(paths[1]), of_main.weights["token_embd.weight"]
    hidden, token = run.hidden[-1], latest
    rows, position = main.hidden, len(tokens)
    readers = [_core.LentReader(own, threads) for threads in (1, 2)]
    for _ in range(3):
        expected, hidden = reference.guess_by_cache(
            weights,
            embedding[token].astype(np.float64) * config.embedding_scale,
            hidden,
            [kv[config.kv_layers[i]] for i in lenders],
            [config.inv_freq[i] for i in lenders],
            [config.windows[i] for i in lenders],
            position=position,
            eps=EPS,
        )
        (logits, found), other = (reader.guess(main, token, rows) for reader in readers)
        assert np.array_equal(logits, other[0]) and np.array_equal(found, other[1])
        np.testing.assert_allclose(logits, expected, atol=5 * TOLERANCE)
        np.testing.assert_allclose(found[0], hidden, atol=5 * TOLERANCE)
        assert main.position == position  # it stays as it is
        rows, token = found, int(np.argmax(logits))
    with pytest.raises(ValueError, match="hidden rows must be"):
        readers[0].guess(main, latest, rows[:, 1:])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        readers[0].guess(main, 320, rows)
    main.reset()
    with pytest.raises(ValueError, match="nothing yet to guess by"):
        readers[0].guess(main, latest, rows)
    another, *_ = _load(paths)
    with pytest.raises(ValueError, match="is of another model"):
        readers[0].guess(_start(another._core_model), latest, rows)
    with pytest.raises(ValueError, match="no sequence of its own"):
        _start(own)


@pytest.mark.parametrize("case", ["eagle3", "eagle3_normed", "eagle3_shared"])
def test_rows_before_layers_become_guesses(case: str, tmp_path: Path) -> None:
    paths = CASES[case].write_both(tmp_path)
    model, own, drafter = _load(paths)
    tokens = np.array(PROMPT, np.int32)
    main = _start(model._core_model)
    main.hidden_layers, main.keeps_hidden = list(drafter.hidden_layers), True
    before: dict[int, np.ndarray] = {}

    def look(layer: int, residual: np.ndarray, *_: Any) -> None:
        before[layer] = residual.copy()

    main.prefill(tokens, is_last=True, on_attention=look)
    features = main.hidden
    assert features is not None and features.shape == (60, 3 * model.config.model_dim)
    seen = [layer for layer in drafter.hidden_layers if layer in before]
    assert len(seen) >= 2  # of the last layer nobody is shown the attention
    width = model.config.model_dim
    for i, layer in enumerate(drafter.hidden_layers):
        if layer in seen:
            assert np.array_equal(features[:, i * width : (i + 1) * width], before[layer])

    of_main = ReferenceDecoder.from_gguf(paths[0])
    weights = _weights(paths[1])
    weights.setdefault("output.weight", of_main.weights["output.weight"].astype(np.float64))
    embedding = weights.get("token_embd.weight", of_main.weights["token_embd.weight"])
    run = reference.Eagle3Run(
        weights,
        head_dim=model.config.head_dim,
        inv_freq=of_main.config.inv_freq[0],
        eps=EPS,
        norms_residual=bool(CASES[case].options.get("norms_residual")),
    )
    session = _start(own, threads=2)
    session.keeps_hidden = True
    encoded = session.encode(features)
    wanted = reference.encode(weights, features.astype(np.float64), eps=EPS)
    np.testing.assert_allclose(encoded, wanted, atol=TOLERANCE)
    session.prefill(tokens[1:40], is_last=False, hidden=encoded[:39])
    run.read(embedding[tokens[1:40]].astype(np.float64), wanted[:39])
    found = session.decode_batch(tokens[40:50], encoded[39:49])
    session.accept(9)
    expected, _ = run.read(embedding[tokens[40:50]].astype(np.float64), wanted[39:49])
    np.testing.assert_allclose(found, expected, atol=5 * TOLERANCE)
    session.prefill(tokens[50:], is_last=False, hidden=encoded[49:59])
    run.read(embedding[tokens[50:]].astype(np.float64), wanted[49:59])
    rows, hidden = encoded[59:], wanted[59:]
    for token in (99, 55, 120):
        logits = session.decode(token, rows)
        expected, hidden = run.read(embedding[[token]].astype(np.float64), hidden)
        rows = session.hidden
        np.testing.assert_allclose(logits, expected[0], atol=5 * TOLERANCE)
        np.testing.assert_allclose(rows, hidden, atol=5 * TOLERANCE)
    with pytest.raises(ValueError, match="hidden rows must be"):
        session.encode(features[:, 1:])
    with pytest.raises(ValueError, match="different layers of 4"):
        main.hidden_layers = [2, 1]
    with pytest.raises(ValueError, match="different layers of 4"):
        main.hidden_layers = [1, 4]


@pytest.mark.parametrize("case", ["dflash", "dflash_windows", "dflash_few_tokens"])
def test_blocks_see_themselves_and_what_is_cached(case: str, tmp_path: Path) -> None:
    paths = CASES[case].write_both(tmp_path)
    model, own, drafter = _load(paths)
    tokens, config = np.array(PROMPT, np.int32), drafter.config
    main = _start(model._core_model)
    main.hidden_layers, main.keeps_hidden = list(drafter.hidden_layers), True
    main.prefill(tokens, is_last=True)
    features = main.hidden
    assert features is not None
    of_main, weights = ReferenceDecoder.from_gguf(paths[0]), _weights(paths[1])
    embedding = weights.get("token_embd.weight", of_main.weights["token_embd.weight"])
    weights.setdefault("output.weight", embedding)
    encoded = reference.encode(weights, features.astype(np.float64), eps=EPS, norms_after=True)
    block = np.array([77, *[drafter.mask_token] * 4], np.int32)
    expected = reference.guess_block(
        weights,
        embedding[block].astype(np.float64),
        encoded,
        n_layers=config.n_layers,
        head_dim=config.head_dim,
        inv_freq=np.array(config.rope_inv_freq, np.float64),
        windows=[layer.window or None for layer in config.layers],
        eps=EPS,
    )
    assert any(layer.window for layer in config.layers) is (case == "dflash_windows")
    found = []
    for threads, parts in ((1, (60,)), (2, (20, 17, 23))):
        session = _start(own, threads=threads)
        rows = session.encode(features)
        np.testing.assert_allclose(rows, encoded, atol=TOLERANCE)
        first = 0
        for n in parts:
            session.prefill(tokens[first : first + n], is_last=False, hidden=rows[first:][:n])
            first += n
            session.decode_batch(block)  # which leaves nothing behind
            session.rewind(first)
        found.append(session.decode_batch(block))
        np.testing.assert_allclose(found[-1], expected, atol=5 * TOLERANCE)
    assert np.array_equal(found[0], found[1])
    with pytest.raises(ValueError, match="there are no logits"):
        session.prefill(tokens[:1], is_last=True, hidden=rows[:1])
    with pytest.raises(ValueError, match="hidden row beside every token"):
        session.decode(5, rows[:1])


def test_rows_that_are_kept_change_nothing(tmp_path: Path) -> None:
    """Neither logits of prompts, whose last layers are else computed for one token, nor others."""
    paths = CASES["assistant"].write_both(tmp_path)
    with NativeModelFile(paths[0]) as file:
        model = file.load()._core_model
    tokens = np.array(PROMPT, np.int32)
    results = []
    for layers, is_last_only in ((None, False), ([], False), ([], True), ([0, 3, 5], False)):
        session = _start(model)
        if layers is not None:
            session.keeps_hidden, session.keeps_last_hidden = True, is_last_only
            session.hidden_layers = layers
        first = session.prefill(tokens[:40], is_last=False)
        assert first is None
        rows = [session.hidden]
        results.append([session.prefill(tokens[40:], is_last=True)])
        rows.append(session.hidden)
        results[-1].append(session.decode_batch(tokens[:3]))
        session.accept(1)
        if layers is not None:
            sizes = [0 if each is None else len(each) for each in (*rows, session.hidden)]
            assert sizes == [0, 1, 3] if is_last_only else [40, 20, 3]
        workspace = session.workspace
        other = _core.Sequence(model, _core.dense_policy(), workspace=workspace, **SIZES)
        other.prefill(tokens[:9], is_last=True)
        if layers is not None:
            other.keeps_hidden, other.hidden_layers = True, layers
        # Together with another one.
        results[-1] += workspace.forward([(session, tokens[5:7], None), (other, tokens[8:9], None)])
        if layers is not None:
            assert session.hidden.shape[0] == 2 and other.hidden.shape[0] == 1
    for other_result in results[1:]:
        for one, two in zip(results[0], other_result, strict=True):
            assert np.array_equal(one, two)
