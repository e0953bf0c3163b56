"""Prompts to fill in the middle of code, as llama-server's /infill has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .api_error import ApiError
from .fields import Fields
from .requests import GenerationRequest, read_completion_requests

if TYPE_CHECKING:
    from ..sampling_config import SamplingParams
    from ..tokenizer import Tokenizer

MAX_FILES = 4096
# Names that requests do not have, and that models saw where they saw several files.
_REPOSITORY, _FILE, _OTHER_FILE = "myproject", "filename", "tmp"
_MARKERS = ("fim_pre", "fim_suf", "fim_mid")


def read_infill_request(
    fields: Fields, tokenizer: Tokenizer, defaults: SamplingParams
) -> GenerationRequest:
    """A body of ``/infill``: one of ``/completion``, and the code around the cursor.

    ``input_prefix`` and ``input_suffix`` stand before and after it, ``prompt`` is what of its line
    is there already, ``input_extra`` are other files. Raises ApiError, also for a model without
    tokens for such prompts.
    """
    markers = _require_markers(tokenizer)
    texts = {name: fields.text(name) for name in ("input_prefix", "input_suffix")}
    for name, text in texts.items():
        if text is None:
            fields.refuse(name, "a string, which may be empty")
    # Behind the last marker a word that is half written stays so: models begin the middle anew
    # there (Qwen2.5-Coder-0.5B ended none of five, and all of them behind the prefix).
    before, after = f"{texts['input_prefix']}{fields.text('prompt') or ''}", texts["input_suffix"]
    prompt = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    prompt += _write_files(fields, tokenizer, markers)
    for name, text in zip(_MARKERS, (before, after, ""), strict=True):
        prompt += [markers[name], *tokenizer.encode(text or "", add_special=False)]
    return read_completion_requests(fields, defaults, tuple(prompt))[0]


def _require_markers(tokenizer: Tokenizer) -> Mapping[str, int]:
    markers = tokenizer.vocabulary.fim_ids
    if missing := [name for name in _MARKERS if name not in markers]:
        raise ApiError(
            f"this model has no tokens to fill in the middle ({', '.join(missing)}); use one that "
            "was trained for it, such as Qwen2.5-Coder, or ask by /completion",
            status=501,
            code="unsupported_endpoint",
        )
    return markers


def _write_files(fields: Fields, tokenizer: Tokenizer, markers: Mapping[str, int]) -> list[int]:
    """What stands before the prefix: other files, by their names where the model has tokens."""
    files = fields.objects("input_extra", MAX_FILES)
    repository, separator = markers.get("fim_rep"), markers.get("fim_sep")
    written: list[int] = []

    def write(marker: int | None, name: str, text: str = "") -> None:
        if marker is not None:
            written.append(marker)
            text = f"{name}\n{text}"
        written.extend(tokenizer.encode(text, add_special=False))

    if not files:
        return written
    write(repository, _REPOSITORY)
    for file in files:
        if (text := file.text("text")) is None:
            file.refuse("text", "a string, which may be empty")
        write(separator, file.text("filename") or _OTHER_FILE, text)
    write(separator, _FILE)
    return written
