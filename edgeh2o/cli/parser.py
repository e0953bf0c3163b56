"""The command line's parser: errors of one line, and environment variables for flags.

Every flag of every command can be set by a variable: ``--ctx-size`` by ``EDGEH2O_CTX_SIZE``. A flag
that is given beats its variable, and so does one that excludes it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import UsageError
from .options import utf8_text

PREFIX = "EDGEH2O_"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
# Where a namespace keeps which flags came from which variables.
_ORIGINS = "flags_of_environment"


class _HelpFormatter(argparse.HelpFormatter):
    """argparse makes one for every command; its own imports shutil for the width, 3 ms."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"width": _terminal_width() - 2, **settings})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """``-c, --ctx-size N``: what a flag takes is said once."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs; those that begin with a space, examples, stay as they are."""
        fill = super()._fill_text
        paragraphs = text.split("\n\n")
        return "\n\n".join(p if p.startswith(" ") else fill(p, width, indent) for p in paragraphs)


def _terminal_width() -> int:
    """As ``shutil.get_terminal_size`` has it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line and whose flags heed the environment."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        # An abbreviation would change its meaning when a flag is added.
        defaults: dict[str, Any] = {"allow_abbrev": False, "formatter_class": _HelpFormatter}
        super().__init__(*args, **(defaults | settings))

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += " (one that begins with a dash goes after =, as in --stop=-x)"
        raise UsageError(f"{message}; see '{self.prog} --help'")

    def short_usage(self) -> str:
        """The usage of a command: what it is given, and that there are flags."""
        formatter = self._get_formatter()
        names = [
            formatter._format_args(action, action.dest).strip("[]")  # -m may give it instead
            for action in self._get_positional_actions()
        ]
        return " ".join([self.prog, *names, "[flags]"])

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """The flags that a word may be; with one dash argparse would take abbreviations."""
        found = super()._get_option_tuples(option_string)
        return [each for each in found if option_string.startswith(each[1])]

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raises OSError where the help cannot be written; argparse ends as if it had been."""
        file = file or sys.stderr
        file.write(message)
        file.flush()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As usual; then variables fill in for the flags that were not given.

        A command's parser raises UsageError for what it does not know: nothing comes after it.
        """
        args = sys.argv[1:] if args is None else args
        if self._subparsers is None:
            args = self._gather_names(self._attach_values(args))
        variables = self._find_variables()
        defaults = {action.dest: action.default for action in variables}
        missing = object()
        for action in variables:
            # Appending makes a list of None, and of nothing else that could mark it.
            action.default = None if _appends(action) else missing
        try:
            parsed, rest = super().parse_known_args(args, namespace)
        finally:
            for action in variables:
                action.default = defaults[action.dest]
        found = {action: getattr(parsed, action.dest) for action in variables}
        given = {action.dest for action, value in found.items() if value not in (missing, None)}
        given |= {
            action.dest
            for action in self._actions
            if action.dest not in defaults and getattr(parsed, action.dest, None) != action.default
        }
        for action, variable in variables.items():
            if action.dest not in given:
                is_excluded = not given.isdisjoint(self._rivals(action))
                value = action.default if is_excluded else self._read(action, variable)
                setattr(parsed, action.dest, value)
                self._remember(parsed, action, variable)
        if rest and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._suggest(rest)}")
        return parsed, rest

    def _attach_values(self, words: Sequence[str]) -> list[str]:
        """``--flag -VALUE`` as ``--flag=-VALUE``, where argparse would see two flags.

        That is done for texts, and for a lone dash where that is a flag of its own. Flags of
        llama.cpp become ours. Raises UsageError for those that cannot, and for ``-hx`` and the
        like, which argparse would take for ``-h``.
        """
        known = self._option_string_actions
        attached: list[str] = []
        left = list(words)
        while left:
            word = left.pop(0)
            before = known.get(attached[-1]) if word.startswith("-") and attached else None
            if before is not None and before.nargs is None:
                if word == "-" or (before.type is utf8_text and word not in known):
                    attached[-1] = f"{_long_flag(before)}={word}"
                    continue
            elif word.startswith("-") and word not in known:
                from .llama_cpp_flags import translate_flag

                if (ours := translate_flag(word, left, known)) is not None:
                    attached += ours
                    continue
                name = word.partition("=")[0]
                if word.startswith("-h") or f"-{name}" in known or self._has_no_number(word):
                    self.error(f"unrecognized arguments: {word}{self._suggest([f'-{name}'])}")
            attached.append(word)
        return attached

    def _has_no_number(self, word: str) -> bool:
        """Whether it is ``-temp``, which argparse would take for ``-t emp``, with a number."""
        action = self._option_string_actions.get(word[:2])
        return (
            action is not None
            and action.type in (int, float)
            and not word.startswith("--")
            and not word[2:].lstrip("=+-.").startswith(tuple("0123456789"))
        )

    def _gather_names(self, words: list[str]) -> list[str]:
        """What is no flag goes first, where a command takes several.

        Where flags part them, argparse gives a first one that may be missing nothing.
        """
        if len(self._get_positional_actions()) < 2 or "--" in words:
            return words
        names: list[str] = []
        flags: list[str] = []
        left = list(words)
        while left:
            word = left.pop(0)
            action = self._option_string_actions.get(word)
            if action is None and not word.startswith("-"):
                names.append(word)
                continue
            flags.append(word)
            if action is not None and action.nargs is None:
                flags += left[:1]
                del left[:1]
        return names + flags

    def _suggest(self, rest: Sequence[str]) -> str:
        """What was meant, perhaps."""
        from .suggestions import suggest_flag

        flag = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
        if flag is None:
            has_prompt = "--prompt" in self._option_string_actions
            return " (the prompt goes after -p, in quotation marks)" if has_prompt else ""
        similar = suggest_flag(flag, self._option_string_actions)
        return f" (did you mean {similar}?)" if similar else ""

    def _find_variables(self) -> dict[argparse.Action, str]:
        """The variables that are set, by the flag they stand for."""
        names = {
            action: environment_variable(action) for action in self._actions if takes_value(action)
        }
        return {action: name for action, name in names.items() if name in os.environ}

    def _rivals(self, action: argparse.Action) -> set[str]:
        groups = [g._group_actions for g in self._mutually_exclusive_groups]
        return {
            rival.dest
            for group in groups
            if action in group
            for rival in group
            if rival is not action
        }

    def _read(self, action: argparse.Action, variable: str) -> Any:
        """The variable's text as the flag's value. Raises UsageError that names the variable."""
        text = os.environ[variable]
        if action.nargs == 0:
            if text.lower() not in _YES + _NO:
                raise UsageError(f"{variable}={text!r}: write 1 or 0")
            is_yes = text.lower() in _YES
            if isinstance(action, argparse.BooleanOptionalAction):
                return is_yes
            return action.const if is_yes else action.default
        try:
            value = self._get_value(action, text)
            self._check_value(action, value)
        except argparse.ArgumentError as error:
            raise UsageError(f"{variable}: {error.message}") from None
        return [value] if _appends(action) else value

    @staticmethod
    def _remember(namespace: argparse.Namespace, action: argparse.Action, variable: str) -> None:
        origins = getattr(namespace, _ORIGINS, {})
        origins |= {flag: variable for flag in action.option_strings}
        setattr(namespace, _ORIGINS, origins)


def takes_value(action: argparse.Action) -> bool:
    """Whether the action is a flag that sets something."""
    return bool(_long_flag(action)) and action.dest not in ("help", "version")


def environment_variable(action: argparse.Action) -> str:
    """The variable that stands for a flag."""
    return PREFIX + _long_flag(action)[2:].replace("-", "_").upper()


def name_variables(message: str, args: argparse.Namespace | None) -> str:
    """``message`` with the variables of those of its flags that came from the environment."""
    origins: dict[str, str] = getattr(args, _ORIGINS, {})
    words = {word.strip("(),;:'") for word in message.split()}
    variables = sorted({origins[flag] for flag in words & origins.keys()})
    return f"{message} (set by {', '.join(variables)})" if variables else message


def _long_flag(action: argparse.Action) -> str:
    return next((flag for flag in action.option_strings if flag.startswith("--")), "")


def _appends(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)
