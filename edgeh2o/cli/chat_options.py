"""Flags that run and chat share: the chat template, the system message, the session file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..formats.atomic_file import check_writable
from .options import utf8_text
from .prompt import read_text

if TYPE_CHECKING:
    from ..llm import LLM


_REASONING: Mapping[str, Mapping[str, bool]] = {
    "on": {"enable_thinking": True},
    "off": {"enable_thinking": False},
    "auto": {},
}
_TEMPLATE_MARKS = ("{{", "{%")
_TEMPLATES = {
    "chatml": "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
}


def add_chat_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds ``--system`` and what concerns the template; returns their group."""
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--system",
        "-sys",
        "--system-prompt",
        type=utf8_text,
        metavar="TEXT",
        help="system message of the conversation",
    )
    add_template_options(group)
    return group


def add_template_options(group: argparse._ArgumentGroup) -> None:
    """Adds ``--chat-template`` and what its variables are."""
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="jinja2 template that takes the place of the model's own; or its text, or chatml",
    )
    group.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables of the template as one JSON object, such as "
        '{"enable_thinking": false} (default: what the template does without)',
    )
    group.add_argument(
        "--reasoning",
        choices=tuple(_REASONING),
        help="whether answers begin by reasoning, as far as the template knows that: its variable "
        "enable_thinking (default: auto, what the template does without)",
    )


def read_template(args: argparse.Namespace) -> dict[str, Any]:
    """The template and its variables, as ``LLM`` takes them.

    Raises UsageError for a file that cannot be read and for variables that are no JSON object.
    """
    template, text = args.chat_template, args.chat_template_kwargs
    variables = {
        **_REASONING[args.reasoning or "auto"],
        **({} if text is None else _parse_variables(text)),
    }
    if template is not None:
        is_text = any(mark in template for mark in _TEMPLATE_MARKS)
        known = template if is_text else _TEMPLATES.get(template)
        template = read_text(template, flag="--chat-template") if known is None else known
    return {"chat_template": template, "chat_template_kwargs": variables or None}


def _parse_variables(text: str) -> dict[str, Any]:
    try:
        variables = json.loads(text)
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise UsageError(
            "--chat-template-kwargs takes one JSON object such as "
            f"'{{\"enable_thinking\": false}}', got {text!r:.80}"
        )
    return variables


def begin_messages(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The messages before the first of the user."""
    return [] if args.system is None else [{"role": "system", "content": args.system}]


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--session`` and ``--session-read-only``."""
    group = parser.add_argument_group("session")
    group.add_argument(
        "--session",
        metavar="FILE",
        help="go on from this file if it exists, and save the cache to it at the end: a prompt "
        "that begins like the saved one is read only from a little before where it is new",
    )
    group.add_argument(
        "--session-read-only", action="store_true", help="never write to the session file"
    )


def find_session(args: argparse.Namespace) -> Path | None:
    """The session file to go on from; None if there is none yet.

    Raises UsageError for one that could not be written at the end, and FormatError for what is no
    session file, before a model is loaded.
    """
    path = _find_session(args)
    if path is not None:
        from ..engine.session_file import check_session_file

        check_session_file(path)
    return path


def _find_session(args: argparse.Namespace) -> Path | None:
    if args.session is None:
        if args.session_read_only:
            raise UsageError("--session-read-only needs --session FILE")
        return None
    path = Path(args.session)
    if args.session_read_only:
        if not path.exists():
            raise UsageError(f"--session {path} does not exist, and is not to be written")
        return path
    check_writable(path, "--session")
    is_new = not path.exists() or (path.is_file() and path.stat().st_size == 0)  # as mktemp makes
    return None if is_new else path


def save_session(llm: LLM, args: argparse.Namespace, extra: dict[str, Any]) -> None:
    """Saves ``extra`` and the cache of a prompt, as far as it was read, if that is wanted.

    An empty conversation is worth saving where it takes the place of another.
    """
    if args.session is None or args.session_read_only:
        return
    if llm.has_open_prompt or any(extra.values()) or (extra and Path(args.session).exists()):
        llm.save_session(args.session, extra=extra)
