"""Prompts that fill in the middle of code, by the markers of the model."""

from __future__ import annotations

from typing import Any

import pytest

from edgeh2o.sampling_config import SamplingParams
from edgeh2o.serving.api_error import ApiError
from edgeh2o.serving.fields import Fields
from edgeh2o.serving.infill import read_infill_request
from edgeh2o.tokenizer import Tokenizer, build_tokenizer
from tests.serving.conftest import StartServer
from tests.serving.fetching import ask
from tests.tiny_models import TinyModelFactory
from tests.tokenizer.vocabularies import make_metadata

PRE, SUF, MID, REP, SEP = 11, 12, 13, 14, 15
AROUND = {"input_prefix": "hello ", "input_suffix": " world"}


def _tokenizer(**markers: object) -> Tokenizer:
    ids = {"fim_pre": PRE, "fim_suf": SUF, "fim_mid": MID, "fim_rep": REP, "fim_sep": SEP}
    keys = {f"{name}_token_id": i for name, i in (ids | markers).items()}
    return build_tokenizer(
        make_metadata(add_bos_token=False)
        | {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    )


def _prompt(tokenizer: Tokenizer, **fields: Any) -> tuple[int, ...]:
    request = read_infill_request(Fields(AROUND | fields), tokenizer, SamplingParams())
    assert isinstance(request.prompt, tuple)
    return request.prompt


def test_a_prompt_is_what_stands_around_the_cursor() -> None:
    tokenizer = _tokenizer()
    hello, world, then = (
        tokenizer.encode(text, add_special=False) for text in ("hello ", " world", "hello the")
    )
    assert _prompt(tokenizer) == (PRE, *hello, SUF, *world, MID)
    assert _prompt(tokenizer, prompt="the") == (PRE, *then, SUF, *world, MID)
    assert _prompt(tokenizer, input_prefix="", input_suffix="") == (PRE, SUF, MID)


def test_a_text_begins_as_the_model_wants_it() -> None:
    metadata = make_metadata(add_bos_token=True)
    for name, i in {"fim_pre": PRE, "fim_suf": SUF, "fim_mid": MID}.items():
        metadata[f"tokenizer.ggml.{name}_token_id"] = i
    tokenizer = build_tokenizer(metadata)
    assert _prompt(tokenizer)[:2] == (tokenizer.bos_id, PRE)


def test_other_files_stand_before() -> None:
    files = [{"filename": "a.py", "text": "the"}, {"text": "other"}]
    tokenizer = _tokenizer()

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    around = _prompt(tokenizer)
    project, file = encode("myproject\n"), encode("filename\n")
    first, second = encode("a.py\nthe"), encode("tmp\nother")
    expected = (REP, *project, SEP, *first, SEP, *second, SEP, *file, *around)
    assert _prompt(tokenizer, input_extra=files) == expected
    bare = _tokenizer(fim_rep=None, fim_sep=None)
    assert _prompt(bare, input_extra=files) == (*encode("the"), *encode("other"), *around)


def test_control_tokens_in_code_stay_text() -> None:
    tokenizer = _tokenizer()
    ids = _prompt(tokenizer, input_prefix="<|begin|>")
    assert tokenizer.bos_id not in ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 3}, "input_suffix"),
        ({"prompt": [1]}, "prompt"),
        ({"input_extra": "a"}, "input_extra"),
        ({"input_extra": [{"text": 1}]}, "input_extra[0].text"),
        ({"input_extra": [{"filename": "a.py"}]}, "input_extra[0].text"),
        ({"input_extra": [{"filename": 1, "text": ""}]}, "input_extra[0].filename"),
        ({"n_predict": "a"}, "n_predict"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        _prompt(_tokenizer(), **fields)
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_a_model_without_markers_says_so() -> None:
    with pytest.raises(
        ApiError, match=r"no tokens to fill in the middle \(fim_suf\); use"
    ) as caught:
        _prompt(_tokenizer(fim_suf=None))
    assert caught.value.status == 501


def test_the_server_fills_in_the_middle(
    start_server: StartServer, tiny_model: TinyModelFactory
) -> None:
    model = tiny_model(tensor_type="Q4_0", context_length=2048, n_layers=2, has_markers=True)
    server = start_server("--parallel", "2", "-ub", "64", "-b", "256", model=model)
    around = {"input_prefix": "the hen is in " * 8, "input_suffix": " pen"}
    body = around | {"n_predict": 6, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    reply = ask(server, "/infill", body)
    assert (reply["tokens_predicted"], reply["stop_type"], reply["id_slot"]) == (6, "limit", 0)
    same = ask(server, "/completion", body | {"prompt": reply["prompt"]})
    assert same["tokens"] == reply["tokens"] and same["timings"]["cache_n"] > 0
    chunks = ask(server, "/infill", body | {"stream": True})
    assert "".join(chunk["content"] for chunk in chunks) == reply["content"]
    # What of the line is there already is read too.
    assert (
        ask(server, "/infill", body | {"prompt": "x"})["tokens_evaluated"]
        > (reply["tokens_evaluated"])
    )
