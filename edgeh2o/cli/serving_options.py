"""What the verbs that answer requests share: defaults of sampling, sizes, the name of the model."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..sampling_config import SamplingParams
from .model_options import print_note
from .options import add_config_options

if TYPE_CHECKING:
    from ..engine.session import Session

_CONTEXT_FULL_HELP = (
    "once prompt and answer fill the context: stop; or shift: go on with the beginning of the "
    "prompt and the latest tokens, half of the context, which are read again; or evict: drop what "
    "received least attention from the cache, a few hundred tokens at a time. A prompt that is "
    "longer than the context is refused"
)
# What a request alone says.
_OF_REQUESTS = ("presence_penalty", "frequency_penalty", "logit_bias")
_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([KMG]?)(?:iB|B)?", re.IGNORECASE)


def add_sampling_defaults(parser: argparse.ArgumentParser, *, has_draft: bool) -> None:
    """Adds the flags for what requests do not say of sampling."""
    add_config_options(
        parser,
        SamplingParams,
        title="sampling, where a request says nothing",
        skip=_OF_REQUESTS if has_draft else ("draft_tokens", *_OF_REQUESTS),
        helps={"context_full": _CONTEXT_FULL_HELP},
    )


def parse_size(text: str) -> int:
    """Bytes of "512M", "1.5 GiB" or a plain number, for argparse."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 512M or 2G")
    return int(float(match[1]) * 2 ** (10 * " KMG".index(match[2].upper() or " ")))


def model_name(model: str) -> str:
    """What clients call a model that was given as a path or by a known name; fit for UTF-8."""
    name = Path(model).name.removesuffix(".gguf").removesuffix(".onnx") or "model"
    return os.fsencode(name).decode("utf-8", "replace")


def note_profile(opened: Session, *, is_quiet: bool) -> None:
    """Says why the start takes longer, once for every model."""
    from ..engine.learning import lacks_profile

    if lacks_profile(opened.plan, opened.model) and not is_quiet:
        print_note("edgeh2o: nothing is known of this model yet; it is profiled first, once")
