"""Answers of a given form, by llguidance: JSON of a schema, a regular expression, a Lark grammar.

A grammar comes from anywhere: its size, and what the library may spend on it, are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from ..errors import UsageError, is_shortage
from .gbnf import lark_of_gbnf

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..tokenizer import Tokenizer
    from ._sampler import Sampler

MAX_GRAMMAR_CHARACTERS = 2**17
MAX_SCHEMA_DEPTH = 64
# About 20 ms of building and 15 ms a token at most; real schemas take a thousandth of it.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
# Every character is a word there, and a mask follows all tokens of a vocabulary: 20 ms, and 0.15 s
# at most.
_GBNF_ITEMS = 400_000
# With these an object's properties are listed elsewhere too.
_COMPOSITIONS = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if")
# What the library calls an answer that no token can go on with.
_DEAD_END = "NoExtensionBias"
_REASON_CHARACTERS = 300
_ANY_OBJECT = {"type": "object"}
# Keywords whose values are schemas by name, and those whose values are no schemas.
_BY_NAME = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
)
_VALUES = ("enum", "const", "default", "examples")
# What llguidance makes rules of; it refuses others, which JSON Schema has as mere notes.
_FORMATS = frozenset(
    [
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "unknown",
    ]
)

GrammarKind = Literal["json_schema", "regex", "lark", "gbnf"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer: a JSON schema as JSON text, a regular expression, or a grammar."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise UsageError(
                f"the {self.kind} has {len(self.text)} characters, more than "
                f"{MAX_GRAMMAR_CHARACTERS}; make it shorter"
            )

    @classmethod
    def of_schema(cls, schema: object, *, is_strict: bool = True) -> Grammar:
        """JSON of a schema: a mapping, its JSON text, or a class or adapter of pydantic.

        Objects whose properties are listed have no others, unless ``additionalProperties`` says
        so: small models find no end else. A format that is not known is ignored, and so are
        keywords that cannot be enforced, such as ``uniqueItems``, unless ``is_strict``. Raises
        UsageError for anything else, and for a schema that is too large or too deep.
        """
        for name in ("model_json_schema", "json_schema"):  # pydantic's
            make = getattr(schema, name, None)
            if callable(make):
                schema = make()
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except RecursionError:
                raise _too_deep() from None
            except ValueError as error:
                raise UsageError(f"the schema is not JSON: {error}") from None
        if not isinstance(schema, (Mapping, bool)):
            raise UsageError(f"a JSON schema is an object, got {type(schema).__name__}")
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}  # as llguidance knows them
        _check_depth(schema)
        closed = _close_objects(_drop_notes(schema))
        if isinstance(closed, dict) and not is_strict:
            options = closed.get("x-guidance", {})  # llguidance's own
            if isinstance(options, Mapping):
                closed["x-guidance"] = {"lenient": True, **options}
        return cls("json_schema", json.dumps(closed))

    @classmethod
    def any_json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.of_schema(_ANY_OBJECT)


class GrammarCompiler:
    """Begins answers of grammars for one tokenizer; ``vocab_size`` is that of the logits.

    The library's form of the vocabulary is made at the first grammar. Any thread may call.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = Lock()
        self._prepared: Any = None

    def compile(self, grammar: Grammar) -> GrammarState:
        """Raises UsageError for a grammar that is wrong or too large, or without llguidance."""
        try:
            import llguidance
        except ImportError as error:
            if is_shortage(error):
                raise
            raise UsageError(
                'structured output needs llguidance: pip install "edgeh2o[serve]"'
            ) from None
        with self._lock:
            if self._prepared is None:
                self._prepared = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer)),
                    n_vocab=self._vocab_size,
                    eos_token=sorted(self._tokenizer.eog_ids),
                )
        matcher_class = llguidance.LLMatcher
        try:
            if grammar.kind == "json_schema":
                # Blanks without end are what small models fall into.
                text = matcher_class.grammar_from_json_schema(
                    grammar.text, overrides={"whitespace_pattern": r"[\x20\x0A]{0,8}"}
                )
            elif grammar.kind == "regex":
                text = matcher_class.grammar_from_regex(grammar.text)
            else:
                is_gbnf = grammar.kind == "gbnf"
                lark = lark_of_gbnf(grammar.text) if is_gbnf else grammar.text
                text = matcher_class.grammar_from_lark(lark)
        except ValueError as error:
            raise _refuse(grammar, str(error)) from None
        more = {"step_max_items": _GBNF_ITEMS} if grammar.kind == "gbnf" else {}
        limits = llguidance.LLParserLimits(**(_LIMITS | more))
        matcher = matcher_class(self._prepared, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refuse(grammar, matcher.get_error())
        return GrammarState(matcher, self._tokenizer)


_compilers: WeakKeyDictionary[Tokenizer, GrammarCompiler] = WeakKeyDictionary()


def compiler_of(tokenizer: Tokenizer, vocab_size: int) -> GrammarCompiler:
    """The one of a tokenizer, which takes a while to get ready; ``vocab_size`` is the model's."""
    compiler = _compilers.get(tokenizer)
    if compiler is None:
        compiler = _compilers[tokenizer] = GrammarCompiler(tokenizer, vocab_size)
    return compiler


def constrain(schema: object, tokenizer: Tokenizer, vocab_size: int) -> GrammarState:
    """An answer that begins, of a ``Grammar`` or of what ``Grammar.of_schema`` takes.

    Raises as both do.
    """
    grammar = schema if isinstance(schema, Grammar) else Grammar.of_schema(schema)
    return compiler_of(tokenizer, vocab_size).compile(grammar)


class GrammarState:
    """How far an answer has got in its form, and which tokens may come next."""

    def __init__(self, matcher: Any, tokenizer: Tokenizer) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._ending, self._n_tokens = frozenset(tokenizer.eog_ids), tokenizer.vocab_size

    def draw(self, sampler: Sampler, logits: NDArray[np.float32]) -> int:
        """A token of all; where it has no place in the form, one of those that have.

        Its chance is then that among those, as if the others had been left out at once, but filters
        such as top-k look at all tokens first. Most tokens fit, and need no mask of the vocabulary.
        llama.cpp draws so too.
        """
        token_id = sampler.sample(logits)
        return token_id if self.allows(token_id) else sampler.sample(logits, self.mask())

    def allows(self, token_id: int) -> bool:
        """Whether the text may still become complete after ``token_id``: quick, for one token.

        An end of the answer is one if it has the form.
        """
        if token_id in self._ending:
            return self.is_complete
        if token_id >= self._n_tokens:  # rows that pad the logits, which the library refuses
            return False
        n_valid = self._matcher.validate_tokens([token_id])
        self._require_good()
        return bool(n_valid == 1)

    def mask(self) -> bytes:
        """Bits of the tokens that may come next, for ``Sampler.sample``.

        Of text that is certain the tokenizer's own first token alone.
        """
        bits: bytes = self._matcher.compute_bitmask()
        self._require_good()
        return bits

    def accept(self, token_id: int) -> None:
        """``token_id`` was drawn."""
        self._matcher.consume_token(token_id)
        self._require_good()

    def ahead(self) -> GrammarState:
        """One that goes on from here; this one stays as it is."""
        return GrammarState(self._matcher.deep_copy(), self._tokenizer)

    @property
    def is_complete(self) -> bool:
        """Whether the text so far has the form."""
        return bool(self._matcher.is_accepting())

    def _require_good(self) -> None:
        if self._matcher.is_error():
            reason = _one_line(self._matcher.get_error())
            if reason == _DEAD_END:
                raise UsageError(
                    "the grammar cannot be satisfied from here on: no text that ends has its "
                    "form; give what refers to itself a case that ends"
                )
            raise UsageError(f"the grammar cannot go on: {reason}; make it simpler")


class _Vocabulary:
    """What the library asks a tokenizer for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        size = tokenizer.vocab_size
        visible = [tokenizer.token_bytes(i, skip_special=True) for i in range(size)]
        self.tokens = [text or tokenizer.token_bytes(i) for i, text in enumerate(visible)]
        self.special_token_ids = [i for i, text in enumerate(visible) if not text]
        eog = sorted(tokenizer.eog_ids)
        self.eos_token_id = tokenizer.eos_id if tokenizer.eos_id is not None else eog[0]
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of a stretch of an answer: no blank goes before it."""
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return self._tokenizer.encode(text, add_special=False, before=" ")


def _check_depth(schema: object) -> None:
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        inner: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += value.values()
            elif isinstance(value, (list, tuple)):
                inner += value
        if not inner:
            return
        level = inner
    raise _too_deep()


def _too_deep() -> UsageError:
    return UsageError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep; make it flatter")


def rebase_references(schema: object, place: str) -> object:
    """``schema`` as it is written at ``place``, a JSON pointer, of a larger one.

    Its references to itself begin there; below an ``$id`` they begin at that already.
    """
    if not isinstance(schema, Mapping) or "$id" in schema:
        return schema
    moved = _change_inner(schema, lambda inner: rebase_references(inner, place))
    target = moved.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = f"#{place}{target[1:]}"
    return moved


def _drop_notes(schema: object) -> object:
    """``schema`` without what asks for nothing and would be refused."""
    if not isinstance(schema, Mapping):
        return schema
    kept = _change_inner(schema, _drop_notes)
    form = kept.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        del kept["format"]
    if kept.get("uniqueItems") is False:
        del kept["uniqueItems"]
    return kept


def _change_inner(schema: Mapping[str, Any], change: Callable[[object], object]) -> dict[str, Any]:
    """A copy with ``change`` applied to every schema that lies directly in it."""
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:
            changed[key] = value
        elif key in _BY_NAME and isinstance(value, Mapping):
            changed[key] = {name: change(inner) for name, inner in value.items()}
        elif isinstance(value, (list, tuple)):
            changed[key] = [change(item) for item in value]
        else:
            changed[key] = change(value)
    return changed


def _close_objects(schema: object) -> object:
    if isinstance(schema, (list, tuple)):
        return [_close_objects(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for name in ("items", "prefixItems", "anyOf", "oneOf"):
        if name in closed:
            closed[name] = _close_objects(closed[name])
    for name in ("properties", "$defs", "definitions"):
        if isinstance(closed.get(name), Mapping):
            inner = closed[name].items()
            closed[name] = {str(key): _close_objects(value) for key, value in inner}
    if "properties" in closed and closed.keys().isdisjoint(_COMPOSITIONS):
        if "additionalProperties" not in closed:
            closed["properties"] = _with_required(closed)
        closed.setdefault("additionalProperties", False)
    return closed


def _with_required(schema: Mapping[str, Any]) -> object:
    """The properties, with those that are required and not listed: they may be anything."""
    listed, required = schema["properties"], schema.get("required")
    if not isinstance(listed, Mapping) or not isinstance(required, (list, tuple)):
        return listed
    missing = [name for name in required if isinstance(name, str) and name not in listed]
    return {**listed, **{name: {} for name in missing}}


def _refuse(grammar: Grammar, reason: str) -> UsageError:
    return UsageError(f"the {grammar.kind} cannot be used: {_one_line(reason)}")


def _one_line(text: str) -> str:
    """What the library says, without its indented pictures of the text and its own state.

    Of a long reason, which repeats the user's text, the middle is left out.
    """
    lines = text.strip().partition("\n<state>")[0].split("\n")
    reason = " ".join(line for line in lines if line and not line[0].isspace())
    if len(reason) <= _REASON_CHARACTERS:
        return reason
    half = _REASON_CHARACTERS // 2
    return f"{reason[:half]} ... {reason[-half:]}"
