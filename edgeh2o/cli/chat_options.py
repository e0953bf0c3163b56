"""Flags that run and chat share: the chat template, the system message, the session file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .prompt import read_text

if TYPE_CHECKING:
    from ..llm import LLM


def add_chat_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds ``--system`` and ``--chat-template``; returns their group."""
    group = parser.add_argument_group("chat")
    group.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="jinja2 template that takes the place of the model's own",
    )
    return group


def read_template(args: argparse.Namespace) -> str | None:
    """The template of ``--chat-template``, None for the model's own."""
    return None if args.chat_template is None else read_text(args.chat_template)


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
