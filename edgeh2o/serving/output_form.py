"""The form that an answer is to have, out of the bodies of requests."""

from __future__ import annotations

from ..engine.grammar import Grammar
from ..errors import UsageError
from .api_error import ApiError
from .fields import Fields


def read_grammar(fields: Fields) -> Grammar | None:
    """``response_format`` of OpenAI's chats, or what clients of llama-server send for it.

    Raises ApiError for a form that cannot be had.
    """
    return _read(fields, fields.object("response_format"), "json_schema")


def read_flat_grammar(fields: Fields, form: Fields | None) -> Grammar | None:
    """As ``read_grammar``, of a ``form`` whose schema stands beside its type."""
    return read_grammar(fields) if form is None else _read(fields, form, None)


def _read(fields: Fields, form: Fields | None, place: str | None) -> Grammar | None:
    kind = None if form is None else form.text("type")
    try:
        if form is None or kind in (None, "text"):
            return _read_bare_grammar(fields)
        return _read_form(form, str(kind), place)
    except UsageError as error:
        if isinstance(error, ApiError):
            raise
        name = "response_format" if form is None else form.path
        raise ApiError(str(error), param=name) from None


def _read_form(form: Fields, kind: str, place: str | None) -> Grammar:
    """``place`` is the object of the form that has the schema, None for the form itself.

    Raises UsageError.
    """
    if kind == "json_object":
        schema = form.raw("schema")  # an extension of several servers
        if schema is None:
            return Grammar.any_json_object()
        return Grammar.of_schema(schema, is_strict=False)
    if kind == "json_schema":
        # llama-server's documentation has the schema beside the type.
        is_beside = place is None or (form.raw(place) is None and form.raw("schema") is not None)
        outer = form if is_beside else form.object(str(place))
        schema = None if outer is None else outer.raw("schema")
        if outer is None or schema is None:
            form.refuse(place or "schema", 'an object with a "schema"' if place else "a schema")
        return Grammar.of_schema(schema, is_strict=outer.flag("strict"))
    if kind not in ("regex", "lark", "gbnf"):
        form.refuse("type", "text, json_object, json_schema, regex, lark or gbnf")
    text = form.text(kind)
    if not text:
        form.refuse(kind, "a non-empty string")
    return Grammar(kind, text)  # type: ignore[arg-type]


def _read_bare_grammar(fields: Fields) -> Grammar | None:
    """As clients of llama-server send it. Raises UsageError."""
    if text := fields.text("grammar"):
        return Grammar("gbnf", text)
    schema = fields.raw("json_schema")
    return None if schema is None else Grammar.of_schema(schema, is_strict=False)
