"""``edgeh2o embed``: vectors of texts, by the flags and in the forms of llama-embedding."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..sampling_config import SamplingParams
from .model_options import (
    add_model_argument,
    add_model_options,
    add_verbosity_options,
    open_model,
    read_model_options,
)
from .options import utf8_text
from .prompt import add_prompt_options, read_prompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..engine.session import Session

HELP = "make vectors of texts (embeddings)"
DESCRIPTION = (
    "Read texts, one a line, and print a vector of each: what the model would predict the next "
    "token by, of all its tokens together or of one of them. Flags and forms are those of "
    "llama-embedding."
)
EXAMPLES = """\
  edgeh2o embed model.gguf -p "first text" --pooling last
  edgeh2o embed model.gguf -f texts.txt --pooling mean --embd-output-format json
  edgeh2o embed model.gguf -f document.txt --embd-separator '' --pooling mean"""
FORMATS = ("array", "json", "json+", "raw")
# Numbers of a row that are shown: at both ends of one of many tokens, at the beginning of one of
# several texts.
_ENDS, _BEGINNING = 3, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_model_argument(parser)
    add_prompt_options(parser)
    group = parser.add_argument_group("vectors")
    add_vector_options(group)
    group.add_argument(
        "--embd-output-format",
        choices=FORMATS,
        metavar="FORMAT",
        help="array, json (as of OpenAI), json+ (with similarities of the texts) or raw, a vector "
        "a line (default: for reading)",
    )
    group.add_argument(
        "--embd-separator",
        type=utf8_text,
        default="\n",
        metavar="TEXT",
        help="what lies between two texts (default: the end of a line)",
    )
    add_model_options(parser)
    add_verbosity_options(parser)


def add_vector_options(group: argparse._ArgumentGroup) -> None:
    """Adds ``--pooling P`` and ``--embd-normalize N``."""
    group.add_argument(
        "--pooling",
        metavar="P",
        help="what a vector is made of: mean of all tokens, last, cls (the first), or none, a "
        "vector of each token (default: as the file says, else none)",
    )
    group.add_argument(
        "--embd-normalize",
        type=int,
        default=2,
        metavar="N",
        help="-1 leaves a vector as it is, 0 makes its largest number 32,760, 1 the sum of their "
        "sizes 1, 2 its Euclidean length, N > 2 that norm (default: 2)",
    )


def execute(args: argparse.Namespace) -> int:
    """Prints the vectors; returns the exit code."""
    options = read_model_options(args)

    import numpy as np

    from ..engine.embedding import choose_pooling, normalise, require_known, require_power

    require_known(args.pooling)
    power = require_power(args.embd_normalize)
    separator = args.embd_separator
    prompt = read_prompt(args)
    texts = prompt.split(separator) if separator else [prompt]

    def check(session: Session) -> None:
        choose_pooling(session.plan.config, args.pooling)
        for number, text in enumerate(texts, 1):
            _check_text(session, text, f"text {number} of {len(texts)}: ")

    with open_model(options, check=check) as (llm, bars):
        pooling = choose_pooling(llm.config, args.pooling)
        if pooling == "none":
            rows = np.concatenate([llm.embed(text, pooling, normalize=False) for text in texts])
        else:
            rows = llm.embed(texts, pooling, normalize=False)
        bars.close()
    rows = normalise(rows, power)
    number = "{:.0f}" if power == 0 else "{:.7f}"
    if args.embd_output_format is None:
        print(format_text(rows, texts, pooling, is_whole=power == 0), end="")
    elif args.embd_output_format == "raw":
        print("\n".join(" ".join(map(number.format, row)) for row in rows.tolist()))
    else:
        print(format_json(rows, args.embd_output_format, number, n_texts=len(texts)))
    return 0


def _check_text(session: Session, text: str, place: str) -> None:
    """Raises UsageError for one that is empty or too long."""
    try:
        session.check_prompt(partial(session.prompts.open, text), SamplingParams(max_tokens=0))
    except UsageError as error:
        raise UsageError(f"{place}{error}") from None


def format_text(
    rows: NDArray[np.float32], texts: Sequence[str], pooling: str, *, is_whole: bool
) -> str:
    """The form for reading: a vector a line, and how alike texts are.

    Of a vector of one of several texts its beginning, of one of a token both ends.
    """

    def shown(numbers: Sequence[float]) -> str:
        return "".join(f"{number:6.0f} " if is_whole else f"{number:9.6f} " for number in numbers)

    lines = [""]
    for index, row in enumerate(rows.tolist()):
        said = shown(row if len(texts) == 1 else row[:_BEGINNING])
        if pooling == "none":
            said = f"{shown(row[:_ENDS])} ... {shown(row[-_ENDS:])}"
        lines.append(f"embedding {index}: {said}")
    if pooling != "none" and len(texts) > 1:
        lines += ["", "cosine similarity matrix:", ""]
        lines.append("".join(f"{text[:6]:>6} " for text in texts))
        for text, alike in zip(texts, _find_similarities(rows).tolist(), strict=True):
            lines.append("".join(f"{each:6.2f} " for each in alike) + text[:10])
    return "\n".join(lines) + "\n"


def format_json(rows: NDArray[np.float32], form: str, number: str, *, n_texts: int) -> str:
    """The forms array, json and json+."""
    vectors = [f"[{','.join(map(number.format, row))}]" for row in rows.tolist()]
    if form == "array":
        return f"[{','.join(vectors)}]"
    data = ",\n".join(
        f'    {{\n      "object": "embedding",\n      "index": {index},\n'
        f'      "embedding": {vector}\n    }}'
        for index, vector in enumerate(vectors)
    )
    said = f'{{\n  "object": "list",\n  "data": [\n{data}\n  ]'
    if form == "json+" and n_texts > 1:
        similarities = ",\n".join(
            f"    [{', '.join(f'{each:6.2f}' for each in row)} ]"
            for row in _find_similarities(rows).tolist()
        )
        said += f',\n  "cosineSimilarity": [\n{similarities}\n  ]'
    return said + "\n}"


def _find_similarities(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cosines of all pairs of rows [n, dim]."""
    from ..engine.embedding import EUCLIDEAN, normalise

    units = normalise(rows, EUCLIDEAN)
    return units @ units.T
