"""Answers of a given form, whatever the model would rather say."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeh2o import LLM, SamplingParams
from edgeh2o.engine._sampler import Sampler
from edgeh2o.engine.grammar import Grammar, GrammarCompiler, GrammarState, constrain
from edgeh2o.engine.logits import Penalties, ProcessorChain, TopLogProbabilities
from edgeh2o.errors import UsageError
from edgeh2o.tokenizer import build_tokenizer
from tests.tiny_models import TinyModelFactory
from tests.tokenizer.spm_vocabulary import make_spm_metadata

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


def test_a_property_that_is_required_and_not_listed_may_be_anything(llm: LLM) -> None:
    """Sloppy schemas of tools have such; with all others closed off nothing satisfied them."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a", "b"]}
    for seed in range(5):
        made = llm.generate("x", sampling(schema, seed))
        if made.finish_reason != "length":
            assert set(json.loads(made.text)) == {"a", "b"}
    closed = {**schema, "additionalProperties": False}
    with pytest.raises(UsageError, match="required property 'b' is unsatisfiable"):
        llm.generate("x", sampling(closed))
    json.loads(Grammar.of_schema({**schema, "required": [[1], 5]}).text)


def test_a_schema_may_be_true_or_false(llm: LLM) -> None:
    assert Grammar.of_schema(True) == Grammar.of_schema({})
    made = llm.generate("x", sampling(True))
    if made.finish_reason != "length":
        json.loads(made.text)
    with pytest.raises(UsageError, match="json_schema cannot be used: Unsatisfiable"):
        llm.generate("x", sampling(False))


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
        ("[" * 100_000, "nested more than 64 deep"),
        (Grammar("regex", "(("), "regex cannot be used: .* regex parse error: error: unclosed"),
        (Grammar("regex", "(" + "a" * 1000), "regex cannot be used: .* error: unclosed group"),
        ({"type": "string", "pattern": "[a"}, "regex parse error: error: unclosed character"),
        ({"$ref": "#"}, "no text that ends has its form"),
        (Grammar("lark", "start: start"), "no text that ends has its form"),
        (Grammar("gbnf", 'r?ot ::= "a"'), "gbnf cannot be used"),
        (Grammar("gbnf", "root ::= " + "(" * 5000), "gbnf cannot be used"),
    ],
)
def test_bad_forms_are_refused(llm: LLM, schema: object, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        llm.generate("x", sampling(schema))


def test_formats_that_are_not_known_ask_for_nothing(llm: LLM) -> None:
    secret = {"type": "string", "format": "password", "maxLength": 4}
    # A property may have the name of a keyword, and a value look like a schema.
    schema = {
        "type": "object",
        "properties": {"format": secret, "n": {"type": "integer", "format": "int32"}},
        "patternProperties": {"^x": {"anyOf": [secret, {"const": {"format": "binary"}}]}},
        "allOf": [{"required": ["format"]}],
    }
    text = Grammar.of_schema(schema).text
    assert "password" not in text and "int32" not in text and '{"format": "binary"}' in text
    constrain(schema, llm.model.tokenizer, llm.config.vocab_size)
    assert json.loads(Grammar.of_schema({"format": "date"}).text) == {"format": "date"}
    constrain({"uniqueItems": False}, llm.model.tokenizer, llm.config.vocab_size)


@pytest.mark.parametrize("keywords", [{"uniqueItems": True}, {"contains": {"type": "integer"}}])
def test_what_cannot_be_enforced_is_refused_or_ignored(llm: LLM, keywords: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", **keywords}}}
    with pytest.raises(UsageError, match=next(iter(keywords))):
        llm.generate("x", sampling(schema))
    lenient = Grammar.of_schema(schema, is_strict=False)
    constrain(lenient, llm.model.tokenizer, llm.config.vocab_size)
    kept = Grammar.of_schema(schema | {"x-guidance": {"lenient": False}}, is_strict=False)
    with pytest.raises(UsageError, match="cannot be used"):
        constrain(kept, llm.model.tokenizer, llm.config.vocab_size)
    constrain(Grammar.of_schema(True, is_strict=False), llm.model.tokenizer, llm.config.vocab_size)


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


def allowed_by(state: GrammarState, llm: LLM) -> set[int]:
    bits = np.frombuffer(state.mask(), np.uint8)
    size = llm.config.vocab_size
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little", count=size)).tolist())


def test_a_complete_answer_may_only_end(llm: LLM) -> None:
    tokenizer = llm.model.tokenizer
    state = constrain(Grammar("regex", "ab"), tokenizer, llm.config.vocab_size)
    (end, *_) = tokenizer.eog_ids
    for token_id in tokenizer.encode("ab", add_special=False):
        assert token_id in allowed_by(state, llm) and state.allows(token_id)
        assert not state.is_complete and not state.allows(end)
        state.accept(token_id)
    assert state.is_complete and state.allows(end)
    assert allowed_by(state, llm) <= tokenizer.eog_ids
    assert not state.allows(tokenizer.encode("a", add_special=False)[0])


@pytest.mark.parametrize("form", ["[a-f]{1,3}x?", "(the|then) [0-9]+"])
def test_the_mask_has_the_tokens_that_are_allowed_one_by_one(llm: LLM, form: str) -> None:
    state = constrain(Grammar("regex", form), llm.model.tokenizer, llm.config.vocab_size)
    draw = np.random.default_rng(1)
    for _ in range(6):
        allowed = allowed_by(state, llm)
        singly = {i for i in range(llm.config.vocab_size) if state.allows(i)}
        # Of text that is certain the mask names one way to write it.
        assert allowed == singly or (len(allowed) == 1 and allowed < singly)
        token_id = int(draw.choice(sorted(allowed)))
        if token_id in llm.model.tokenizer.eog_ids:
            return
        state.accept(token_id)


@pytest.mark.parametrize("space_prefix", [False, True])
def test_text_that_is_certain_has_no_blank_before_it(space_prefix: bool) -> None:
    tokenizer = build_tokenizer(make_spm_metadata(add_space_prefix=space_prefix))
    state = constrain(Grammar("regex", "hello world"), tokenizer, tokenizer.vocab_size)
    said = []
    while not state.is_complete:
        bits = np.unpackbits(np.frombuffer(state.mask(), np.uint8), bitorder="little")
        said.append(int(np.flatnonzero(bits)[0]))
        state.accept(said[-1])
    assert tokenizer.decode(said, continues=True) == "hello world"


def test_rows_that_pad_the_logits_are_never_drawn(llm: LLM) -> None:
    tokenizer = llm.model.tokenizer
    size = tokenizer.vocab_size + 70
    state = GrammarCompiler(tokenizer, size).compile(Grammar("regex", "a{9}"))
    logits = np.zeros(size, np.float32)
    logits[tokenizer.vocab_size :] = 9.0
    sampler = Sampler(size, temperature=0.0)
    for _ in range(3):
        token_id = state.draw(sampler, logits)
        assert set(tokenizer.token_bytes(token_id)) == set(b"a")
        state.accept(token_id)


def test_tokens_have_their_chances_among_those_that_fit(llm: LLM) -> None:
    tokenizer, size = llm.model.tokenizer, llm.config.vocab_size
    state = constrain(Grammar("regex", "[ab]"), tokenizer, size)
    allowed = sorted(allowed_by(state, llm))
    assert len(allowed) >= 2
    logits = np.random.default_rng(3).normal(size=size).astype(np.float32)
    logits[allowed] += 3
    sampler = Sampler(size, temperature=1.0, seed=5)
    drawn = Counter(state.draw(sampler, logits) for _ in range(4000))
    weights = np.exp(logits[allowed].astype(np.float64))
    assert set(drawn) == set(allowed)
    for token_id, chance in zip(allowed, weights / weights.sum(), strict=True):
        assert abs(drawn[token_id] / 4000 - chance) < 5 * np.sqrt(chance / 4000)
    greedy = Sampler(size, temperature=0.0)
    logits[next(i for i in range(size) if i not in allowed)] = 50.0  # what does not fit
    assert state.draw(greedy, logits) == allowed[int(logits[allowed].argmax())]


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


def test_a_grammar_that_is_too_much_is_not_the_models_fault(llm: LLM) -> None:
    form = Grammar("regex", "((((a{1,99}){1,99}){1,99}){1,99}){1,99}b")
    refusals = []
    for seed in range(12):
        try:
            made = llm.generate("x", sampling(form, seed))
        except UsageError as error:
            refusals.append(str(error))
        else:
            assert made.finish_reason == "length" or re.fullmatch("a+b", made.text)
    assert refusals and all("the grammar cannot go on" in text for text in refusals)
