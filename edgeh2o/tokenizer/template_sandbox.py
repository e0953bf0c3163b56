"""A jinja2 sandbox with bounds on size and time, for templates that come with model files.

jinja2's sandbox keeps a template from reaching Python, but not from looping for ever or from
asking for a string of a gigabyte. Here the world is closed: only the listed filters, functions and
methods exist, each checks the size of its result before or after it runs, and whatever repeats
(loops, macros, calls, pieces of output) looks at a clock of processor time. That works in every
thread and needs no signal and no second process.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from functools import partial, wraps
from string import Formatter
from typing import Any, cast

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_EXPONENT = 64
MAX_INTEGER_BITS = 4096
MAX_INDENT = 64

MAX_STRIP_CHARACTERS = 64


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# jinja2's own filters whose results are no larger than their inputs, or a small multiple.
_PLAIN_FILTERS = _words(
    """abs capitalize count d default dictsort first float groupby int items last length list lower
    map max min reject rejectattr reverse select selectattr sort string sum title unique upper
    wordcount"""
)
_METHODS: dict[type, frozenset[str]] = {
    str: _words(
        """capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower
        isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix
        replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase
        title upper"""
    ),
    dict: _words("get items keys values"),
    list: _words("count index"),
    tuple: _words("count index"),
}


class LimitError(TemplateError):
    """A template went beyond a bound."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Renders one template at a time.

    ``begin`` starts the clock and sets the largest size, in characters or items, of any value and
    of the output. ``functions`` are callable by name besides range, dict and namespace.
    """

    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationExtension],
        )
        self._deadline_s = 0.0
        self._max_size = 0
        self.globals = {"range": safe_range, "dict": dict, "namespace": Namespace} | functions
        self._functions = (*self.globals.values(), self.step, self.measure, self.concatenate)
        self.filters = {name: self._limited(FILTERS[name]) for name in _PLAIN_FILTERS}
        self.filters |= {
            "replace": self._limited(self._replace),
            "join": self._limited(self._join),
            "indent": self._limited(self._indent),
            "trim": self._limited(self._trim),
            "tojson": self._limited(self._to_json),
            "safe": lambda value: value,  # nothing is escaped
        }

    def begin(self, *, max_size: int, max_cpu_s: float) -> None:
        """Starts a rendering."""
        self._max_size = max_size
        self._deadline_s = time.thread_time() + max_cpu_s

    def step(self) -> bool:
        """Looks at the clock. Raises LimitError when time is up."""
        if time.thread_time() > self._deadline_s:
            raise LimitError("it takes too long")
        return True

    def measure(self, value: Any) -> Any:
        """``value``, if all that it holds, shared parts counted each time, is within the bound."""
        self.step()
        size, rest = 0, [value]
        while rest:
            item = rest.pop()
            size += 1
            if isinstance(item, (str, range)):
                size += len(item)
            elif isinstance(item, (list, tuple)):
                rest.extend(item)
            elif isinstance(item, dict):
                rest.extend(item.keys())
                rest.extend(item.values())
            elif isinstance(item, int):
                size += item.bit_length() // 64
            self._require(size + len(rest))
        return value

    def concatenate(self, *parts: Any) -> str:
        """The operator ``~``."""
        return self.concat(str(part) for part in parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    self._require(len(sequence) * count)
            if isinstance(left, int) and isinstance(right, int):
                self._require_bits(left.bit_length() + right.bit_length())
        elif operator == "**":
            if not isinstance(right, (int, float)) or abs(right) > MAX_EXPONENT:
                raise LimitError(f"an exponent is larger than {MAX_EXPONENT}")
            if isinstance(left, int):
                self._require_bits(left.bit_length() * MAX_EXPONENT)
        elif operator == "%" and isinstance(left, str) and re.search(r"\*|\d{4}", left):
            raise LimitError("a format asks for a large width")
        return self.measure(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Names as in jinja2: a template may pass any keyword.
        __self.step()
        function = __self._permitted(__obj, args)
        return __self.measure(super().call(__context, function, *args, **kwargs))

    def concat(self, iterable: Iterable[str], /) -> str:
        """Joins pieces of output: of the whole template, of a macro, of a block."""
        parts, size = [], 0
        for piece in iterable:
            self.step()
            size += len(piece)
            self._require(size)
            parts.append(piece)
        return "".join(parts)

    def _permitted(self, function: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
        """What to call for ``function``. Raises SecurityError if it is not on a list."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        # jinja2 hands out a substitute for this method, which would allow attributes and widths.
        formatted = getattr(getattr(function, "__wrapped__", None), "__self__", None)
        if name == "format" and isinstance(formatted, str):
            return partial(self._format, formatted)
        is_listed = (
            function in self._functions
            or isinstance(function, (Macro, LoopContext))
            or (isinstance(owner, LoopContext) and name in ("cycle", "changed"))
        )
        if is_listed:
            return cast("Callable[..., Any]", function)
        if name not in _METHODS.get(type(owner), frozenset()):
            raise SecurityError(f"{name or type(function).__name__} must not be called")
        if name == "replace":
            return partial(self._replace, owner)
        if name == "join":
            return partial(self._join, d=str(owner))
        if name in ("strip", "lstrip", "rstrip"):
            self._check_strip(*args)
        return cast("Callable[..., Any]", function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def _limited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return self.measure(function(*args, **kwargs))

        return run

    def _require(self, size: int) -> None:
        if size > self._max_size:
            raise LimitError(f"it makes a value or an output of more than {self._max_size} items")

    def _require_bits(self, n_bits: int) -> None:
        if n_bits > MAX_INTEGER_BITS:
            raise LimitError(f"an integer has more than {MAX_INTEGER_BITS} bits")

    def _check_strip(self, characters: str | None = None) -> None:
        if characters is not None and len(characters) > MAX_STRIP_CHARACTERS:
            raise LimitError(f"it strips more than {MAX_STRIP_CHARACTERS} kinds of characters")

    def _trim(self, value: Any, chars: str | None = None) -> str:
        self._check_strip(chars)
        return str(value).strip(chars)

    def _replace(self, value: Any, old: str, new: str, count: int = -1) -> str:
        text = str(value)
        found = text.count(old) if count < 0 else min(count, text.count(old))
        self._require(len(text) + found * len(new))
        return text.replace(old, new, count)

    def _join(self, items: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        parts: list[str] = []
        for item in items:
            if attribute is not None:
                item = self.getattr(item, attribute)
            parts += [d, str(item)] if parts else [str(item)]
        return self.concat(parts)

    def _format(self, text: str, *args: Any, **kwargs: Any) -> str:
        """``str.format`` for fields such as {}, {0} and {name}."""
        parts: list[str] = []
        n_unnamed = 0
        for literal, field, spec, conversion in Formatter().parse(text):
            parts.append(literal)
            if field is None:
                continue
            if spec or conversion or not re.fullmatch(r"\w{0,99}", field, re.ASCII):
                raise LimitError(f"it formats a field of a form that is not allowed: {field!r:.40}")
            if not field:
                field, n_unnamed = str(n_unnamed), n_unnamed + 1
            parts.append(str(args[int(field)] if field.isdigit() else kwargs[field]))
        return self.concat(parts)

    def _indent(self, s: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
        if not 0 <= width <= MAX_INDENT:
            raise LimitError(f"an indentation is not between 0 and {MAX_INDENT}")
        lines = str(s).split("\n")
        self._require(len(s) + len(lines) * width)
        margin = " " * width
        rest = [margin + line if line or blank else line for line in lines[1:]]
        return "\n".join([(margin if first else "") + lines[0], *rest])

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as it is, without HTML escapes: the text goes to a model, not to a browser."""
        if indent is not None and not 0 <= indent <= MAX_INDENT:
            raise LimitError(f"an indentation is not between 0 and {MAX_INDENT}")
        return json.dumps(
            self.measure(value),
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )


class _Metering(NodeTransformer):
    """Puts the checks into a template's syntax tree where jinja2 offers no hook."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step"), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("step"), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", *node.nodes)

    def _visit_literal(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node
        if all(isinstance(item, nodes.Const) for item in node.items):
            return node
        return _call("measure", node)

    visit_List = _visit_literal
    visit_Tuple = _visit_literal
    visit_Dict = _visit_literal


def _call(method: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


class _GenerationExtension(Extension):
    """``{% generation %}`` marks answers for training; here its body is all that counts."""

    def __init__(self, environment: Environment) -> None:
        self.tags = {"generation"}
        super().__init__(environment)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
