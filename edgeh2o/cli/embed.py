"""``edgeh2o embed``: vectors of texts, by the flags and in the forms of llama-embedding."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
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

    from ..engine.prompt import Prompt
    from ..engine.session import Session

HELP = "make vectors of texts (embeddings), or rank documents"
DESCRIPTION = (
    "Read texts, one a line, and print a vector of each: what the model would predict the next "
    "token by, of all its tokens together or of one of them. Reranking models print how well "
    "documents answer queries: a line is a query, a tab and a document. Flags and forms are those "
    "of llama-embedding."
)
EXAMPLES = """\
  edgeh2o embed model.gguf -p "first text" --pooling last
  edgeh2o embed model.gguf -f texts.txt --pooling mean --embd-output-format json
  edgeh2o embed model.gguf -f document.txt --embd-separator '' --pooling mean
  edgeh2o embed reranker.gguf -f pairs.txt --pooling rank"""
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
    group.add_argument(
        "--cls-separator",
        type=utf8_text,
        default="\t",
        metavar="TEXT",
        help="what lies between a query and a document, of reranking models (default: a tab)",
    )
    add_model_options(parser)
    add_verbosity_options(parser)


def add_vector_options(group: argparse._ArgumentGroup) -> None:
    """Adds ``--pooling P`` and ``--embd-normalize N``."""
    group.add_argument(
        "--pooling",
        metavar="P",
        help="what a vector is made of: mean of all tokens, last, cls (the first), or none, a "
        "vector of each token; rank ranks documents (default: as the file says, else none)",
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

    from ..engine.embedding import RANK, choose_pooling, normalise, require_known, require_power
    from ..engine.ranking import find_scores, require_ranking

    if args.pooling != RANK:
        require_known(args.pooling)
    power = require_power(args.embd_normalize)
    separator = args.embd_separator
    prompt = read_prompt(args)
    texts = prompt.split(separator) if separator else [prompt]

    pairs: list[NDArray[np.int32]] = []

    def check(session: Session) -> None:
        config = session.plan.config
        if args.pooling == RANK or (
            args.pooling is None and getattr(config, "pooling", None) == RANK
        ):
            require_ranking(config)
            pairs.extend(_read_pairs(session, texts, args.cls_separator))
            return
        choose_pooling(config, args.pooling)
        for number, text in enumerate(texts, 1):
            _check_text(session, text, f"text {number} of {len(texts)}: ")

    with open_model(options, check=check, must_write=False) as (llm, bars):
        if pairs:
            ranking = require_ranking(llm.config)
            rows = llm.embed(pairs, ranking.pooling, normalize=False)
            bars.close()
            scores = find_scores(rows, llm.model)
            _print_ranks(scores, ranking.labels, args.embd_output_format)
            return 0
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
    else:
        _print_rows(rows, args.embd_output_format, number, n_texts=len(texts))
    return 0


def _print_rows(rows: NDArray[np.float32], form: str, number: str, *, n_texts: int) -> None:
    if form == "raw":
        print("\n".join(" ".join(map(number.format, row)) for row in rows.tolist()))
    else:
        print(format_json(rows, form, number, n_texts=n_texts))


def _print_ranks(scores: NDArray[np.float32], labels: Sequence[str], form: str | None) -> None:
    """Those of labels [n, n_labels], which no norm divides; in JSON without cosines."""
    if form is not None:
        _print_rows(scores, "json" if form == "json+" else form, "{:.7f}", n_texts=len(scores))
        return
    print()
    for index, row in enumerate(scores.tolist()):
        for number, (label, score) in enumerate(zip(labels, row, strict=True)):
            name = f" [{label or number}]" if len(labels) > 1 else ""
            print(f"rerank score {index}: {score:8.3f}{name}")


def _read_pairs(session: Session, texts: Sequence[str], separator: str) -> list[NDArray[np.int32]]:
    """The prompts of queries and documents; a text without a separator is one as it stands.

    Raises UsageError for one that is empty or too long.
    """
    prompts = []
    for number, text in enumerate(texts, 1):
        query, is_pair, document = text.partition(separator) if separator else (text, "", "")
        if is_pair:
            opening = partial(session.prompts.open_pair, query, document)
        else:
            opening = partial(session.prompts.open, text)
        _check_opening(session, opening, f"text {number} of {len(texts)}: ")
        prompts.append(opening().encode())
    return prompts


def _check_text(session: Session, text: str, place: str) -> None:
    """Raises UsageError for one that is empty or too long."""
    _check_opening(session, partial(session.prompts.open, text), place)


def _check_opening(session: Session, opening: Callable[[], Prompt], place: str) -> None:
    try:
        session.check_prompt(opening, SamplingParams(max_tokens=0))
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
