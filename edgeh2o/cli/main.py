"""Entry point: parses the command line, runs a verb, turns errors into exit codes.

0 success, 1 a failure, 2 wrong usage, 130 interrupted by Ctrl-C, 141 stdout closed by its reader.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module

from .._version import __version__
from ..errors import EXIT_INTERRUPTED, EdgeH2OError, UsageError, is_shortage
from .parser import PREFIX, Parser, name_variables
from .report import NAMES_OF_FILES, printable

# In the order of the help; each is a module, imported where it is needed.
_GROUPS = {
    "answers": ("run", "chat", "serve", "batch", "embed"),
    "models": ("pull", "inspect", "calibrate", "quantize", "export-onnx"),
    "speed and quality": (
        *("bench", "perplexity", "evaluate", "needle", "agreement", "ablate", "heatmap"),
    ),
    "this machine": ("doctor", "completion"),
}
VERBS = tuple(verb for verbs in _GROUPS.values() for verb in verbs)
# Those that need neither NumPy nor tokenizers.
_LIGHT_VERBS = ("pull", "doctor", "completion")
EXIT_BROKEN_PIPE = 141

_DESCRIPTION = "Run language models with long prompts on CPUs: sparse prefill where it is faster."
_EXAMPLES = """\
  edgeh2o run smollm2-135m -p "The capital of France is" -n 16
  edgeh2o chat model.gguf
  edgeh2o serve model.gguf
  edgeh2o run --help            the flags of a command"""
_EPILOG = (
    "Every flag can be set by an environment variable: --ctx-size by EDGEH2O_CTX_SIZE. A flag that "
    "is given beats its variable."
)


class _MainParser(Parser):
    """Lists the commands by what they are for."""

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, (), ())
        formatter.add_text(self.description)
        actions = next(a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        verbs = {action.dest: action for action in actions._choices_actions}
        for title, names in _GROUPS.items():
            formatter.start_section(title)
            formatter.add_arguments([verbs[name] for name in names if name in verbs])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([a for a in self._actions if a.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of every verb; ``execute`` of what it returns is the function of the verb.

    If ``only`` is a verb that needs no other, the rest is left out: it would take 20 ms.
    """
    parser = _MainParser(
        prog="edgeh2o",
        usage="edgeh2o COMMAND ...",
        description=f"{_DESCRIPTION}\n\n{_EXAMPLES}",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"edgeh2o {__version__}")
    verbs = parser.add_subparsers(
        prog="edgeh2o", metavar="COMMAND", required=True, parser_class=Parser
    )
    for name in (only,) if only in VERBS and only != "completion" else VERBS:
        verb = import_module(f".{name.replace('-', '_')}", __package__)
        command = verbs.add_parser(
            name, help=verb.HELP, description=f"{verb.DESCRIPTION}\n\n{verb.EXAMPLES}"
        )
        verb.add_arguments(command)
        command.usage = command.short_usage()
        command.set_defaults(execute=verb.execute, verbs=verbs, is_light=name in _LIGHT_VERBS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: the process's own); returns the exit code."""
    args: argparse.Namespace | None = None
    try:
        _require_streams()
        _use_utf8()
        with _one_line_warnings():
            words = _read_words(sys.argv[1:] if argv is None else argv)
            if not words:
                print(build_parser().format_help(), end="", file=sys.stderr)
                return UsageError.exit_code
            parser = build_parser(words[0])
            if any(name.startswith(PREFIX) for name in os.environ):
                from .environment import warn_of_unknown

                warn_of_unknown(parser, build_parser)
            args = parser.parse_args(words)
            if not args.is_light:
                _require_addresses()
            code: int = args.execute(args)
            sys.stdout.flush()
            return code
    except EdgeH2OError as error:
        _print_line("error", name_variables(str(error), args))
        return error.exit_code
    except KeyboardInterrupt:
        print("edgeh2o: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if is_shortage(error):
            _print_line("error", _explain_shortage())
        elif isinstance(error, OSError):  # a full disk under stdout, mostly
            _discard_stdout()
            place = error.filename or "standard output"
            may_not = isinstance(error, PermissionError)
            cure = "check its permissions" if may_not else "free some space or write elsewhere"
            _print_line("error", f"{place}: {error.strerror}; {cure}")
        else:
            raise
        return EdgeH2OError.exit_code


def _read_words(words: Sequence[str]) -> list[str]:
    """``help VERB`` as ``VERB --help``. Raises UsageError, with the cure, where no verb is."""
    first, *rest = words or [""]
    if first == "help":
        first, *rest = words = [*rest[:1], "--help"]
    elif first == "version" and not rest:
        return ["--version"]
    if not first or first in (*VERBS, "-h", "--help", "--version"):
        return list(words)
    from .suggestions import suggest_verb

    raise UsageError(f"{suggest_verb(words, VERBS)}; see 'edgeh2o --help'")


def _explain_shortage() -> str:
    """The cure of what ``is_shortage`` says: the limit of addresses, if there is one."""
    limit = _address_limit()
    smaller = "use a smaller model, context (-c) or batch (-b, -ub)"
    if limit is None:
        return f"out of memory; {smaller}"
    what = f"addresses are limited to {limit // 1024} kB (ulimit -v)"
    return f"out of memory: {what}; raise that limit, or {smaller}"


def _require_addresses() -> None:
    """Raises ResourceError where a limit of addresses holds no libraries: BLAS ends the process."""
    if _address_limit() is not None:
        from ..host.memory import require_library_addresses

        require_library_addresses()


def _address_limit() -> int | None:
    """RLIMIT_AS in bytes, None without one."""
    try:
        import resource
    except ImportError:  # it is a library itself, which a limit may leave no addresses for
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _print_line(kind: str, message: str) -> None:
    with suppress(OSError):  # stderr may be as full as stdout
        print(f"edgeh2o: {kind}: {printable(' '.join(message.split()))}", file=sys.stderr)


def _require_streams() -> None:
    """Gives closed streams a place to go: the model's file must not get their numbers.

    Raises UsageError when stdout, where the answer goes, is closed.
    """
    streams = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
    closed = [(name, mode) for name, mode in streams if getattr(sys, name) is None]
    for name, mode in closed:
        setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    if ("stdout", "w") in closed:
        raise UsageError("standard output is closed; let it go to a file, a pipe or /dev/null")


def _use_utf8() -> None:
    """Text is UTF-8 whatever the locale says; a C locale would fail on the first accent."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors=NAMES_OF_FILES)


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    def show(message: Warning | str, *_: object, **__: object) -> None:
        _print_line("warning", str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def _discard_stdout() -> None:
    """Nothing can be written any more; the interpreter's last flush must not fail again."""
    with suppress(OSError):  # a stream of a caller's own has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
