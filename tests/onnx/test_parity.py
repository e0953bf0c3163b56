"""With sparsity off an ONNX model gives the logits of onnxruntime's own run of the whole file."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import SamplingParams
from edgeh2o.errors import UsageError
from edgeh2o.export.decoder import DecoderExporter
from edgeh2o.export.onnx import MODEL_NAME
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.reading import RUNTIME, Uncut, make_tokens, open_llm, read_all
from tests.onnx.variants import (
    FIRST_RUNTIME,
    VARIANTS,
    WINDOWED,
    BiasedMultiHead,
    GroupQuery,
    Packed,
    RotatedGroupQuery,
    options_for,
)

TOLERANCE = 1e-4  # of logits with a standard deviation of about 2, in float32


@pytest.mark.parametrize("n_prompt", [1, 15, 64, 150])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_operator(
    onnx_model: OnnxModelFactory, variant: type[DecoderExporter], n_prompt: int
) -> None:
    if FIRST_RUNTIME.get(variant, (0,)) > RUNTIME:
        pytest.skip("this onnxruntime does not run it")
    folder = onnx_model(variant, **options_for(variant))
    tokens = make_tokens(n_prompt + 5)
    uncut = Uncut(folder / MODEL_NAME)
    expected = [uncut.read(tokens[:n_prompt])]  # without a past
    expected += [uncut.read(tokens[i : i + 1]) for i in range(n_prompt, n_prompt + 3)]
    expected.append(uncut.read(tokens[n_prompt + 3 :]))  # two tokens after a past
    with open_llm(folder) as llm:
        found = read_all(llm, tokens, n_prompt)
    np.testing.assert_allclose(found, np.concatenate(expected), atol=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "gemma2", "sliding_window": 24},
        {"architecture": "gemma3", "sliding_window": 24, "rope_base_sliding": 500.0},
        {"architecture": "qwen2"},
        {"architecture": "qwen3"},
        {"architecture": "olmo2"},
        {"architecture": "granite"},
        {"architecture": "exaone4", "n_layers": 4, "sliding_window": 24},
        {"architecture": "glm4", "rotary_dim": 16},
        {"architecture": "chatglm", "rotary_dim": 16},
        {"architecture": "pangu-embedded"},
        {"architecture": "seed_oss"},
        {"architecture": "smollm3", "n_layers": 4},
        {"architecture": "phi3", "rotary_dim": 16},
        {"architecture": "llama", "rope_scaling": "yarn", "original_context": 512},
        {"architecture": "llama", "biases": True, "tied": False},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("variant", [GroupQuery, Packed])
def test_every_architecture(
    onnx_model: OnnxModelFactory,
    variant: type[DecoderExporter],
    options: dict[str, object],
) -> None:
    folder = onnx_model(variant, **options)
    tokens = make_tokens(90)
    with open_llm(folder) as llm:
        found = read_all(llm, tokens, 80)
    np.testing.assert_allclose(found, Uncut(folder / MODEL_NAME).read(tokens), atol=TOLERANCE)


def test_partial_rotation_in_the_graph(onnx_model: OnnxModelFactory) -> None:
    folder = onnx_model(RotatedGroupQuery, architecture="phi3", rotary_dim=16)
    tokens = make_tokens(40)
    with open_llm(folder) as llm:
        found = read_all(llm, tokens, 33)
    np.testing.assert_allclose(found, Uncut(folder / MODEL_NAME).read(tokens), atol=TOLERANCE)


@pytest.mark.parametrize("variant", WINDOWED)
def test_windows(onnx_model: OnnxModelFactory, variant: type[DecoderExporter]) -> None:
    folder = onnx_model(variant, sliding_window=20, **options_for(variant))
    tokens = make_tokens(70)
    with open_llm(folder) as llm:
        found = read_all(llm, tokens, 60)
        assert {site.window for site in llm.model.decoder.sites} == {20}  # type: ignore[attr-defined]
    np.testing.assert_allclose(found, Uncut(folder / MODEL_NAME).read(tokens), atol=TOLERANCE)


def test_masks_bound_the_context(onnx_model: OnnxModelFactory) -> None:
    """A mask is tried out up to a length; beyond it the model is not run."""
    folder = onnx_model(BiasedMultiHead, context_length=20000, n_kv_heads=8)
    with open_llm(folder) as llm:
        assert llm.config.context_length == 16384
        with pytest.raises(UsageError, match="use -c 16384 or less"):
            llm.start_runner(16385)


def test_greedy_text_equals(onnx_model: OnnxModelFactory) -> None:
    folder = onnx_model(GroupQuery)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with open_llm(folder) as llm:
        result = llm.generate("the heart of the matter is that", greedy)
        prompt = np.array(llm.tokenize("the heart of the matter is that"))
    uncut = Uncut(folder / MODEL_NAME)
    expected = [int(uncut.read(prompt)[-1].argmax())]
    while len(expected) < 40:
        expected.append(int(uncut.read(np.array(expected[-1:]))[-1].argmax()))
    assert list(result.token_ids) == expected


def test_last_logits_only(onnx_model: OnnxModelFactory) -> None:
    """A model that gives the logits of the last token alone still gives those of any row."""
    tokens = make_tokens(30)
    rows = []
    for last_logits_only in (False, True):
        with open_llm(onnx_model(last_logits_only=last_logits_only)) as llm:
            rows.append(read_all(llm, tokens, 25))
    np.testing.assert_allclose(rows[1], rows[0], atol=TOLERANCE)


def test_any_number_of_threads_gives_the_same_text(onnx_model: OnnxModelFactory) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    texts = set()
    for threads in (1, 2, 3):
        with open_llm(onnx_model(), threads=threads) as llm:
            texts.add(llm.generate("of the and to", greedy).token_ids)
    assert len(texts) == 1
