"""The sampler of a generation, as its settings want it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ._sampler import Sampler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..sampling_config import SamplingParams
    from ..tokenizer import Tokenizer

# Of a sequence breaker that lies across tokens, those behind the first.
_MAX_TAIL = 20
# A look at all tokens of a vocabulary takes a tenth of a second and more.
_MAX_FOUND = 8
_found: WeakKeyDictionary[Tokenizer, OrderedDict[tuple[str, ...], list[tuple[int, ...]]]]
_found = WeakKeyDictionary()
_lock = Lock()


def make_sampler(
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    prompt: NDArray[np.int32],
    *,
    vocab_size: int,
    context_size: int,
    seed: int,
) -> Sampler:
    """One that has seen ``prompt`` [n] and draws from logits [vocab_size]."""
    window_size, dry_window_size = (
        context_size if n < 0 else min(context_size, n)
        for n in (sampling.repeat_last_n, sampling.dry_penalty_last_n)
    )
    breakers: list[tuple[int, ...]] = []
    if sampling.dry_multiplier != 0 and "dry" in sampling.acting_samplers:
        found = find_breakers(tokenizer, sampling.dry_sequence_breakers)
        breakers = [breaker for breaker in found if max(breaker) < vocab_size]
    sampler = Sampler(
        vocab_size,
        samplers=sampling.samplers,
        mirostat=sampling.mirostat,
        mirostat_tau=sampling.mirostat_tau,
        mirostat_eta=sampling.mirostat_eta,
        adaptive_target=sampling.adaptive_target,
        adaptive_decay=sampling.adaptive_decay,
        temperature=sampling.temperature,
        dynatemp_range=sampling.dynatemp_range,
        dynatemp_exponent=sampling.dynatemp_exponent,
        top_n_sigma=sampling.top_n_sigma,
        top_k=sampling.top_k,
        typical_p=sampling.typical_p,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
        repeat_penalty=sampling.repeat_penalty,
        window_size=window_size,
        dry_multiplier=sampling.dry_multiplier,
        dry_base=sampling.dry_base,
        dry_allowed_length=sampling.dry_allowed_length,
        dry_window_size=dry_window_size,
        breakers=breakers,
        seed=seed,
        banned=tokenizer.eog_ids if sampling.ignore_eos else (),
    )
    for token in prompt[max(0, len(prompt) - max(window_size, dry_window_size)) :]:
        sampler.accept(int(token))
    return sampler


def find_breakers(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """The sequences of tokens in which one of ``texts`` stands, as llama.cpp finds them.

    These are the tokens that have it in their own text, and those whose end is its beginning,
    before the tokens of what is left of it.
    """
    of_tokenizer = _found.setdefault(tokenizer, OrderedDict())
    key = tuple(texts)
    found = of_tokenizer.get(key)
    if found is None:
        found = sorted(set(_find_breakers(tokenizer, key)))
        with _lock:  # a server's answers begin side by side
            of_tokenizer[key] = found
            if len(of_tokenizer) > _MAX_FOUND:
                of_tokenizer.popitem(last=False)
    return found


def _find_breakers(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[tuple[int, ...]]:
    # By the beginning of a text: what comes behind it, and of which text it is.
    tails: dict[bytes, list[tuple[list[int], bytes]]] = {}
    wanted = [text.encode() for text in texts]
    for text, data in zip(texts, wanted, strict=True):
        for at in range(1, len(text)):
            tail = tokenizer.encode(text[at:], add_special=False, before=text[:at])
            tails.setdefault(text[:at].encode(), []).append((tail[:_MAX_TAIL], data))
    longest = max(map(len, tails), default=0)
    for token in range(tokenizer.vocab_size):
        word = tokenizer.token_bytes(token)
        if any(data in word for data in wanted):
            yield (token,)
        for n in range(1, min(len(word), longest) + 1):
            for tail, data in tails.get(word[-n:], ()):
                if data not in word:
                    yield (token, *tail)
