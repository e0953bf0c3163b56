"""A folder that holds one GGUF model stands for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeh2o import LLM, SamplingParams
from edgeh2o.errors import UsageError
from edgeh2o.formats.gguf_folder import model_of_folder, refuse_several
from edgeh2o.formats.model_cache import resolve_model
from tests.tiny_models import TinyModelFactory

PARTS = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m.gguf"], "m.gguf"),
        (["m.gguf", "README.md", "config.json", "mmproj-F16.gguf"], "m.gguf"),
        (PARTS, PARTS[0]),
        (PARTS[1:], PARTS[1]),  # whoever opens it says that the first is missing
        ([*PARTS, "n.gguf"], None),
        ([*PARTS, "n-00001-of-00003.gguf"], None),
        (["m.gguf", "m.safetensors"], None),
        (["m.gguf", "genai_config.json"], None),
        (["m.gguf", "onnx"], None),
        (["mmproj-F16.gguf"], None),
        ([], None),
    ],
)
def test_a_folder_has_one_model_or_none(
    tmp_path: Path, names: list[str], expected: str | None
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert model_of_folder(tmp_path) == (None if expected is None else tmp_path / expected)
    # Where there is none, a folder is left to whoever knows other kinds.
    assert resolve_model(tmp_path) == (tmp_path if expected is None else tmp_path / expected)


def test_several_are_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "mmproj-F16.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"give the path of one: a\.gguf, b\.gguf$"):
        refuse_several(tmp_path)


def test_what_is_no_folder_has_no_model(tmp_path: Path) -> None:
    assert model_of_folder(tmp_path / "missing") is None


def test_it_runs(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    model = tiny_model()
    folder = tmp_path / "org"
    folder.mkdir()
    (folder / "tiny.gguf").symlink_to(model)
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(folder) as of_folder, LLM(model) as of_file:
        assert of_folder.model_path == folder / "tiny.gguf"
        answers = [llm.generate([1, 2, 3], sampling).token_ids for llm in (of_folder, of_file)]
    assert answers[0] == answers[1]
