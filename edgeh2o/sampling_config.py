"""How tokens are drawn, as a frozen dataclass (see ``config``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

from .errors import UsageError
from .option_fields import MAX_CONTEXT, check_flag, check_int, check_real, is_int, label, option
from .sampler_names import MAX_SAMPLERS, SAMPLERS, describe_unknown, read_samplers

AUTO_LOOKUP, LOOKUP_OFF = "auto", "off"
MAX_LOOKUP = 15
MAX_PENALTY, MAX_BIAS = 2, 100  # as OpenAI has them
AUTO_DRAFT, DRAFT_OFF = "auto", "off"
STOP_WHEN_FULL, SHIFT_WHEN_FULL, EVICT_WHEN_FULL = WAYS_WHEN_FULL = ("stop", "shift", "evict")

DRY_BREAKERS = ("\n", ":", '"', "*")
NO_BREAKERS = ("none",)
MAX_BREAKER = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn and when generation ends.

    ``temperature=0`` takes the most likely token. ``seed=None``, or -1, draws one from the system.
    ``max_tokens=-1`` runs until an end-of-generation token or the end of the context;
    ``0`` reads the prompt and generates nothing. ``context_full="shift"`` goes on past the context:
    the beginning of the prompt and the latest tokens, half of the context, are read again;
    ``"evict"`` drops what received least attention from the cache, a batch at a time, and reads
    longer prompts too.
    ``lookup`` and, for a draft model, ``draft_tokens`` change the time of a text, not the text:
    ``"auto"``, ``"off"``, or the number of tokens to draft. ``schema`` is the form of the answer: a
    JSON schema (a mapping, its JSON text, a class of pydantic) or a ``Grammar``; it needs
    llguidance. ``presence_penalty``, ``frequency_penalty`` and ``logit_bias``, which maps token
    ids, are OpenAI's. ``samplers`` are those that act, in their order, by llama.cpp's
    names or as a text of its letters.
    """

    samplers: Sequence[str] | str = option(
        SAMPLERS,
        "--samplers",
        help="which samplers act, and in which order; one that is left out is off, whatever its "
        f"own flag says (default: {';'.join(SAMPLERS)})",
        metavar="NAME;NAME...",
    )
    temperature: float = option(
        0.8,
        "--temp",
        help="sampling temperature, 0 = always the most likely token",
        aliases=("--temperature",),
    )
    top_k: int = option(40, "--top-k", help="keep the N most likely tokens, 0 = all")
    top_p: float = option(
        0.95, "--top-p", help="keep the smallest set of tokens with this probability, 1 = all"
    )
    min_p: float = option(
        0.05, "--min-p", help="drop tokens less likely than this share of the best, 0 = none"
    )
    top_n_sigma: float = option(
        -1.0,
        "--top-n-sigma",
        help="keep tokens whose logit is at most so many standard deviations below the best, "
        "-1 = all",
        aliases=("--top-nsigma",),
    )
    typical_p: float = option(
        1.0,
        "--typical-p",
        help="keep the tokens whose surprise is nearest to what is expected, with this probability "
        "together, 1 = all (locally typical sampling)",
        aliases=("--typical",),
    )
    xtc_probability: float = option(
        0.0,
        "--xtc-probability",
        help="how often the likeliest tokens are left out but the last that has --xtc-threshold, "
        "for varied text, 0 = never",
    )
    xtc_threshold: float = option(
        0.1, "--xtc-threshold", help="probability that a token needs to be one of those"
    )
    dynatemp_range: float = option(
        0.0,
        "--dynatemp-range",
        help="how far the temperature may be from --temp: the less certain the next token is, the "
        "higher",
    )
    dynatemp_exponent: float = option(
        1.0, "--dynatemp-exp", help="power of the entropy that this goes by"
    )
    mirostat: int = option(
        0,
        "--mirostat",
        help="1 or 2: keep the surprise of the text near --mirostat-ent by Mirostat, of this "
        "version; of the other samplers --temp alone acts then, 0 = off",
    )
    mirostat_tau: float = option(
        5.0, "--mirostat-ent", help="surprise of a token that is aimed at, in bits"
    )
    mirostat_eta: float = option(
        0.1, "--mirostat-lr", help="how much of what a token missed that by the next one answers"
    )
    adaptive_target: float = option(
        -1.0,
        "--adaptive-target",
        help="probability that drawn tokens are to have on the average, where --samplers names "
        "adaptive_p, negative = off",
    )
    adaptive_decay: float = option(
        0.9,
        "--adaptive-decay",
        help="share by which older tokens count less there for every newer one, 0.99 at most",
    )
    repeat_penalty: float = option(
        1.0, "--repeat-penalty", help="penalty on tokens seen recently, 1 = none"
    )
    repeat_last_n: int = option(
        64, "--repeat-last-n", help="tokens that the penalty looks at, -1 = the whole context"
    )
    dry_multiplier: float = option(
        0.0,
        "--dry-multiplier",
        help="penalty on tokens that go on with a repetition of --dry-allowed-length tokens, by "
        "--dry-base more for each further one, 0 = none (DRY; 0.8 is usual)",
    )
    dry_base: float = option(1.75, "--dry-base", help="base of that penalty")
    dry_allowed_length: int = option(
        2, "--dry-allowed-length", help="longest repetition without more than that penalty"
    )
    dry_penalty_last_n: int = option(
        64,
        "--dry-penalty-last-n",
        help="tokens in which repetitions are looked for, -1 = the whole context",
    )
    dry_sequence_breakers: Sequence[str] = option(
        DRY_BREAKERS,
        "--dry-sequence-breaker",
        help="text that no repetition goes over; may be given several times, none: there is none "
        """(default: a new line, ":", '"' and "*")""",
        metavar="TEXT",
    )
    presence_penalty: float = option(
        0.0,
        "--presence-penalty",
        help="what the logit of a token loses that was generated before, from -2 to 2",
    )
    frequency_penalty: float = option(
        0.0,
        "--frequency-penalty",
        help="what the logit of a token loses for every time that it was generated, from -2 to 2",
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        "-l",
        "--logit-bias",
        help="what is added to the logit of a token, from -100, never, to 100, as in 15043+1 or "
        "15043-100; may be given several times",
        metavar="ID(+/-)BIAS",
        hash=False,
    )
    seed: int | None = option(
        None, "-s", "--seed", help="seed of the sampler, -1 = random (default: random)"
    )
    max_tokens: int = option(
        -1,
        "-n",
        "--max-tokens",
        help="tokens to generate, -1 = until the end of the answer or of the context",
        aliases=("--predict", "--n-predict"),
    )
    stop: Sequence[str] = option(
        (),
        "--stop",
        help="stop before this text; may be given several times",
        metavar="TEXT",
        aliases=("-r", "--reverse-prompt"),
    )
    lookup: str | int = option(
        AUTO_LOOKUP,
        "--lookup",
        help="decode several tokens at a time where the text repeats what stands in the prompt or "
        "the answer; the text stays the same. N: draft so many, up to 15; auto: as many as pay, "
        "after prompts of 256 tokens and more; off",
        metavar="auto|off|N",
    )
    draft_tokens: str | int = option(
        AUTO_DRAFT,
        "--draft-tokens",
        help="tokens that the draft model (--draft) writes ahead of each call of the model: N, up "
        "to 15; auto: as many as pay; off",
        metavar="auto|off|N",
    )
    context_full: str = option(
        STOP_WHEN_FULL,
        "--context-full",
        help="once prompt and answer fill the context: stop; or shift: go on with the beginning of "
        "the prompt and the latest tokens, half of the context, which are read again; or evict: "
        "drop what received least attention from the cache, a few hundred tokens at a time, also "
        "while a prompt is read that is longer",
        choices=WAYS_WHEN_FULL,
    )
    ignore_eos: bool = option(
        False, "--ignore-eos", help="go on after an end-of-generation token (for benchmarks)"
    )
    # Left out of the hash, which mappings do not have: equal settings have equal ones all the same.
    schema: object = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_real(
            self,
            "temperature",
            "a finite number >= 0",
            lambda value: value >= 0,
            "use 0 for greedy decoding or about 0.8 for varied text",
        )
        check_int(self, "top_k", 0, MAX_CONTEXT, "use 0 to keep every token")
        check_real(self, "top_p", "in (0, 1]", lambda value: 0 < value <= 1, "use 1 to turn it off")
        check_real(
            self, "min_p", "in [0, 1]", lambda value: 0 <= value <= 1, "use 0 to turn it off"
        )
        check_real(
            self,
            "repeat_penalty",
            "a finite number > 0",
            lambda value: value > 0,
            "use 1 to turn it off",
        )
        check_int(self, "repeat_last_n", -1, MAX_CONTEXT, "use -1 for the whole context")
        object.__setattr__(self, "samplers", self._read_samplers())
        self._check_rare_samplers()
        for name in ("presence_penalty", "frequency_penalty"):
            allowed = f"from -{MAX_PENALTY} to {MAX_PENALTY}"
            check_real(self, name, allowed, lambda x: abs(x) <= MAX_PENALTY, "use 0 to turn it off")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _read_biases(self))
        if self.seed == -1:  # as llama.cpp has it
            object.__setattr__(self, "seed", None)
        if self.seed is not None:
            check_int(self, "seed", 0, 2**64 - 1, "leave it out for a random seed")
        check_int(
            self, "max_tokens", -1, MAX_CONTEXT, "use -1 to generate until the end of the answer"
        )
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (tuple, list)) or not all(isinstance(s, str) and s for s in stop):
            raise UsageError(
                f"{label(self, 'stop')} must be non-empty strings, got {self.stop!r}; "
                "an empty stop text would end the answer before its first character"
            )
        object.__setattr__(self, "stop", tuple(stop))
        if self.context_full not in WAYS_WHEN_FULL:
            raise UsageError(
                f"{label(self, 'context_full')} must be stop, shift or evict, got "
                f"{self.context_full!r:.80}"
            )
        check_flag(self, "ignore_eos")
        for name in ("lookup", "draft_tokens"):
            object.__setattr__(self, name, self._read_length(name))
        if self.schema is not None and self.ignore_eos:
            raise UsageError(
                "an answer of a given form ends where the form does; leave "
                f"{label(self, 'ignore_eos')} out"
            )

    @property
    def acting_samplers(self) -> tuple[str, ...]:
        """``samplers``, or what is left of them with mirostat."""
        return ("temperature",) if self.mirostat else tuple(self.samplers)

    def _read_samplers(self) -> tuple[str, ...]:
        given: object = self.samplers
        is_list = isinstance(given, (tuple, list)) and all(isinstance(name, str) for name in given)
        if not (isinstance(given, str) or is_list):
            raise UsageError(
                f"{label(self, 'samplers')} must be names of samplers, such as "
                f"{SAMPLERS[:2]}, got {given!r:.80}"
            )
        known, unknown = read_samplers(self.samplers)
        if unknown:
            raise UsageError(f"{label(self, 'samplers')}: {describe_unknown(unknown)}")
        if len(known) > MAX_SAMPLERS:
            raise UsageError(
                f"{label(self, 'samplers')} has {len(known)} names, more than {MAX_SAMPLERS}"
            )
        return known

    def _check_rare_samplers(self) -> None:
        for name, off in (("top_n_sigma", -1), ("dry_multiplier", 0)):
            check_real(self, name, "a finite number", lambda _: True, f"use {off} to turn it off")
        check_real(self, "typical_p", "in (0, 1]", lambda x: 0 < x <= 1, "use 1 to turn it off")
        for name in ("xtc_probability", "xtc_threshold"):
            check_real(self, name, "in [0, 1]", lambda x: 0 <= x <= 1, "0 and 0.1 are the defaults")
        check_real(
            self, "dynatemp_range", "a number >= 0", lambda x: x >= 0, "use 0 to turn it off"
        )
        check_real(self, "dynatemp_exponent", "a number >= 0", lambda x: x >= 0, "1 is the default")
        check_int(self, "mirostat", 0, 2, "2 is the usual version, 0 turns it off")
        check_real(self, "mirostat_tau", "a number >= 0", lambda x: x >= 0, "5 is the default")
        check_real(self, "mirostat_eta", "a number >= 0", lambda x: x >= 0, "0.1 is the default")
        check_real(self, "adaptive_target", "a number <= 1", lambda x: x <= 1, "-1 turns it off")
        check_real(
            self, "adaptive_decay", "in [0, 0.99]", lambda x: 0 <= x <= 0.99, "0.9 is the default"
        )
        check_real(self, "dry_base", "a number >= 1", lambda x: x >= 1, "1.75 is the default")
        check_int(self, "dry_allowed_length", 0, MAX_CONTEXT, "2 is the default")
        check_int(self, "dry_penalty_last_n", -1, MAX_CONTEXT, "use -1 for the whole context")
        given = self.dry_sequence_breakers
        breakers = (given,) if isinstance(given, str) else given
        if not isinstance(breakers, (tuple, list)) or not all(map(_is_breaker, breakers)):
            raise UsageError(
                f"{label(self, 'dry_sequence_breakers')} must be texts of 1 to {MAX_BREAKER} "
                f"characters, got {given!a:.80}"
            )
        breakers = () if tuple(breakers) == NO_BREAKERS else tuple(breakers)
        object.__setattr__(self, "dry_sequence_breakers", breakers)

    def _read_length(self, name: str) -> str:
        """A number of tokens to draft, or a word for it."""
        value = getattr(self, name)
        text = str(value) if isinstance(value, str) or is_int(value) else ""
        is_number = text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_LOOKUP
        if not is_number and text not in (AUTO_LOOKUP, LOOKUP_OFF):
            raise UsageError(
                f"{label(self, name)} must be auto, off or a number of tokens from 1 to "
                f"{MAX_LOOKUP}, got {value!r:.80}"
            )
        return text


def _is_breaker(text: object) -> bool:
    if not isinstance(text, str) or not 0 < len(text) <= MAX_BREAKER:
        return False
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _read_biases(sampling: SamplingParams) -> dict[int, float]:
    """A copy of its biases. Raises UsageError for other ids, other numbers and other types."""
    biases: object = sampling.logit_bias
    if not isinstance(biases, Mapping) or not all(
        is_int(token) and token >= 0 and isinstance(bias, Real) and abs(float(bias)) <= MAX_BIAS
        for token, bias in biases.items()
    ):
        raise UsageError(
            f"{label(sampling, 'logit_bias')} must map token ids to numbers from -{MAX_BIAS} to "
            f"{MAX_BIAS}, as in {{15043: -{MAX_BIAS}}}, got {biases!r:.80}"
        )
    return {int(token): float(bias) for token, bias in biases.items()}
