"""What a server knows of its model, once and for all: its answers must not change while it runs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from ..attention.kept_profiles import MIN_PROMPT
from ..engine.learning import lacks_profile
from ..errors import ResourceError

if TYPE_CHECKING:
    from ..engine.session import Session

_logger = logging.getLogger(__name__)

# Of the example text, per token that is wanted: tokens of few tokenizers are longer.
_CHARACTERS_PER_TOKEN = 16


def profile_at_start(opened: Session) -> None:
    """Profiles a model of which nothing is known, and keeps that for every later run.

    Elsewhere prompts do so while they are read, and refine it. A server would then read a prompt
    otherwise than it had read it an hour before.
    """
    if not lacks_profile(opened.plan, opened.model):
        return
    from ..engine.profile import example_text

    text = example_text()[: MIN_PROMPT * _CHARACTERS_PER_TOKEN]
    token_ids = np.array(opened.model.tokenizer.encode(text), np.int32)[:MIN_PROMPT]
    try:
        if opened.profile(token_ids, is_kept=True):
            return
        reason = "its numbers are not finite, or the example text is too short for it"
    except ResourceError as error:
        reason = str(error)
    _logger.warning("no profile of the model can be made, long prompts are read dense: %s", reason)
