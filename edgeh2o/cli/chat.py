"""``edgeh2o chat``: a conversation that keeps its cache between turns."""

from __future__ import annotations

import argparse
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import EdgeH2OError, FormatError, UsageError
from ..sampling_config import EVICT_WHEN_FULL, SHIFT_WHEN_FULL, SamplingParams
from .answer import print_answer
from .chat_options import (
    add_chat_options,
    add_session_options,
    begin_messages,
    find_session,
    read_template,
    save_session,
)
from .leaving import leaving_on_signals
from .model_options import (
    add_draft_option,
    add_model_argument,
    add_model_options,
    add_verbosity_options,
    check_together,
    open_model,
    print_note,
    read_model_options,
    read_sampling,
)
from .options import add_config_options
from .progress import ProgressBars
from .terminal_input import line_editing, read_line

if TYPE_CHECKING:
    from ..engine.session import Session
    from ..engine.stats import GenerationStats
    from ..llm import LLM

PROMPT = "> "
COMMANDS = """/help   this list
/regen  answer the last message again
/reset  forget the conversation, except the system message; also /clear
/exit   leave, as Ctrl-D does
Ctrl-C stops an answer. A line that ends with \\ goes on in the next; a paste is one message."""

HELP = "talk to a model"
DESCRIPTION = (
    "Talk to a model. One line is one message; answers go to stdout. Type /help for commands."
)
EXAMPLES = """\
  edgeh2o chat smollm2-135m
  edgeh2o chat model.gguf --system "You are a cook." --session talk.session"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_model_argument(parser)
    add_draft_option(parser)
    add_chat_options(parser)
    add_session_options(parser)
    add_config_options(parser, SamplingParams, title="sampling")
    add_model_options(parser)
    add_verbosity_options(parser.add_argument_group("output"))


def execute(args: argparse.Namespace) -> int:
    """Answers line after line; returns the exit code."""
    sampling = read_sampling(args)
    options = read_model_options(args)
    check_together(sampling, options)
    session = find_session(args)

    def check(opened: Session) -> None:
        _ = opened.prompts.chat_template  # not to fail after the first message
        if session is not None:
            opened.check_file(session)

    with open_model(options, check=check, **read_template(args)) as (llm, bars):
        extra = {} if session is None else llm.load_session(session)
        saved = _read_messages(extra)
        if session is not None and "messages" not in extra and not args.session_read_only:
            warnings.warn(
                f"{session} holds a prompt of 'edgeh2o run'; the conversation takes its place",
                stacklevel=1,
            )
        if saved and begin_messages(args) not in ([], saved[:1]):
            raise UsageError(
                f"--session {session} holds a conversation that began with another --system; "
                "leave that out, or name another file"
            )
        bars.close()
        conversation = Conversation(llm, bars, sampling, args, saved or begin_messages(args))
        try:
            with leaving_on_signals(), line_editing() if sys.stdin.isatty() else nullcontext():
                conversation.run(n_saved=len(saved))
        finally:
            save_session(llm, args, {"messages": conversation.messages})
    return 0


class Conversation:
    """Messages so far, and where the next one comes from."""

    def __init__(
        self,
        llm: LLM,
        bars: ProgressBars,
        sampling: SamplingParams,
        args: argparse.Namespace,
        messages: list[dict[str, Any]],
    ) -> None:
        self.messages = messages
        self._llm = llm
        self._bars = bars
        self._sampling = sampling
        self._args = args
        self._is_interactive = sys.stdin.isatty()

    def run(self, *, n_saved: int = 0) -> None:
        """Reads and answers until the end of the input or /exit.

        ``n_saved`` of the messages so far are those of a session file.
        """
        if self._is_interactive and not self._args.quiet:
            print_note("/help lists the commands")
            if n_saved:
                print_note(f"going on after the {n_saved} messages of {self._args.session}")
        while (line := self._read_line()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/help":
                print_note(COMMANDS)
            elif text in ("/reset", "/clear"):
                self.messages[:] = [m for m in self.messages[:1] if m["role"] == "system"]
                self._llm.forget()  # not to be found in the session file
            elif text == "/regen":
                self._answer_again()
            elif text.startswith("/") and len(text.split()) == 1:
                print_note(f"there is no command {text}; /help lists them")
            elif text:
                self._answer(line)

    def _read_line(self) -> str | None:
        """The next message, None at the end of the input. Ctrl-C takes back what was typed."""
        lines: list[str] = []
        while True:
            try:
                line = self._read_input()
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                print_note("\nCtrl-D or /exit leaves")
                lines.clear()
                continue
            if line is None:
                return "\n".join(lines) if lines else None
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def _read_input(self) -> str | None:
        if self._is_interactive:
            sys.stderr.flush()
            try:
                return read_line(PROMPT)
            except EOFError:
                return None
        line = sys.stdin.buffer.readline()
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"standard input is not UTF-8 text: {error.reason} at byte {error.start} of a line"
            ) from None
        return text.removesuffix("\n").removesuffix("\r") if line else None

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        try:
            self._make_room()
            stream = self._llm.stream_chat(self.messages, self._sampling)
            is_complete = print_answer(stream, self._bars)
        except EdgeH2OError as error:
            self.messages.pop()
            if not self._is_interactive:
                raise
            print_note(f"edgeh2o: {error} (/reset forgets the conversation)")
            return
        except BaseException:
            self.messages.pop()  # a saved conversation must not have two of the user in a row
            raise
        result = stream.result()
        if result.text or is_complete:
            self.messages.append({"role": "assistant", "content": result.text})
        else:
            self.messages.pop()
        if not is_complete and not self._is_interactive:
            raise KeyboardInterrupt  # the lines to come were written for another conversation
        if not is_complete:
            print_note("(stopped)")
        is_cut = result.finish_reason == "length" and result.stats.fills_context
        if is_cut and not self._args.quiet:
            print_note(
                "(the context is full; /reset forgets the conversation, -c sets its size, "
                "--context-full evict goes on)"
            )
        if self._args.verbose:
            print_note(result.stats.format_table())
        elif self._is_interactive and not self._args.quiet:
            print_note(_summarise(result.stats))

    def _make_room(self) -> None:
        """Forgets what no context has room for, where the conversation is to go on past it."""
        if self._sampling.context_full == SHIFT_WHEN_FULL:
            self._drop_oldest(self._llm.context_limit)
        elif self._sampling.context_full == EVICT_WHEN_FULL:
            from ..engine.prompt import CHEAP_PROMPT_TOKENS

            self._drop_oldest(CHEAP_PROMPT_TOKENS)  # no prompt may be longer

    def _drop_oldest(self, context: int) -> None:
        """Leaves a quarter of a context to the answer: the oldest exchanges are forgotten."""
        template, n_before = self._llm.chat_template, len(self.messages)
        first = int(self.messages[0]["role"] == "system")

        def is_too_long() -> bool:
            rendered = template.render(self.messages)
            return 4 * len(template.encode_rendered(rendered)) > 3 * context

        while len(self.messages) > first + 2 and is_too_long():
            del self.messages[first : first + 2]
        n_dropped = n_before - len(self.messages)
        if n_dropped and not self._args.quiet:
            print_note(f"(the context is full; the oldest {n_dropped} messages are forgotten)")

    def _answer_again(self) -> None:
        """Replaces the last answer, unless none comes. Another seed gives another one."""
        last = self.messages[-2:]
        if [message["role"] for message in last] != ["user", "assistant"]:
            print_note("there is no answer yet")
            return
        if self._sampling.seed is not None:
            self._sampling = replace(self._sampling, seed=(self._sampling.seed + 1) % 2**64)
        del self.messages[-2:]
        n_before = len(self.messages)
        try:
            self._answer(last[0]["content"])
        finally:
            if len(self.messages) == n_before:
                self.messages += last


def _summarise(stats: GenerationStats) -> str:
    read = stats.prompt_tokens - stats.cached_tokens
    rates = [f"{rate:,.0f}" if rate else "-" for rate in (stats.prefill_tps, stats.decode_tps)]
    used = min(stats.prompt_tokens + stats.generated_tokens, stats.context_size)
    return (
        f"[read {read} tokens at {rates[0]}/s, wrote {stats.generated_tokens} at {rates[1]}/s, "
        f"{used} of {stats.context_size} positions]"
    )


def _read_messages(extra: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a session file; [] if it holds none."""
    messages = extra.get("messages", [])
    is_good = isinstance(messages, list) and all(
        isinstance(message, dict) and all(isinstance(text, str) for text in message.values())
        for message in messages
    )
    if not is_good:
        raise FormatError("the session file holds a conversation that cannot be; delete it")
    return list(messages)
