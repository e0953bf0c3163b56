"""Plain English of any length that says nothing: the same on every machine, made from word lists.

Sentences differ enough that a model cannot copy them from before, and hold no digits, so that a
passkey stands out.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

if TYPE_CHECKING:
    from ..llm import LLM

_PEOPLE = (
    "the baker,a tall gardener,the old sailor,her younger brother,the village teacher,my neighbour,"
    "the night porter,a quiet clerk,the carpenter,our aunt,the miller,a travelling musician,"
    "the apprentice,the station master,a retired judge,the ferryman,the librarian,a young painter"
)
_DEEDS = (
    "carried,repaired,forgot,described,painted,borrowed,counted,polished,wrapped,measured,sold,"
    "admired,returned,washed,hid,sketched,weighed,ordered,dropped,labelled,traded,inspected"
)
_THINGS = (
    "a wooden ladder,the copper kettle,two woollen coats,an unopened letter,the garden gate,"
    "a basket of pears,the broken clock,some river stones,a heavy atlas,the brass lantern,"
    "an empty birdcage,a bundle of firewood,the silver spoons,a torn map,the longest rope,"
    "a jar of honey,the green curtains,an iron key,a pair of boots,the small telescope"
)
_PLACES = (
    "near the harbour,behind the mill,at the edge of the wood,in the upper room,beside the canal,"
    "under the stone bridge,across the market square,in front of the town hall,by the orchard wall,"
    "along the north road,inside the old barn,on the western pier"
)
_TIMES = (
    "In the morning,After the rain,Before supper,Late in the autumn,On the first dry day,"
    "When the bells had stopped,Towards evening,Some weeks later,At the height of summer,"
    "While the others slept,As usual,For no clear reason"
)
_REMARKS = (
    "and nobody asked why,which took most of the afternoon,although the wind was rising,"
    "as everyone had expected,and then went home,but it made little difference,"
    "while the dog looked on,because the shop was closed,and said nothing more about it,"
    "so the matter was settled,though the light was poor,and the street grew quiet again"
)
_SENTENCES_PER_PARAGRAPH = 6
# Every sentence has more tokens than this in any vocabulary worth the name.
_LEAST_TOKENS_PER_SENTENCE = 8


def write_filler(n_sentences: int, *, seed: int = 0) -> str:
    """``n_sentences`` sentences in paragraphs; longer texts begin with the shorter ones."""
    lists = [words.split(",") for words in (_TIMES, _PEOPLE, _DEEDS, _THINGS, _PLACES, _REMARKS)]
    rng = random.Random(seed)
    sentences = []
    for _ in range(n_sentences):
        time, who, did, what, where, remark = (
            words[int(rng.random() * len(words))] for words in lists
        )
        sentences.append(f"{time} {who} {did} {what} {where}, {remark}.")
    paragraphs = [
        " ".join(sentences[first : first + _SENTENCES_PER_PARAGRAPH])
        for first in range(0, n_sentences, _SENTENCES_PER_PARAGRAPH)
    ]
    return "\n\n".join(paragraphs)


def filler_tokens(llm: LLM, n_tokens: int, text: str | None = None) -> NDArray[np.int32]:
    """``n_tokens`` tokens of ``text``, repeated if it is too short, or of the text made here.

    Raises UsageError for an empty text.
    """
    if text is None:
        text = write_filler(-(-n_tokens // _LEAST_TOKENS_PER_SENTENCE))
    tokens = llm.tokenize(text, add_special=False, parse_special=False)
    if not tokens:
        raise UsageError("the text is empty; give some words, or leave it out")
    return np.resize(np.array(tokens, dtype=np.int32), n_tokens)
