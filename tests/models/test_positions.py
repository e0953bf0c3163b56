"""What files say of positions: windows of layers, rotary embeddings and their scalings."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from edgeh2o.errors import FormatError
from edgeh2o.model_config import DecoderConfig
from edgeh2o.models.rope import RopeScaling, attention_factor, inverse_frequencies
from tests.models.tiny_file import SHAPE, read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory

# Of models with windows only layers with one have positions.
ROTATING_WINDOWS = ("exaone4", "afmoe", "muse-glimmer", "smallthinker")


@pytest.mark.parametrize(
    ("architecture", "options", "layers"),
    [
        ("llama", {}, ""),
        ("llama", {"sliding_window": 5}, "wwwwww"),
        ("llama", {"sliding_window": 0}, ""),
        ("phi3", {"sliding_window": 5}, "wwwwww"),
        ("phi3", {"sliding_window": 0}, ""),
        ("phimoe", {"sliding_window": 2047}, "wwwwww"),
        ("phimoe", {"sliding_window": 2048}, ""),  # as wide as the context
        ("phi3", {"sliding_window": 2047}, "wwwwww"),
        ("phi3", {"sliding_window": 4096}, ""),  # the 128k models: else no prompt were sparse
        ("gemma2", {"sliding_window": 5}, "w.w.w."),
        ("gemma2", {}, "w.w.w."),
        ("gemma3", {}, ""),
        ("gemma3", {"sliding_window": 5}, "wwwww."),
        ("gemma3", {"sliding_window": 5, "sliding_window_pattern": 3}, "ww.ww."),
        ("gemma3", {"sliding_window": 5, "sliding_window_pattern": 1}, ""),
        ("olmo2", {"sliding_window": 5}, "www.ww"),
        ("mellum", {"sliding_window": 5}, "www.ww"),
        ("afmoe", {"sliding_window": 5}, "www.ww"),
        ("laguna", {"sliding_window": 5}, ".www.w"),
        ("muse-glimmer", {"sliding_window": 5, "sliding_window_pattern": 4}, "www.ww"),
        ("laguna", {"sliding_window": 5, "sliding_window_pattern": 2}, ".w.w.w"),
        ("smallthinker", {}, ""),
        ("smallthinker", {"sliding_window": 5}, ".www.w"),
        ("exaone4", {}, ""),
        ("exaone4", {"sliding_window": 5}, "www.ww"),
        ("exaone4", {"n_layers": 64}, "www." * 16),
    ],
)
def test_layers_with_a_window(
    tiny_model: TinyModelFactory, architecture: str, options: dict[str, object], layers: str
) -> None:
    config = read_tiny(tiny_model, architecture, **options)
    width = options.get("sliding_window", 4096)
    expected = [width if layer == "w" else 0 for layer in layers or "." * SHAPE["n_layers"]]
    assert [layer.window for layer in config.layers] == expected
    has_rope = [
        not layers or architecture not in ROTATING_WINDOWS or layer == "w" for layer in layers
    ]
    assert [layer.has_rope for layer in config.layers] == (has_rope or [True] * SHAPE["n_layers"])


def test_a_pattern_may_be_an_array(read_with_key: Callable[..., DecoderConfig]) -> None:
    pattern = (True, True, False, False, True, False)

    def add(writer: GGUFWriter) -> None:
        writer.add_sliding_window_pattern(list(pattern))

    config = read_with_key("gemma3", add, sliding_window=5)
    assert [layer.window for layer in config.layers] == [5 * has_window for has_window in pattern]


def test_layers_with_a_window_have_their_own_rope(tiny_model: TinyModelFactory) -> None:
    scaled = {"sliding_window": 5, "rope_base": 1e6, "rope_scaling": "linear"}
    gemma3 = read_tiny(tiny_model, "gemma3", **scaled)
    np.testing.assert_allclose(gemma3.sliding_rope_inv_freq, [1.0, 0.1, 0.01, 0.001])
    assert gemma3.rope_inv_freq[0] == 0.25
    other_base = read_tiny(tiny_model, "gemma3", **scaled, rope_base_sliding=16.0)
    np.testing.assert_allclose(other_base.sliding_rope_inv_freq, [1.0, 0.5, 0.25, 0.125])
    assert read_tiny(tiny_model, "gemma2", **scaled).sliding_rope_inv_freq == ()
    olmo3 = read_tiny(tiny_model, "olmo2", **scaled)
    np.testing.assert_allclose(np.divide(olmo3.sliding_rope_inv_freq, olmo3.rope_inv_freq), 4.0)
    mellum = read_tiny(tiny_model, "mellum", **scaled)
    np.testing.assert_allclose(np.divide(mellum.sliding_rope_inv_freq, mellum.rope_inv_freq), 4.0)


def test_windows_may_rotate_another_part_of_heads(tiny_model: TinyModelFactory) -> None:
    options = {"sliding_window": 5, "rotary_dim": 4}
    config = read_tiny(tiny_model, "laguna", rotary_dim_sliding=8, **options)
    assert (len(config.rope_inv_freq), len(config.sliding_rope_inv_freq)) == (2, 4)
    assert len(read_tiny(tiny_model, "laguna", **options).sliding_rope_inv_freq) == 2


def test_a_granite_without_positions(read_with_key: Callable[..., DecoderConfig]) -> None:
    config = read_with_key("granite", lambda writer: writer.add_rope_scaling_finetuned(False))
    assert config.rope_inv_freq == (0.0,) * 4


def test_every_fourth_layer_of_smollm3_has_no_positions(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "smollm3")
    assert [layer.has_rope for layer in config.layers] == [True, True, True, False, True, True]


def test_files_may_say_which_layers_are_rotated(tiny_model: TinyModelFactory) -> None:
    pattern = (True, False) * 3
    config = read_tiny(tiny_model, "granite_swa", rope_pattern=pattern)
    assert tuple(layer.has_rope for layer in config.layers) == pattern
    assert all(layer.has_rope for layer in read_tiny(tiny_model, "granite_swa").layers)
    for architecture, n_layers, problem in (
        ("granite_swa", 5, "has 6 items, but must have 5"),
        ("granite", 6, "is not supported for this architecture"),
    ):
        with pytest.raises(
            FormatError, match=rf"{architecture}\.attention\.rope_pattern'.*{problem}"
        ):
            read_tiny(tiny_model, architecture, n_layers=n_layers, rope_pattern=pattern)


def test_queries_of_mistral3_grow_with_their_position(tiny_model: TinyModelFactory) -> None:
    options = {"rope_scaling": "yarn", "original_context": 40}
    config = read_tiny(tiny_model, "mistral3", **options)
    assert config.temperature_scale == pytest.approx(0.3)
    assert config.temperature_period == 40
    growth = 0.1 * math.log(4)
    assert config.rope_attention_factor == pytest.approx((1 + growth) / (1 + 0.8 * growth))
    assert read_tiny(tiny_model, "llama", **options).temperature_period == 0


def test_longrope_has_two_tables(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "phi3", rope_scaling="longrope", original_context=64)
    assert config.long_rope_after == 64
    assert config.rope_attention_factor == pytest.approx(1.2)
    np.testing.assert_allclose(config.rope_inv_freq[-1], 1e-3 / 1.5, rtol=1e-6)
    np.testing.assert_allclose(config.long_rope_inv_freq[-1], 1e-3 / 8.0, rtol=1e-6)


def test_yarn_interpolates_slow_pairs_only() -> None:
    """128 pairs of base 10,000 over 4,096 positions: turns 32 and 1 are at pairs 20.9 and 45.0."""
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=4096)
    ratio = np.divide(inverse_frequencies(128, 1e4), inverse_frequencies(128, 1e4, scaling))
    np.testing.assert_allclose(ratio[:21], 1.0)
    np.testing.assert_allclose(ratio[46:], 4.0)
    assert np.all(np.diff(ratio[20:47]) > 0)
    assert attention_factor(scaling) == pytest.approx(1 + 0.1 * math.log(4))


@pytest.mark.parametrize(
    ("sections", "problem"),
    [(None, "is missing"), ([1, 1, 1, 1], "fourth axis"), ([2, 2], "three numbers")],
)
def test_sections_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: list[int] | None, problem: str
) -> None:
    def add(writer: GGUFWriter, _: list[int]) -> None:
        if sections is not None:
            writer.add_array("qwen3vl.rope.dimension_sections", sections)

    monkeypatch.setattr(GGUFWriter, "add_rope_dimension_sections", add)
    path = write_tiny(tmp_path, "qwen3vl")
    with pytest.raises(FormatError, match=f"'qwen3vl.rope.dimension_sections'.*{problem}"):
        read(path)


@pytest.mark.parametrize("sections", [None, [1, 1, 1, 1], [0, 0, 0, 0]])
def test_a_text_has_one_position_on_four_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: list[int] | None
) -> None:
    def add(writer: GGUFWriter, _: list[int]) -> None:
        if sections is not None:
            writer.add_array("hunyuan_vl.rope.dimension_sections", sections)

    monkeypatch.setattr(GGUFWriter, "add_rope_dimension_sections", add)
    config = read(write_tiny(tmp_path, "hunyuan_vl"))[0]
    # The slowest of four pairs turns as many times less as alpha says.
    assert config.rope_inv_freq[0] == 1.0
    assert config.rope_inv_freq[3] == pytest.approx(1e-3 / 50.0)


def test_axes_and_alpha_of_hunyuan_vl_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path, "hunyuan_vl", head_dim=2)
    with pytest.raises(FormatError, match=r"'hunyuan_vl\.rope\.scaling\.alpha' is 50, but heads"):
        read(path)

    def add(writer: GGUFWriter, _: list[int]) -> None:
        writer.add_array("hunyuan_vl.rope.dimension_sections", [2, 2])

    monkeypatch.setattr(GGUFWriter, "add_rope_dimension_sections", add)
    path = write_tiny(tmp_path, "hunyuan_vl")
    with pytest.raises(FormatError, match=r"'hunyuan_vl\.rope\.dimension_sections' is \[2, 2\]"):
        read(path)
