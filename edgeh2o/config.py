"""Settings as frozen dataclasses: how a model is run, how tokens are drawn.

Every class checks its values when it is made and raises ``UsageError`` that names the field, the
command line flag and the cure. The command line takes flags, defaults and help from the field
metadata (``flags`` and ``help``), so an option is described once.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from .errors import UsageError
from .option_fields import MAX_CONTEXT, check_int, check_real, label, option

MAX_BATCH = 2**20
MAX_THREADS = 256
CACHE_TYPES = ("f16", "f32", "q8_0")
DEVICE_NAME = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
AUTO_LOOKUP, LOOKUP_OFF = "auto", "off"
MAX_LOOKUP = 15
ATTENTION_PRECISIONS = ("auto", "f32", "bf16", "f16", "int8")
ROPE_SCALINGS = ("none", "linear", "yarn")
_KEEP_ROPE = "leave it out to keep the file's"
_ROPE_RANGES = {
    "scale": (1e-3, 1e6),
    "freq_scale": (1e-6, 1e3),
    "freq_base": (1.0, 1e12),
    "beta_fast": (0.0, 1e6),
    "beta_slow": (0.0, 1e6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn and when generation ends.

    ``temperature=0`` takes the most likely token. ``seed=None``, or -1, draws one from the system.
    ``max_tokens=-1`` runs until an end-of-generation token or the end of the context;
    ``0`` reads the prompt and generates nothing. ``lookup`` changes the time of a text, not the
    text: ``"auto"``, ``"off"``, or the number of tokens to draft. ``schema`` is the form of the
    answer: a JSON schema (a mapping, its JSON text, a class of pydantic) or a ``Grammar``; it needs
    llguidance.
    """

    temperature: float = option(
        0.8,
        "--temp",
        help="sampling temperature, 0 = always the most likely token",
        aliases=("--temperature",),
    )
    top_k: int = option(40, "--top-k", help="keep the K most likely tokens, 0 = all")
    top_p: float = option(
        0.95, "--top-p", help="keep the smallest set of tokens with this probability, 1 = all"
    )
    min_p: float = option(
        0.05, "--min-p", help="drop tokens less likely than this share of the best, 0 = none"
    )
    repeat_penalty: float = option(
        1.0, "--repeat-penalty", help="penalty on tokens seen recently, 1 = none"
    )
    repeat_last_n: int = option(
        64, "--repeat-last-n", help="tokens that the penalty looks at, -1 = the whole context"
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
    stop: tuple[str, ...] = option(
        (),
        "--stop",
        help="stop before this text; may be given several times",
        metavar="TEXT",
        aliases=("-r", "--reverse-prompt"),
    )
    lookup: str = option(
        AUTO_LOOKUP,
        "--lookup",
        help="decode several tokens at a time where the text repeats what stands in the prompt or "
        "the answer; the text stays the same. N: draft so many, up to 15; auto: as many as pay, "
        "after prompts of 256 tokens and more; off",
        metavar="auto|off|N",
    )
    ignore_eos: bool = option(
        False, "--ignore-eos", help="go on after an end-of-generation token (for benchmarks)"
    )
    schema: object = None

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
        lookup = str(self.lookup) if isinstance(self.lookup, (str, int)) else ""
        is_number = lookup.isascii() and lookup.isdigit() and 1 <= int(lookup) <= MAX_LOOKUP
        if not is_number and lookup not in (AUTO_LOOKUP, LOOKUP_OFF):
            raise UsageError(
                f"{label(self, 'lookup')} must be auto, off or a number of tokens from 1 to "
                f"{MAX_LOOKUP}, got {self.lookup!r:.80}"
            )
        object.__setattr__(self, "lookup", lookup)
        if self.schema is not None and self.ignore_eos:
            raise UsageError(
                "an answer of a given form ends where the form does; leave ignore_eos out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """How a prompt is cut: logical batches of ``batch_size`` tokens, made of chunks.

    ``chunk_size=None`` is what suits the attention algorithm.
    """

    batch_size: int = option(
        4096, "-b", "--batch-size", help="tokens of one prefill call (logical batch)"
    )
    chunk_size: int | None = option(
        None,
        "-ub",
        "--chunk-size",
        help="tokens of one chunk inside a logical batch (default: 256, h2o and dense 1024)",
        aliases=("--ubatch-size",),
    )

    max_error: float | None = option(
        None,
        "--max-attention-error",
        help="most error of a sparse attention relative to its output, measured on a sample of "
        "queries: layers that would exceed it are read densely (default: 4.5 if the attention "
        "chooses its own budget; else it is only shown)",
        metavar="PERCENT",
    )

    def __post_init__(self) -> None:
        check_int(self, "batch_size", 1, MAX_BATCH)
        if self.max_error is not None:
            check_real(
                self, "max_error", "a percentage >= 0", lambda value: value >= 0, "4.5 is strict"
            )
        if self.chunk_size is None:
            return
        check_int(self, "chunk_size", 1, MAX_BATCH)
        batch, chunk = self.batch_size, self.chunk_size
        if chunk > batch:
            raise UsageError(
                f"chunk_size (--chunk-size) {chunk} is larger than batch_size (--batch-size) "
                f"{batch}; use -ub {batch} or less, or -b {chunk}"
            )
        if batch % chunk:
            raise UsageError(
                f"batch_size (--batch-size) must be a multiple of chunk_size (--chunk-size), got "
                f"{batch} and {chunk}; the nearest that fits is -b {batch // chunk * chunk}"
            )

    def with_chunk_size(self, preferred: int) -> tuple[PrefillConfig, int]:
        """These settings with a chunk size, and that size: the one set, else ``preferred``.

        A batch below ``preferred`` is one chunk. Raises UsageError if they do not fit together.
        """
        chunk_size = self.chunk_size or min(preferred, self.batch_size)
        return replace(self, chunk_size=chunk_size), chunk_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding other than a GGUF file says; None leaves it as it is.

    ``scaling`` stretches positions over ``scale`` times the original context: "linear" divides all
    frequencies (Chen et al. 2023), "yarn" the slow ones, with a correction of the attention (Peng
    et al. 2023), "none" undoes what the file says. ``freq_scale`` is the inverse of ``scale``.
    """

    scaling: str | None = option(
        None,
        "--rope-scaling",
        help="how positions are stretched beyond the trained length (default: as the file says)",
        choices=ROPE_SCALINGS,
    )
    scale: float | None = option(
        None, "--rope-scale", help="by what factor (default: as the file says)", metavar="X"
    )
    freq_scale: float | None = option(
        None, "--rope-freq-scale", help="the inverse of --rope-scale, in its place", metavar="X"
    )
    freq_base: float | None = option(
        None,
        "--rope-freq-base",
        help="base of the frequencies, as in NTK-aware scaling (default: as the file says)",
        metavar="X",
    )
    original_context: int | None = option(
        None,
        "--yarn-orig-ctx",
        help="positions before the stretching, for yarn (default: as the file says)",
    )
    beta_fast: float | None = option(
        None,
        "--yarn-beta-fast",
        help="turns over the original context from which a frequency stays (default: 32)",
        metavar="X",
    )
    beta_slow: float | None = option(
        None,
        "--yarn-beta-slow",
        help="turns over it up to which a frequency is divided (default: 1)",
        metavar="X",
    )

    def __post_init__(self) -> None:
        if self.scaling is not None and self.scaling not in ROPE_SCALINGS:
            raise UsageError(
                f"scaling (--rope-scaling) must be one of {', '.join(ROPE_SCALINGS)}, "
                f"got {self.scaling!r}"
            )
        for name, (low, high) in _ROPE_RANGES.items():
            if getattr(self, name) is not None:
                allowed = f"above {low:g} and below {high:g}"
                check_real(self, name, allowed, partial(_is_between, low, high), _KEEP_ROPE)
        if self.original_context is not None:
            check_int(self, "original_context", 1, MAX_CONTEXT, _KEEP_ROPE)
        if self.freq_scale is not None and self.scale is not None:
            raise UsageError("--rope-freq-scale is the inverse of --rope-scale; give one of them")
        if self.scaling == "none" and self.factor not in (None, 1.0):
            raise UsageError(
                "--rope-scaling none stretches nothing; leave --rope-scale out, or take yarn"
            )

    @property
    def factor(self) -> float | None:
        """By what positions are stretched; None is what the file says."""
        return self.scale if self.freq_scale is None else 1.0 / self.freq_scale

    def to_dict(self) -> dict[str, str | float]:
        """What is other than in the file."""
        return {name: value for name, value in asdict(self).items() if value is not None}


ROPE_OF_FILE = RopeConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """What a run takes from the machine.

    ``context_size=None`` is what the prompt and ``max_tokens`` need, at least 4,096 and at most
    the model's trained length; ``0`` is the trained length. ``threads=None`` counts usable cores.
    Keys and values of the cache have the number type ``cache_type`` unless ``cache_type_k`` or
    ``cache_type_v`` says another. ``rope`` changes how the model's positions are read.
    """

    context_size: int | None = option(
        None,
        "-c",
        "--ctx-size",
        help="positions in the cache, 0 = the model's trained length "
        "(default: what the prompt needs, at least 4096)",
    )
    threads: int | None = option(
        None, "-t", "--threads", help="CPU threads (default: usable cores of the fastest kind)"
    )
    isa: str | None = option(
        None, "--isa", help="instruction set of the kernels (default: the best of this machine)"
    )
    cache_type: str = option(
        "f16", "--cache-type", help="number type of the key-value cache", choices=CACHE_TYPES
    )
    cache_type_k: str | None = option(
        None,
        "-ctk",
        "--cache-type-k",
        help="number type of its keys (default: that of --cache-type)",
        choices=CACHE_TYPES,
    )
    cache_type_v: str | None = option(
        None,
        "-ctv",
        "--cache-type-v",
        help="number type of its values (default: that of --cache-type)",
        choices=CACHE_TYPES,
    )
    attention_precision: str = option(
        "auto",
        "--attention-precision",
        help="what the products of prefill attention are rounded to; auto: bf16 where it is known "
        "to be faster and keys have no bias, else f32",
        choices=ATTENTION_PRECISIONS,
    )
    check_tensors: bool = option(
        False, "--check-tensors", help="refuse a model that has NaN or infinite weights"
    )
    device: str = option(
        "auto",
        "--device",
        metavar="DEVICE",
        help="what computes: cpu, cuda or cuda:N (a GPU); auto: what EDGEH2O_DEVICE says, else cpu",
    )
    rope: RopeConfig = field(default=ROPE_OF_FILE, metadata={"is_option": False})

    def __post_init__(self) -> None:
        if self.context_size is not None:
            check_int(self, "context_size", 0, MAX_CONTEXT, "use 0 for the model's own length")
        if self.threads is not None:
            check_int(self, "threads", 1, MAX_THREADS, "leave it out to use every usable core")
        if self.isa is not None and not self.isa:
            raise UsageError("isa (--isa) is empty; leave it out to take the best one")
        self._check_choice("cache_type", "--cache-type", CACHE_TYPES)
        if not isinstance(self.device, str) or not DEVICE_NAME.fullmatch(self.device):
            raise UsageError(
                f"device (--device) must be auto, cpu, cuda or cuda:N, got {self.device!r:.80}"
            )
        for name, flag in (("cache_type_k", "--cache-type-k"), ("cache_type_v", "--cache-type-v")):
            if getattr(self, name) is not None:
                self._check_choice(name, flag, CACHE_TYPES)
        self._check_choice("attention_precision", "--attention-precision", ATTENTION_PRECISIONS)

    @property
    def cache_types(self) -> str:
        """The types of keys and values: one name, or two as in ``"q8_0/f16"``."""
        k, v = self.cache_type_k or self.cache_type, self.cache_type_v or self.cache_type
        return k if k == v else f"{k}/{v}"

    def _check_choice(self, name: str, flag: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise UsageError(f"{name} ({flag}) must be one of {', '.join(choices)}, got {value!r}")


def _is_between(low: float, high: float, value: float) -> bool:
    return low < value < high
