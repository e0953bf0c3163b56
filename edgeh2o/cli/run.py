"""``edgeh2o run``: answers one prompt."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import EXIT_INTERRUPTED, UsageError
from ..sampling_config import SamplingParams
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
from .memory_options import add_memory_profile_option, watch_memory, write_memory_profile
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
from .prompt import STDIN, add_prompt_options, read_prompt, read_text

if TYPE_CHECKING:
    from ..engine.access import GenerationStream
    from ..engine.grammar import Grammar, GrammarKind
    from ..engine.results import GenerationResult
    from ..engine.session import Session
    from ..llm import LLM

HELP = "answer a prompt"
DESCRIPTION = "Answer a prompt. The answer streams to stdout, statistics go to stderr."
EXAMPLES = """\
  edgeh2o run smollm2-135m -p "The capital of France is" -n 16 --temp 0
  edgeh2o run model.gguf --chat -p "Name three rivers." --system "Be brief."
  edgeh2o run model.gguf --chat -f question.txt --quiet > answer.txt
  cat document.txt | edgeh2o run model.gguf - -n 100"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_model_argument(parser)
    add_prompt_options(parser)
    add_draft_option(parser)
    parser.add_argument(
        "--no-special",
        dest="parse_special",
        action="store_false",
        help="take the text of control tokens such as <|im_start|> literally",
    )
    chat = add_chat_options(parser)
    chat.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="take the prompt for a message of a chat (default: for raw text)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "-j",
        "--json-schema",
        metavar="FILE",
        help="the answer is JSON of this schema, a file or the JSON itself (edgeh2o[serve])",
    )
    form.add_argument(
        "--grammar",
        metavar="FILE",
        help="the answer has the form of this grammar, of Lark or, in a file *.gbnf, of llama.cpp; "
        "the grammar itself if it has ::= (edgeh2o[serve])",
    )
    add_session_options(parser)
    add_config_options(parser, SamplingParams, title="sampling")
    add_model_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    add_memory_profile_option(output)
    add_verbosity_options(output)


def execute(args: argparse.Namespace) -> int:
    """Loads the model, streams the answer; returns the exit code."""
    _check_standard_input(args)
    sampling = replace(read_sampling(args), schema=_read_form(args))
    options = read_model_options(args)
    check_together(sampling, options)
    prompt = read_prompt(args)
    names = ("system", "chat_template", "chat_template_kwargs", "reasoning")
    if not args.chat and (given := [name for name in names if getattr(args, name) is not None]):
        flag = f"--{given[0].replace('_', '-')}"
        raise UsageError(f"{flag} is for a prompt that is the message of a chat; add --chat")
    session = find_session(args)

    def check(opened: Session) -> None:
        """Refuses what cannot be answered, while the weights are read."""
        prompts = opened.prompts
        opening = partial(prompts.open, prompt, parse_special=args.parse_special)
        if args.chat:
            opening = partial(prompts.open_chat, _messages(args, prompt))
        if session is None:
            opened.check_prompt(opening, sampling)
        else:  # the prompt may go on from it
            opened.check_file(session)
            opening()

    with (
        watch_memory(args) as profile,
        open_model(
            options,
            profile=profile,
            check=check,
            **read_template(args),
        ) as (llm, bars),
    ):
        if session is not None and llm.load_session(session).get("messages"):
            _refuse_conversation(args)
        stream = _start(llm, prompt, sampling, args)
        try:  # what was read is worth saving when nobody reads the answer any more
            with leaving_on_signals():
                is_complete = print_answer(stream, bars, silent=args.json)
            result = stream.result()
            _print_result(result, args, is_complete=is_complete)
            write_memory_profile(profile, args, result.stats.memory_bytes)
        finally:
            save_session(llm, args, {})
    return 0 if is_complete else EXIT_INTERRUPTED


def _check_standard_input(args: argparse.Namespace) -> None:
    """Raises UsageError if it is to be two things: the first would leave the second nothing."""
    sources = {
        "the prompt": args.prompt_file or args.stdin,
        "--json-schema": args.json_schema,
        "--grammar": args.grammar,
        "--chat-template": args.chat_template,
    }
    readers = [name for name, source in sources.items() if source == STDIN]
    if len(readers) > 1:
        raise UsageError(
            f"standard input can be {' or '.join(readers)}, not both; give a file for the other"
        )


def _read_form(args: argparse.Namespace) -> Grammar | None:
    """The form that the answer is to have, None for any."""
    if args.json_schema is None and args.grammar is None:
        return None
    from ..engine.grammar import Grammar

    if args.json_schema is not None:
        given = args.json_schema
        is_json = given.lstrip().startswith("{")
        return Grammar.of_schema(given if is_json else read_text(given, flag="--json-schema"))
    if "::=" in args.grammar:
        return Grammar("gbnf", args.grammar)
    kind: GrammarKind = "gbnf" if args.grammar.endswith(".gbnf") else "lark"
    return Grammar(kind, read_text(args.grammar, flag="--grammar"))


def _refuse_conversation(args: argparse.Namespace) -> None:
    if not args.session_read_only:
        raise UsageError(
            f"--session {args.session} holds a conversation of 'edgeh2o chat', which would be "
            "lost; name another file, or add --session-read-only"
        )


def _start(
    llm: LLM, prompt: str, sampling: SamplingParams, args: argparse.Namespace
) -> GenerationStream:
    keep_cache = args.session is not None
    if args.chat:
        return llm.stream_chat(_messages(args, prompt), sampling, keep_cache=keep_cache)
    return llm.stream(prompt, sampling, parse_special=args.parse_special, keep_cache=keep_cache)


def _messages(args: argparse.Namespace, prompt: str) -> list[dict[str, Any]]:
    return [*begin_messages(args), {"role": "user", "content": prompt}]


def _print_result(result: GenerationResult, args: argparse.Namespace, *, is_complete: bool) -> None:
    if args.json:
        print(json.dumps(result.to_dict(), ensure_ascii=False), flush=True)
    elif not args.quiet:
        title = "" if is_complete else "interrupted; so far:"
        if result.finish_reason == "length" and result.stats.fills_context:
            title = f"the context of {result.stats.context_size} positions is full (see -c)"
        print_note(f"{title}\n{result.stats.format_table()}")
