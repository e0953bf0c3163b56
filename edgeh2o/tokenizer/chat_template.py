"""Chat templates: messages to token ids by the jinja2 template that a model file carries.

Templates are untrusted programs, rendered in ``template_sandbox``. Messages are untrusted text: a
control token written in a message must not end its turn. Templates trim, test and join messages,
so the two are not kept apart by position. Instead, before rendering, the first character of every
control token's text in a message is replaced by a private stand-in. In the rendered text, then, all
that reads as a control token is the template's own; the stand-ins are put back in what is left.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from ..errors import EdgeH2OError, FormatError, UsageError, is_shortage
from ..formats.metadata import TEMPLATE_KEY

if TYPE_CHECKING:
    from jinja2 import Template

    from .base import Tokenizer
    from .template_sandbox import LimitedEnvironment

Message: TypeAlias = Mapping[str, Any]
# What of a last message of the assistant is not at its end.
Begun: TypeAlias = Literal["content", "reasoning_content"]

MAX_TEMPLATE_CHARACTERS = 2**18
# Real templates take less than 0.07 s to compile; the slowest of them, quadratic in the number of
# messages, 2 ms a message in a conversation of 400 (on a server; boards are some times slower, and
# a busy host's virtual machine has charged 0.3 s for a one-line template).
MAX_CPU_S = 1.5
MAX_CPU_S_PER_MESSAGE = 0.02
# Values and output may be this large, and this many times larger than the messages.
MIN_OUTPUT_CHARACTERS = 2**20
MAX_GROWTH = 4
MAX_NESTING = 32

# Supplementary Private Use Area A: no font, tokenizer or template gives them a meaning.
_STAND_INS = range(0xF0000, 0xFFFFE)
_ROLE = re.compile(r"[\w-]+", re.ASCII)
_THINKING = ("<think>", "</think>")
# Of gpt-oss, whose answers say by themselves what is text.
_HARMONY_TURN, _HARMONY_TEXT = "<|start|>assistant", "<|channel|>final<|message|>"
_CURE = "give another one with --chat-template FILE"
# Files of RWKV may have the name of their template in its place.
_NAMED = {
    "rwkv-world": (
        "{{ bos_token }}"
        "{% for message in messages if message.content %}"
        "{{ {'system': 'System', 'user': 'User'}.get(message.role, 'Assistant') }}: "
        "{{ message.content | trim }}{{ '\\n\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )
}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation. ``stand_ins`` maps each private character to the one it stands for.

    ``text`` holds the stand-ins; ``encode`` of the tokenizer takes both.
    """

    text: str
    stand_ins: Mapping[str, str]

    @property
    def plain_text(self) -> str:
        """The text as a reader would have it."""
        return self.text.translate({ord(mark): text for mark, text in self.stand_ins.items()})


# What transformers gives every template: None where there are no tools, and they are defined.
_NEITHER = {"tools": None, "documents": None}


class ChatTemplate:
    """One compiled template. Raises FormatError if it is too large or not a template."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, variables: Mapping[str, Any] | None = None
    ) -> None:
        """``variables`` are what the template may ask for besides the conversation."""
        self._source = source
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._environment, self._template = compile_template(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continues: Begun | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The conversation as the model was taught to read it, ready for its next answer.

        ``continues`` says that the last message is the beginning of that answer, and which of its
        texts goes on; without ``add_generation_prompt`` no answer is begun.

        A message has a ``role`` of letters, digits, "_" and "-", and a ``content``; both are
        strings, the latter perhaps in parts (``{"type": "text", "text": TEXT}``). Further keys hold
        plain values, and so do ``variables`` of this conversation, such as ``tools``, which are as
        untrusted as the messages. Raises UsageError for other messages and FormatError for whatever
        the template does wrong, its own refusals included.
        """
        if (
            not isinstance(messages, Sequence)
            or isinstance(messages, (str, bytes))
            or not all(isinstance(message, Mapping) for message in messages)
            or not messages
        ):
            raise UsageError(
                'messages are a list such as [{"role": "user", "content": "Hello"}], '
                f"got {messages!r:.80}"
            )
        given = dict(variables or {})
        marker = _Marker(self._tokenizer.control_texts, (self._source, messages, given))
        marked = [marker.mark_message(message) for message in messages]
        given = {name: marker.mark(value) for name, value in given.items()}
        begun = marked.pop() if continues is not None else {}
        tokenizer = self._tokenizer
        self._environment.begin(
            max_size=MIN_OUTPUT_CHARACTERS + MAX_GROWTH * marker.n_characters,
            max_cpu_s=MAX_CPU_S + MAX_CPU_S_PER_MESSAGE * len(messages),
        )
        known = _NEITHER | _describe_today() | self._variables | given
        text = _guarded(
            lambda: self._template.render(
                known,
                messages=marked,
                add_generation_prompt=add_generation_prompt,
                bos_token=tokenizer.bos_text,
                eos_token=tokenizer.eos_text,
            )
        )
        if tokenizer.add_bos:
            text = text.removeprefix(tokenizer.bos_text)  # the tokenizer adds it
        if continues is not None:
            text += self._begin_answer(text, begun, continues)
        elif known.get("enable_thinking") is False and text.rstrip().endswith(_THINKING[0]):
            text += _THINKING[1]  # of templates that begin it whatever they are told
        return RenderedChat(text, marker.stand_ins)

    def _begin_answer(self, text: str, message: Message, continues: Begun) -> str:
        """What of an answer is there, behind ``text``, which perhaps began its reasoning."""
        content, thoughts = message["content"], message.get("reasoning_content") or ""
        if text.endswith(_HARMONY_TURN) and continues == "content":
            return f"{_HARMONY_TEXT}{content}"
        begins = text.rstrip().endswith(_THINKING[0])
        if not begins and (not thoughts or _THINKING[0] not in self._source):
            return thoughts if continues == "reasoning_content" else content
        thoughts = thoughts if begins else f"{_THINKING[0]}\n{thoughts}"
        if continues == "reasoning_content":
            return thoughts
        return f"{thoughts}\n{_THINKING[1]}\n\n{content}"

    def mentions(self, name: str) -> bool:
        """Whether the template may ask for a variable of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    @cached_property
    def has_system_role(self) -> bool:
        """Whether it writes a leading system message: some refuse it, some leave it out."""
        probe = [{"role": "system", "content": "Probe."}, {"role": "user", "content": "Hello"}]
        try:
            return "Probe." in self.render(probe).plain_text
        except FormatError:
            return False

    def encode(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of the rendered conversation, with BOS where the model wants it."""
        return self.encode_rendered(
            self.render(messages, add_generation_prompt=add_generation_prompt)
        )

    def encode_rendered(self, chat: RenderedChat, start: int = 0) -> list[int]:
        """Token ids of ``chat`` from character ``start`` on; BOS belongs to the beginning."""
        tokenizer = self._tokenizer
        ids = tokenizer.encode(
            chat.text[start:],
            add_special=False,
            parse_special=True,
            stand_ins=chat.stand_ins,
            before=chat.text[:start],
        )
        if tokenizer.add_bos and tokenizer.bos_id is not None and start == 0:
            ids.insert(0, tokenizer.bos_id)
        return ids


def fill_template(source: str, texts: Mapping[str, str], tokenizer: Tokenizer) -> RenderedChat:
    """``source`` with each of ``texts`` in place of its name in braces, control tokens as text.

    All at once: what looks like a name in a text stays.
    """
    marker = _Marker(tokenizer.control_texts, (source, *texts.values()))
    marked = {f"{{{name}}}": marker.mark(text) for name, text in texts.items()}
    names = re.compile("|".join(map(re.escape, marked)))
    return RenderedChat(names.sub(lambda found: marked[found[0]], source), marker.stand_ins)


def _describe_today() -> dict[str, str]:
    """The date as llama.cpp gives it to templates.

    Those of Llama 3.1 and 3.3 call it the 26th of July 2024 otherwise.
    """
    return {"date_string": time.strftime("%d %b %Y"), "datetime": time.strftime("%b %d %Y")}


def read_chat_template(value: object) -> str | None:
    """The template of a model file from its metadata value, None if there is none, or an empty one.

    Raises FormatError if it is no text.
    """
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{TEMPLATE_KEY} is not a string but {type(value).__name__}; {_CURE}")
    return _NAMED.get(value or "", value) or None


class _Marker:
    """Puts stand-ins into messages; they are characters that occur nowhere in ``texts``."""

    def __init__(self, control_texts: Sequence[str], texts: object) -> None:
        self._controls = [text for text in control_texts if text]
        firsts = sorted({text[0] for text in self._controls})
        used: set[str] = set()
        self.n_characters = _collect(texts, used)
        free = (chr(code) for code in _STAND_INS if chr(code) not in used)
        pairs = list(zip(firsts, free, strict=False))
        self._marks = dict(pairs)
        self.stand_ins: Mapping[str, str] = {mark: first for first, mark in pairs}

    def mark_message(self, message: Message) -> dict[str, Any]:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise UsageError(
                f"a message needs a role such as 'user' or 'assistant', got {role!r:.80}"
            )
        if isinstance(content, (list, tuple)):
            content = _join_parts(content)
        if not isinstance(content, str):
            raise UsageError(
                "the content of a message must be text, or parts of the type 'text', got "
                f"{content!r:.80}"
            )
        return {str(k): self.mark(v) for k, v in {**message, "content": content}.items()}

    def mark(self, value: Any) -> Any:
        """Plain values with stand-ins in all their texts."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str) -> str:
        starts = set()
        ends = {len(text), len(text.rstrip())}  # templates trim
        for control in self._controls:
            start = text.find(control)
            while start >= 0:
                starts.add(start)
                start = text.find(control, start + 1)
            # What follows in the prompt may complete the token.
            for end in ends:
                for start in range(max(0, end - len(control) + 1), end):
                    if control.startswith(text[start:end]):
                        starts.add(start)
        if not starts:
            return text
        characters = list(text)
        for start in starts:
            characters[start] = self._marks[characters[start]]
        return "".join(characters)


def _join_parts(parts: Sequence[object]) -> object:
    """The text of a content in parts, as OpenAI has them, a line each; else what was given."""
    texts = []
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text"):
            return parts
        texts.append(part.get("text"))
    return "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else parts


def _collect(value: object, used: set[str], depth: int = 0) -> int:
    """Adds the private characters of all strings to ``used``; returns how long they are."""
    if depth > MAX_NESTING:
        raise UsageError(f"a message is nested more than {MAX_NESTING} deep")
    if isinstance(value, str):
        used.update(re.findall("[\U000f0000-\U000ffffd]", value))
        return len(value)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return sum(_collect(item, used, depth + 1) for item in value)
    if value is None or isinstance(value, (bool, int, float)):
        return 1
    raise UsageError(f"a message holds a {type(value).__name__}; give text and plain values")


def compile_template(source: str) -> tuple[LimitedEnvironment, Template]:
    """A template in its sandbox. Raises FormatError if it is too large or not a template.

    And UsageError for what is no text.
    """
    if not isinstance(source, str):
        raise UsageError(f"a chat template is a text, got {source!r:.80}")
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise FormatError(
            f"the chat template has {len(source)} characters, more than "
            f"{MAX_TEMPLATE_CHARACTERS}; {_CURE}"
        )
    return _guarded(lambda: _compile(source))


def _compile(source: str) -> tuple[LimitedEnvironment, Template]:
    from .template_sandbox import LimitedEnvironment

    environment = LimitedEnvironment({"raise_exception": _refuse, "strftime_now": _format_now})
    environment.begin(max_size=MIN_OUTPUT_CHARACTERS, max_cpu_s=MAX_CPU_S)
    return environment, environment.from_string(source)


class _RefusalError(Exception):
    """The template's own ``raise_exception``."""


def _refuse(message: object) -> None:
    raise _RefusalError(str(message))


def _format_now(pattern: str) -> str:
    """The local time; widths, which can be huge, are left out."""
    return time.strftime(re.sub(r"(?<=%)[-_0^#]*\d+", "", str(pattern)[:100]))


def _guarded(run: Callable[[], _T]) -> _T:
    """Makes one FormatError of whatever a template raises."""
    try:
        return run()
    except EdgeH2OError:
        raise
    except ImportError as error:
        if is_shortage(error):
            raise
        raise EdgeH2OError(f"chat templates need jinja2 >= 3.1.6: {error}") from None
    except _RefusalError as error:
        raise FormatError(f"the chat template refuses these messages: {error}") from None
    except Exception as error:
        reason = str(error) or type(error).__name__
        line = getattr(error, "lineno", None)
        place = f" (line {line})" if line else ""
        raise FormatError(f"the chat template fails{place}: {reason:.300}; {_CURE}") from None
