"""Settings as frozen dataclasses: how a model is run, how tokens are drawn.

Every class checks its values when it is made and raises ``UsageError`` that names the field, the
command line flag and the cure. The command line takes flags, defaults and help from the field
metadata (``flags`` and ``help``), so an option is described once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real

from .errors import UsageError
from .lora_config import LoraAdapter
from .option_fields import MAX_CONTEXT, check_flag, check_int, check_real, is_int, label, option
from .rope_config import ROPE_OF_FILE, RopeConfig

MAX_BATCH = 2**20
MAX_THREADS = 256
CACHE_TYPES = ("f16", "f32", "q8_0")
DEVICE_NAME = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
AUTO_LOOKUP, LOOKUP_OFF = "auto", "off"
MAX_LOOKUP = 15
MAX_PENALTY, MAX_BIAS = 2, 100  # as OpenAI has them
AUTO_DRAFT, DRAFT_OFF = "auto", "off"
# In the place of a draft model: the layer of the model's own file that guesses tokens ahead.
MTP_DRAFT = "mtp"
PACKED_OFF, PACKED_AUTO = "off", "auto"
STOP_WHEN_FULL, SHIFT_WHEN_FULL, EVICT_WHEN_FULL = WAYS_WHEN_FULL = ("stop", "shift", "evict")
ATTENTION_PRECISIONS = ("auto", "f32", "bf16", "f16", "int8")
# What weights can be written as: tensor types of GGUF, and mixtures of llama-quantize.
QUANTISED_TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0"),
    *("q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s"),
)
DEFAULT_QUANTISED_TYPE = "q8_0"


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
    ids, are OpenAI's.
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
        help="tokens of one chunk inside a logical batch (default: 256; on a GPU, and of h2o and "
        "dense, 1024)",
        aliases=("--ubatch-size",),
    )

    max_error: float | None = option(
        None,
        "--max-attention-error",
        help="most error of a layer's sparse attention relative to its output, measured on a "
        "sample of queries; four times as much in the last third of the layers, where it does not "
        "show in the predictions. Heads by which it would be exceeded read everything (default, if "
        "the attention chooses its own budget: 4.5 with the packaged tables, and with those of "
        "`edgeh2o calibrate` by which prompts lose nothing, 1 otherwise; else it is only shown)",
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
class RuntimeConfig:
    """What a run takes from the machine.

    ``context_size=None`` is what the prompt and ``max_tokens`` need, at least 4,096 and at most
    the model's trained length; ``0`` is the trained length. ``threads=None`` counts usable cores.
    Keys and values of the cache have the number type ``cache_type`` unless ``cache_type_k`` or
    ``cache_type_v`` says another. ``rope`` changes how the model's positions are read. ``draft`` is
    a smaller model, as a model is named, that guesses tokens for the model to check, or ``"mtp"``
    for the layer of the model's own file that does so.
    ``packed_weights`` is where packed weights are kept, ``"auto"``, ``"off"`` or a folder. ``lora``
    are adapters that are added to the weights.
    """

    context_size: int | None = option(
        None,
        "-c",
        "--ctx-size",
        help="positions in the cache, 0 = the model's trained length "
        "(default: what the prompt needs, at least 4096 where memory has room)",
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
        help="what the products of prefill attention are rounded to; auto: int8 for prompts of "
        "1,024 tokens and more where a budget table knows it to be harmless or an earlier prompt "
        "has shown it, else bf16 where it is known to be faster and keys have no bias, else f32",
        choices=ATTENTION_PRECISIONS,
    )
    check_tensors: bool = option(
        False, "--check-tensors", help="refuse a model that has NaN or infinite weights"
    )
    quantize: str | None = option(
        None,
        "--quantize",
        metavar="TYPE",
        help="what matrices of a folder of safetensors are quantised to as they are loaded, such "
        "as q8_0 or q4_k, f32 for not at all (default: q8_0)",
    )
    packed_weights: str = option(
        PACKED_OFF,
        "--packed-weights",
        metavar="auto|off|FOLDER",
        help="keep the weights of GGUF models as the kernels read them in a folder, in files of "
        "the size of the model, which later starts map into memory instead of packing them anew; "
        "auto: `packed` in the cache folder",
    )
    device: str = option(
        "auto",
        "--device",
        metavar="DEVICE",
        help="what computes: cpu, cuda or cuda:N (a GPU); auto: what EDGEH2O_DEVICE says, else cpu",
    )
    lora: Sequence[LoraAdapter] = option(
        (),
        "--lora",
        metavar="FILE[:SCALE]",
        help="GGUF file of a LoRA adapter that is added to the weights, and by how much of what "
        "it was trained with; several times for several",
    )
    rope: RopeConfig = field(default=ROPE_OF_FILE, metadata={"is_option": False})
    draft: str | None = field(default=None, metadata={"is_option": False})

    def __post_init__(self) -> None:
        if self.context_size is not None:
            check_int(self, "context_size", 0, MAX_CONTEXT, "use 0 for the model's own length")
        if self.threads is not None:
            check_int(self, "threads", 1, MAX_THREADS, "leave it out to use every usable core")
        if self.isa is not None and not isinstance(self.isa, str):
            raise UsageError(f"isa (--isa) must be a name such as avx2, got {self.isa!r:.80}")
        if self.isa is not None and not self.isa:
            raise UsageError("isa (--isa) is empty; leave it out to take the best one")
        check_flag(self, "check_tensors")
        self._check_choice("cache_type", "--cache-type", CACHE_TYPES)
        if not isinstance(self.device, str) or not DEVICE_NAME.fullmatch(self.device):
            raise UsageError(
                f"device (--device) must be auto, cpu, cuda or cuda:N, got {self.device!r:.80}"
            )
        if self.quantize is not None:
            object.__setattr__(self, "quantize", check_quantised_type(self.quantize))
        if not isinstance(self.packed_weights, str) or not self.packed_weights:
            raise UsageError(
                "packed_weights (--packed-weights) must be auto, off or a folder, got "
                f"{self.packed_weights!r:.80}"
            )
        if not isinstance(self.lora, tuple) or not all(
            isinstance(adapter, LoraAdapter) for adapter in self.lora
        ):
            raise UsageError(f"lora must be a tuple of LoraAdapter(...), got {self.lora!r:.80}")
        if not isinstance(self.rope, RopeConfig):
            raise UsageError(f"rope must be RopeConfig(...), got {self.rope!r:.80}")
        if self.draft is not None and (not isinstance(self.draft, str) or not self.draft):
            raise UsageError(
                f"draft (--draft) must name a model file or folder, got {self.draft!r:.80}"
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


def check_quantised_type(name: object) -> str:
    """The name in lower case. Raises UsageError for one that weights cannot be written as."""
    lower = name.lower() if isinstance(name, str) else ""
    if lower not in QUANTISED_TYPES:
        raise UsageError(
            f"weights cannot be quantised to {name!r:.40}; choose one of "
            f"{', '.join(QUANTISED_TYPES)}"
        )
    return lower
