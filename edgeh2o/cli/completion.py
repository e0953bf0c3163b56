"""``edgeh2o completion``: scripts that teach a shell the commands and flags.

They are made from the parser, so they know what it knows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
# edgeh2o: completion for bash; source it, or put it where bash-completion looks
_edgeh2o() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} flags words choices
    local before=${{COMP_WORDS[COMP_CWORD - 1]}}
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W '{commands}' -- "$word"))
    elif [[ -n $choices ]]; then
        COMPREPLY=($(compgen -W "$choices" -- "$word"))
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    elif [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _edgeh2o edgeh2o
"""
_ZSH_START = "autoload -U +X bashcompinit && bashcompinit\n"

HELP = "print a shell's completion script"
DESCRIPTION = "Print a completion script: commands, flags, and the values that a flag may have."
EXAMPLES = """\
  edgeh2o completion bash > ~/.local/share/bash-completion/completions/edgeh2o
  source <(edgeh2o completion zsh)
  edgeh2o completion fish > ~/.config/fish/completions/edgeh2o.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    parser.add_argument("shell", choices=SHELLS, help="the shell to print it for")


def execute(args: argparse.Namespace) -> int:
    """Prints the script of the shell."""
    verbs: dict[str, argparse.ArgumentParser] = args.verbs.choices
    helps = {action.dest: action.help or "" for action in args.verbs._choices_actions}
    if args.shell == "fish":
        print("\n".join(_fish_lines(verbs, helps)))
        return 0
    cases = [line for verb, parser in verbs.items() for line in _bash_case(verb, parser)]
    help_case = f"        help) flags= words='{' '.join(verbs)}' ;;"
    script = _BASH.format(
        commands=" ".join(["--help", "--version", "help", *verbs]),
        cases="\n".join([help_case, *cases]),
    )
    print(_ZSH_START + script if args.shell == "zsh" else script, end="")
    return 0


def _bash_case(verb: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"        {verb})"
    yield f"            flags='{' '.join(_flags(parser))}' words='{' '.join(_choices(parser))}'"
    limited = [action for action in parser._actions if action.option_strings and action.choices]
    if limited:
        yield "            case $before in"
        for action in limited:
            values = " ".join(map(str, action.choices or ()))
            yield f"                {'|'.join(action.option_strings)}) choices='{values}' ;;"
        yield "            esac"
    yield "            ;;"


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


def _choices(parser: argparse.ArgumentParser) -> list[str]:
    """Words that stand for arguments without a flag."""
    positional = [action for action in parser._actions if not action.option_strings]
    return [str(choice) for action in positional for choice in action.choices or ()]


def _fish_lines(verbs: dict[str, argparse.ArgumentParser], helps: dict[str, str]) -> Iterator[str]:
    yield "# edgeh2o: completion for fish"
    yield "complete -c edgeh2o -n __fish_use_subcommand -f -a help -d 'the flags of a command'"
    topics = _quote(" ".join(verbs))
    yield f"complete -c edgeh2o -n '__fish_seen_subcommand_from help' -f -a {topics}"
    for verb in verbs:
        yield f"complete -c edgeh2o -n __fish_use_subcommand -f -a {verb} -d {_quote(helps[verb])}"
    for verb, parser in verbs.items():
        start = f"complete -c edgeh2o -n '__fish_seen_subcommand_from {verb}'"
        if choices := _choices(parser):
            yield f"{start} -a {_quote(' '.join(choices))}"
        for action in parser._actions:
            if not action.option_strings:
                continue
            names = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else _short_option(flag)
                for flag in action.option_strings
                if flag != "-"
            )
            argument = " -r" if action.nargs != 0 else ""
            if action.choices:
                argument = f" -x -a {_quote(' '.join(map(str, action.choices)))}"
            if names:
                yield f"{start} {names}{argument} -d {_quote(_describe(action))}"


def _short_option(flag: str) -> str:
    """Flags of several letters after one dash, such as -ub, are "old" options to fish."""
    return f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"


def _describe(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%")
    return text.split(" (default")[0].split(";")[0]


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
