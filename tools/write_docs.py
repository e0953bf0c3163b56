"""Writes the tables of docs/ that the sources know best: flags, architectures, types, tokenizers.

    python -m tools.write_docs           rewrite what stands between the markers
    python -m tools.write_docs --check   exit code 1 if that would change a file

A table stands between ``<!-- NAME: written by tools/write_docs.py -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgeh2o import _core
from edgeh2o.cli.environment import VARIABLES
from edgeh2o.cli.main import build_parser
from edgeh2o.config import CACHE_TYPES
from edgeh2o.formats.gguf_types import TENSOR_TYPES
from edgeh2o.formats.known_models import KNOWN_MODELS
from edgeh2o.models import registered_architectures
from edgeh2o.models.tensors import readable_types
from edgeh2o.models.transformers.families import FAMILIES, TEXT_TYPES
from edgeh2o.tokenizer import pre_tokenizer_names, tokenizer_models

DOCS = Path(__file__).parents[1] / "docs"
_SECTION = re.compile(
    r"(<!-- (\w+): written by tools/write_docs\.py -->\n).*?(<!-- end -->)", re.DOTALL
)


def list_verbs() -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb by name."""
    (verbs,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    return dict(verbs.choices)


def write_flags() -> str:
    """A table per group of flags, with the verbs that have it."""
    tables: dict[tuple[str, ...], list[str]] = {}
    for verb, parser in list_verbs().items():
        for group in parser._action_groups:
            rows = [_describe_flag(parser, a) for a in group._group_actions if a.dest != "help"]
            if rows:
                title = group.title or ""
                named = (
                    "arguments and flags" if title in ("options", "positional arguments") else title
                )
                tables.setdefault((named, *rows), []).append(verb)
    lines = []
    for (title, *rows), verbs in sorted(tables.items(), key=lambda item: (-len(item[1]), item[1])):
        lines += [
            f"**{', '.join(verbs)}**: {title}",
            "",
            "| flag | meaning |",
            "|---|---|",
            *rows,
            "",
        ]
    return "\n".join(lines)


def _describe_flag(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    value = parser._get_formatter()._format_args(action, _default_metavar(action))
    names = ", ".join(f"`{flag}`" for flag in action.option_strings)
    if not names:
        names = f"`{value}`"
    elif value:
        names += f" `{value}`"
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"| {_escape(names)} | {_escape(text)} |"


def _default_metavar(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def write_models() -> str:
    """The models that ``edgeh2o pull`` knows."""
    rows = [
        f"| `{model.name}` | {model.member.rpartition('/')[2]} | {model.model_bytes / 1e6:.0f} MB |"
        for model in KNOWN_MODELS.values()
    ]
    return "\n".join(["| name | file | size |", "|---|---|---|", *rows, ""])


def write_architectures() -> str:
    """Values of ``general.architecture``."""
    return _in_code(registered_architectures())


def write_tensor_types() -> str:
    """Tensor types with their bits per weight."""
    sizes = {kind.name: 8 * kind.block_bytes / kind.block_size for kind in TENSOR_TYPES.values()}
    held = {name: 8 * size / n for name, (n, size) in _core.widened_types().items()}
    rows = [
        f"| `{name}` | {sizes[name]:g} | {held.get(name, sizes[name]):g} |"
        for name in readable_types()
    ]
    return "\n".join(["| type | bits per weight | in memory |", "|---|---|---|", *rows, ""])


def write_model_types() -> str:
    """Values of ``model_type`` in folders of safetensors, with the architecture they become."""
    families = {**FAMILIES, **{name: FAMILIES[texts[0]] for name, texts in TEXT_TYPES.items()}}
    rows = [f"| `{name}` | `{family.architecture}` |" for name, family in sorted(families.items())]
    return "\n".join(["| `model_type` | architecture |", "|---|---|", *rows, ""])


def write_tokenizers() -> str:
    """Values of ``tokenizer.ggml.model``."""
    return _in_code(tokenizer_models())


def write_pre_tokenizers() -> str:
    """Values of ``tokenizer.ggml.pre``."""
    return _in_code(pre_tokenizer_names())


def write_cache_types() -> str:
    """Values of ``--cache-type``."""
    return _in_code(CACHE_TYPES)


def _in_code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) + "\n"


def write_variables() -> str:
    """Environment variables beside those of the flags."""
    rows = [f"| `{name}` | {_escape(meaning)} |" for name, meaning in VARIABLES.items()]
    return "\n".join(["| variable | meaning |", "|---|---|", *rows, ""])


WRITERS: dict[str, Callable[[], str]] = {
    "variables": write_variables,
    "flags": write_flags,
    "models": write_models,
    "architectures": write_architectures,
    "tensor_types": write_tensor_types,
    "model_types": write_model_types,
    "tokenizers": write_tokenizers,
    "pre_tokenizers": write_pre_tokenizers,
    "cache_types": write_cache_types,
}


def rewrite(text: str) -> str:
    """``text`` with every table between markers written anew. Raises KeyError for an unknown."""

    def write(match: re.Match[str]) -> str:
        return f"{match[1]}{WRITERS[match[2]]()}{match[3]}"

    return _SECTION.sub(write, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="write_docs", description="Write the tables of docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options: Any = parser.parse_args(arguments)
    stale = []
    for path in sorted(DOCS.glob("*.md")):
        old = path.read_text(encoding="utf-8")
        new = rewrite(old)
        if new != old:
            stale.append(path.name)
            if not options.check:
                path.write_text(new, encoding="utf-8")
    if stale and options.check:
        print(f"stale: {', '.join(stale)}; run python -m tools.write_docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
