"""Settings that lie beside the weights of a model, and come from anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeh2o.formats.model_folder import read_tokenizer_files


@pytest.mark.parametrize(
    ("templates", "taken"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], None),
        ([{"name": ["default"]}, {}, 5, None], None),
        ([], None),
    ],
)
def test_the_default_of_several_templates_is_taken(
    tmp_path: Path, templates: list[object], taken: str | None
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert read_tokenizer_files(tmp_path)["chat_template"] == taken
