"""Flags that run and chat share: the chat template, the system message, the session file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .prompt import read_text

if TYPE_CHECKING:
    from ..llm import LLM


def add_chat_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds ``--system`` and what concerns the template; returns their group."""
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--system",
        "-sys",
        "--system-prompt",
        metavar="TEXT",
        help="system message of the conversation",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="jinja2 template that takes the place of the model's own",
    )
    group.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables of the template as one JSON object, such as "
        '{"enable_thinking": false} (default: what the template does without)',
    )
    return group


def read_template(args: argparse.Namespace) -> dict[str, Any]:
    """The template and its variables, as ``LLM`` takes them.

    Raises UsageError for a file that cannot be read and for variables that are no JSON object.
    """
    path, text = args.chat_template, args.chat_template_kwargs
    return {
        "chat_template": None if path is None else read_text(path, flag="--chat-template"),
        "chat_template_kwargs": None if text is None else _parse_variables(text),
    }


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
        "that begins like the saved one is read only from where it is new",
    )
    group.add_argument(
        "--session-read-only", action="store_true", help="never write to the session file"
    )


def load_session(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Takes up the session file if there is one; returns what was saved with it."""
    if args.session is None:
        if args.session_read_only:
            raise UsageError("--session-read-only needs --session FILE")
        return {}
    path = Path(args.session)
    if not path.exists():
        if args.session_read_only:
            raise UsageError(f"--session {path} does not exist, and is not to be written")
        if not path.parent.is_dir():
            raise UsageError(f"--session {path}: there is no folder {path.parent}")
        return {}
    return llm.load_session(path)


def save_session(llm: LLM, args: argparse.Namespace, extra: dict[str, Any]) -> None:
    """Saves what the cache holds, if it is wanted and the prompt was read to its end."""
    if args.session is not None and not args.session_read_only and llm.has_open_prompt:
        llm.save_session(args.session, extra=extra)
