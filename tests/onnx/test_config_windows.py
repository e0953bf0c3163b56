"""Windows that the configuration beside a graph names, and the graph does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import LLM
from edgeh2o.errors import FormatError
from edgeh2o.export.onnx import CONFIG_NAME
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import (
    SMALL,
    copy_folder,
    edit_config,
    edited,
    find_node,
    set_attribute,
)
from tests.onnx.reading import make_tokens, open_llm, read_all

WINDOW = 20
TOKENS = make_tokens(70)


@pytest.fixture
def bare(onnx_model: OnnxModelFactory, tmp_path: Path) -> Path:
    """A model with windows in all layers, whose graph forgot them."""
    folder = copy_folder(onnx_model(**SMALL, sliding_window=WINDOW), tmp_path / "model")
    with edited(folder) as model:
        for node in model.graph.node:
            if node.op_type == "GroupQueryAttention":
                set_attribute(node, "local_window_size", -1)
    return folder


def logits(folder: Path) -> np.ndarray:
    with open_llm(folder) as llm:
        return read_all(llm, TOKENS, 60)


def test_a_window_of_genai_is_applied(onnx_model: OnnxModelFactory, bare: Path) -> None:
    expected = logits(onnx_model(**SMALL, sliding_window=WINDOW))
    assert np.abs(logits(bare) - expected).max() > 0.1
    edit_config(bare, sliding_window={"window_size": WINDOW, "slide_key_value_cache": True})
    np.testing.assert_array_equal(logits(bare), expected)
    with edited(bare) as model:  # a graph that has windows knows better
        set_attribute(find_node(model, "GroupQueryAttention"), "local_window_size", 30)
    with open_llm(bare) as llm:
        assert sorted({site.window for site in llm.model.decoder.sites}) == [0, 30]  # type: ignore[attr-defined]


def test_only_the_layers_that_are_listed(bare: Path) -> None:
    edit_config(bare, sliding_window={"window_size": WINDOW, "layers": [1]})
    with open_llm(bare) as llm:
        windows = [site.window for site in llm.model.decoder.sites]  # type: ignore[attr-defined]
    assert windows == [WINDOW if layer == 1 else 0 for layer in range(len(windows))]


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "mistral"}, "all"),
        ({"model_type": "qwen2", "use_sliding_window": False}, "none"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "second"),
        ({"model_type": "mistral", "sliding_window": 10**6}, "none"),
    ],
)
def test_a_window_of_transformers(bare: Path, config: dict[str, Any], layers: str) -> None:
    (bare / CONFIG_NAME).unlink()
    settings = {"sliding_window": WINDOW, "num_attention_heads": 4, "head_dim": 16} | config
    (bare / "config.json").write_text(json.dumps(settings))
    with open_llm(bare) as llm:
        windows = [site.window for site in llm.model.decoder.sites]  # type: ignore[attr-defined]
    chosen = {"all": range(len(windows)), "none": (), "second": (1,)}[layers]
    assert windows == [WINDOW if layer in chosen else 0 for layer in range(len(windows))]


def test_windows_of_unknown_layers_are_refused(bare: Path) -> None:
    (bare / CONFIG_NAME).unlink()
    settings = {"sliding_window": WINDOW, "num_attention_heads": 4, "head_dim": 16}
    (bare / "config.json").write_text(json.dumps(settings))
    with pytest.raises(FormatError, match=r"sliding window of 20.*which layers have it"):
        LLM(bare)


@pytest.mark.parametrize(
    "section", [{"window_size": 0}, {"window_size": "7"}, {"window_size": 9, "layers": [-1]}, "x"]
)
def test_sections_that_cannot_be(bare: Path, section: object) -> None:
    edit_config(bare, sliding_window=section)
    with pytest.raises(FormatError, match="sliding_window") as error:
        LLM(bare)
    assert str(error.value).count(str(bare)) <= 1


def test_a_cache_that_slides_is_read_as_its_window(
    onnx_model: OnnxModelFactory, bare: Path
) -> None:
    """What onnxruntime-genai's builder writes for layers with a window."""
    with edited(bare) as model:
        for node in model.graph.node:
            if node.op_type == "GroupQueryAttention":
                set_attribute(node, "local_window_size", WINDOW)
                set_attribute(node, "sliding_window_cache", 1)
    expected = logits(onnx_model(**SMALL, sliding_window=WINDOW))
    np.testing.assert_array_equal(logits(bare), expected)
    with edited(bare) as model:
        set_attribute(find_node(model, "GroupQueryAttention"), "local_window_size", -1)
    with pytest.raises(FormatError, match="a cache of a window, but no window"):
        LLM(bare)
