"""Windows that the configuration beside a graph names, and the graph does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import LLM
from edgeh2o.cli.main import main
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


def set_type(folder: Path, name: str) -> None:
    """The architecture that genai_config.json names."""
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text())
    config["model"]["type"] = name
    path.write_text(json.dumps(config))


def windows_of(folder: Path) -> list[int]:
    with open_llm(folder) as llm:
        return [site.window for site in llm.model.decoder.sites]  # type: ignore[attr-defined]


def test_an_empty_list_means_all_layers(onnx_model: OnnxModelFactory, bare: Path) -> None:
    """The builder of onnxruntime-genai 0.18 writes it for Mistral, with no window in the graph."""
    set_type(bare, "mistral")
    edit_config(bare, sliding_window={"window_size": WINDOW, "layers": [], "cache_slack": 0})
    assert windows_of(bare) == [WINDOW, WINDOW]
    np.testing.assert_array_equal(logits(bare), logits(onnx_model(**SMALL, sliding_window=WINDOW)))


def test_an_empty_list_of_models_whose_layers_differ(bare: Path) -> None:
    """The builder writes it also for a Qwen 2 none of whose layers has the window."""
    set_type(bare, "qwen2")
    edit_config(bare, sliding_window={"window_size": WINDOW, "layers": []})
    with pytest.raises(FormatError, match=r"genai_config\.json.*which layers have it"):
        LLM(bare)
    config: dict[str, object] = {"model_type": "qwen2", "sliding_window": WINDOW}
    for kinds, windows in (
        (["full_attention", "full_attention"], [0, 0]),
        (["full_attention", "sliding_attention"], [0, WINDOW]),
    ):
        (bare / "config.json").write_text(json.dumps(config | {"layer_types": kinds}))
        assert windows_of(bare) == windows


def test_the_place_of_newer_versions(bare: Path) -> None:
    section = {"window_size": WINDOW, "layers": [1]}
    edit_config(bare, cache={"kv_cache": {"sliding_window": section}})
    assert windows_of(bare) == [0, WINDOW]
    edit_config(bare, sliding_window={"window_size": WINDOW + 1})
    assert windows_of(bare) == [0, WINDOW]


@pytest.mark.parametrize("section", [None, {"window_size": None}])
@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral"}, [WINDOW, WINDOW]),
        ({"model_type": "qwen2", "use_sliding_window": False}, [0, 0]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, [WINDOW, 0]),
    ],
)
def test_config_json_beside_a_genai_config_without_a_window(
    bare: Path, section: object, config: dict[str, Any], windows: list[int]
) -> None:
    edit_config(bare, sliding_window=section)
    (bare / "config.json").write_text(json.dumps({"sliding_window": WINDOW} | config))
    assert windows_of(bare) == windows


def test_the_list_of_genai_beats_config_json(bare: Path) -> None:
    edit_config(bare, sliding_window={"window_size": WINDOW, "layers": [1]})
    settings = {"model_type": "mistral", "sliding_window": 9}
    (bare / "config.json").write_text(json.dumps(settings))
    assert windows_of(bare) == [0, WINDOW]


@pytest.mark.parametrize("layers", [[5], [0, 2]])
def test_layers_that_the_model_lacks_are_refused(
    bare: Path, layers: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(bare, sliding_window={"window_size": WINDOW, "layers": layers})
    for verb, *flags in (["inspect"], ["run", "-p", "x"]):
        assert main([verb, str(bare), *flags]) == 1
        message = capsys.readouterr().err
        assert f"sliding_window.layers) gives layer {layers[-1]}" in message
        assert "the graph has 2 layers" in message


def test_layers_that_contradict_the_graph_are_refused(bare: Path) -> None:
    with edited(bare) as model:
        set_attribute(find_node(model, "GroupQueryAttention"), "local_window_size", WINDOW)
    own = windows_of(bare).index(WINDOW)
    edit_config(bare, sliding_window={"window_size": WINDOW, "layers": [own]})
    assert windows_of(bare)[own] == WINDOW
    edit_config(bare, sliding_window={"window_size": WINDOW, "layers": [0, 1]})
    with pytest.raises(FormatError, match=rf"layers \[0, 1\].*the graph layers \[{own}\]"):
        LLM(bare)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "mistral"}, "all"),
        ({"model_type": "starcoder2"}, "all"),
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
    "section",
    [
        {"window_size": 0},
        {"window_size": "7"},
        {"window_size": 9, "layers": [-1]},
        {"window_size": 9, "layers": [0.0]},
        {"window_size": 9, "layers": ["0"]},
        {"window_size": 9, "layers": [True]},
        {"window_size": 9, "layers": 1},
        "x",
    ],
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
