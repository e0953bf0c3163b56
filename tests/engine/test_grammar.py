"""Answers of a given form, whatever the model would rather say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeh2o import LLM, SamplingParams
from edgeh2o.engine.grammar import Grammar, constrain
from edgeh2o.engine.logits import Penalties, ProcessorChain, TopLogProbabilities
from edgeh2o.errors import UsageError
from tests.tiny_models import TinyModelFactory

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "inner": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
    "required": ["name", "tags", "inner"],
}


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    with LLM(tiny_model(tensor_type="Q4_0"), threads=1) as llm:
        yield llm


def sampling(schema: object, seed: int = 0) -> SamplingParams:
    # A random model: hot, so that every token that may come does.
    return SamplingParams(
        schema=schema, seed=seed, temperature=2.0, top_k=0, top_p=1, min_p=0, max_tokens=800
    )


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_answers_are_json_of_the_schema(llm: LLM, seed: int) -> None:
    result = llm.generate("the hen", sampling(SCHEMA, seed))
    if result.finish_reason == "length":
        return
    value = json.loads(result.text)
    assert set(value) == set(SCHEMA["properties"])  # type: ignore[arg-type]
    assert len(value["name"]) <= 6 and set(value["tags"]) <= {"a", "b"}
    assert isinstance(value["inner"]["n"], int) and set(value["inner"]) == {"n"}


def test_other_forms_hold_too(llm: LLM) -> None:
    for seed in range(5):
        text = llm.generate("x", sampling(Grammar("regex", "(ab|cd){2,4}e"), seed)).text
        assert re.fullmatch("(ab|cd){2,4}e", text)
        lark = 'start: "n" number\nnumber: /[0-9]{1,3}/'
        assert re.fullmatch(
            "n[0-9]{1,3}", llm.generate("x", sampling(Grammar("lark", lark), seed)).text
        )
        gbnf = 'root ::= "yes" | "no"'
        assert llm.generate("x", sampling(Grammar("gbnf", gbnf), seed)).text in ("yes", "no")
        assert isinstance(
            json.loads(llm.generate("x", sampling('{"type": "integer"}', seed)).text), int
        )


def test_classes_of_pydantic_are_schemas() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return {"type": "object", "properties": {"a": {"type": "string"}}}

    closed = json.loads(Grammar.of_schema(Model).text)
    assert closed["additionalProperties"] is False
    composed = {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}}
    assert "additionalProperties" not in json.loads(Grammar.of_schema(composed).text)
    named = {"type": "object", "properties": {"properties": {"type": "string"}}}
    assert json.loads(Grammar.of_schema(named).text)["properties"] == named["properties"]


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ("{", "not JSON"),
        ([1], "a JSON schema is an object"),
        ({"type": "nothing"}, "json_schema cannot be used"),
        ({"$ref": "http://example.org/x"}, "json_schema cannot be used"),
        (Grammar("lark", "start: x"), "lark cannot be used"),
        (Grammar("regex", "(("), "regex cannot be used"),
        (Grammar("gbnf", 'r?ot ::= "a"'), "gbnf cannot be used"),
        (Grammar("gbnf", "root ::= " + "(" * 5000), "gbnf cannot be used"),
    ],
)
def test_bad_forms_are_refused(llm: LLM, schema: object, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        llm.generate("x", sampling(schema))


def test_large_forms_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(UsageError, match="nested more than"):
        Grammar.of_schema(deep)
    with pytest.raises(UsageError, match="more than 131072"):
        Grammar("regex", "a" * 200_000)
    with pytest.raises(UsageError, match="ignore_eos"):
        SamplingParams(schema={}, ignore_eos=True)


def test_a_complete_answer_may_only_end(llm: LLM) -> None:
    tokenizer = llm.model.tokenizer
    processor = constrain(Grammar("regex", "ab"), tokenizer, llm.config.vocab_size)
    logits = np.zeros(llm.config.vocab_size, np.float32)
    for token_id in tokenizer.encode("ab", add_special=False):
        assert np.isfinite(processor.process(logits))[token_id]
        assert not processor.is_complete
        processor.accept(token_id)
    assert processor.is_complete
    allowed = set(np.flatnonzero(np.isfinite(processor.process(logits))).tolist())
    assert allowed and allowed <= tokenizer.eog_ids
    assert np.isfinite(logits).all()  # they are not written to


def test_penalties_are_those_of_the_formula() -> None:
    logits = np.linspace(-1, 1, 8).astype(np.float32)
    penalties = Penalties({2: 3.0, 7: -100.0}, presence=0.5, frequency=0.25)
    for token_id in (1, 1, 4):
        penalties.accept(token_id)
    expected = logits.astype(np.float64)
    expected[[2, 7, 1, 4]] += [3.0, -100.0, -1.0, -0.75]
    np.testing.assert_allclose(penalties.process(logits), expected, rtol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_top_log_probabilities_are_sorted(count: int) -> None:
    logits = np.random.default_rng(count).normal(size=20).astype(np.float32)
    top = TopLogProbabilities(count)
    chain = ProcessorChain([top, Penalties({0: 1.0})])
    chain.process(logits)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum())
    order = np.argsort(-expected)[:count]
    assert [token_id for token_id, _ in top.records[0]] == order.tolist()
    np.testing.assert_allclose([value for _, value in top.records[0]], expected[order], atol=1e-12)
