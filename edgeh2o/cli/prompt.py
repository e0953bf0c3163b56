"""Where the prompt comes from: the command line, a file or standard input."""

from __future__ import annotations

import argparse
import codecs
import re
import sys
from pathlib import Path
from typing import BinaryIO

from ..errors import UsageError
from .options import utf8_text

STDIN = "-"
# Several times the text that the longest contexts hold, a million tokens.
MAX_PROMPT_BYTES = 32 * 2**20
_READ_BYTES = 2**20
_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``-p TEXT``, ``-f FILE`` and ``-``, of which one may be given."""
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument("-p", "--prompt", type=utf8_text, metavar="TEXT", help="the prompt itself")
    sources.add_argument(
        "-f",
        "--prompt-file",
        "--file",
        metavar="FILE",
        help="read the prompt from a UTF-8 file; one newline at its end is dropped, and a "
        "byte-order mark",
    )
    sources.add_argument(
        STDIN,
        dest="stdin",
        action="store_const",
        const=STDIN,
        help="read the prompt from standard input",
    )
    parser.add_argument(
        "-e",
        "--escape",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="read \\n, \\t, \\\\ and \\xHH in the prompt of -p, as llama.cpp (default: as text)",
    )


def _process_escapes(text: str) -> str:
    r"""Text with \n, \r, \t, \', \", \\ and \xHH read as llama.cpp does; others stay.

    Raises UsageError if the bytes \xHH make it other than UTF-8.
    """

    def read(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return _ESCAPES.get(code, code) if len(code) == 1 else bytes.fromhex(code[1:].decode())

    data = re.sub(rb"\\([nrt'\"\\]|x[0-9a-fA-F]{2})", read, text.encode("utf-8"))
    return _decode(data, "the prompt of -p with -e")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt's text. Raises UsageError when there is none or it cannot be read as UTF-8."""
    if args.prompt is not None:
        return _process_escapes(args.prompt) if args.escape else str(args.prompt)
    source = args.prompt_file or args.stdin
    if source is not None and args.escape:
        raise UsageError("--escape is for the prompt of -p; a file is read as it is")
    if source is None:
        raise UsageError("no prompt given: use -p TEXT, -f FILE, or - for standard input")
    return read_text(source)


def read_text(source: str, *, flag: str = "-f") -> str:
    """The text of the file that was given to ``flag``, of standard input for ``-``.

    One newline at its end is dropped, and a byte-order mark. Raises UsageError when it cannot be
    read as UTF-8.
    """
    if source == STDIN:
        return _decode_file(_read_stream(sys.stdin.buffer, "standard input"), "standard input")
    return _decode_file(_read_file(Path(source), flag), source)


def _read_file(path: Path, flag: str) -> bytes:
    try:
        with path.open("rb") as stream:
            return _read_stream(stream, str(path))
    except IsADirectoryError:
        raise UsageError(f"{path} is a directory; give a text file to {flag}") from None
    except UsageError:  # too long; it is a ValueError too
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read the text file {path}: {reason}; check {flag}") from None


def _read_stream(stream: BinaryIO, source: str) -> bytes:
    """All of a stream, which may be a pipe or a device that never ends."""
    data = bytearray()
    while block := stream.read(_READ_BYTES):
        data += block
        if len(data) > MAX_PROMPT_BYTES:
            raise UsageError(
                f"{source} has more than {MAX_PROMPT_BYTES // 2**20} MiB of text, "
                "which no context holds; shorten it"
            )
    return bytes(data)


def _decode_file(data: bytes, source: str) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UsageError(
            f"{source} is UTF-16 text; convert it to UTF-8, for example with iconv -f UTF-16"
        )
    return _decode(data.removeprefix(codecs.BOM_UTF8), source).removesuffix("\n")


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source} is not UTF-8 text: {error.reason} at byte {error.start}; "
            "convert it, for example with iconv"
        ) from None
