"""Settings as frozen dataclasses: what a model is, how it is run, how tokens are drawn.

Every class checks its values when it is made and raises ``UsageError`` that names the field, the
command line flag and the cure. The command line takes flags, defaults and help from the field
metadata (``flags`` and ``help``), so an option is described once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

from .errors import UsageError

MAX_CONTEXT = 2**31 - 1
MAX_BATCH = 2**20
MAX_THREADS = 256
CACHE_TYPES = ("f16", "f32", "q8_0")
DEVICE_NAME = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
AUTO_LOOKUP, LOOKUP_OFF = "auto", "off"
MAX_LOOKUP = 15
ATTENTION_PRECISIONS = ("auto", "f32", "bf16", "f16")


def option(
    default: Any,
    *flags: str,
    help: str,
    metavar: str | None = None,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is also a command line option named ``flags``.

    ``aliases`` are the names that users of llama.cpp know it by.
    """
    metadata = {
        "flags": flags,
        "help": help,
        "metavar": metavar,
        "choices": choices,
        "aliases": aliases,
    }
    return field(default=default, metadata=metadata)


def _label(owner: Any, name: str) -> str:
    for item in fields(owner):
        if item.name == name and item.metadata.get("flags"):
            return f"{name} ({item.metadata['flags'][-1]})"
    return name


def check_int(owner: Any, name: str, low: int, high: int = MAX_CONTEXT, cure: str = "") -> None:
    """Raises UsageError unless the field ``name`` is an integer from ``low`` to ``high``."""
    value = getattr(owner, name)
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_int or not low <= value <= high:
        hint = f"; {cure}" if cure else ""
        allowed = f">= {low}" if high == MAX_CONTEXT else f"from {low} to {high}"
        raise UsageError(f"{_label(owner, name)} must be an integer {allowed}, got {value!r}{hint}")


def check_real(
    owner: Any, name: str, allowed: str, is_allowed: Callable[[float], bool], cure: str
) -> None:
    """Raises UsageError unless the field ``name`` is a finite number that ``is_allowed``."""
    value = getattr(owner, name)
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real or not math.isfinite(value) or not is_allowed(value):
        raise UsageError(f"{_label(owner, name)} must be {allowed}, got {value!r}; {cure}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What sessions, attention and statistics need to know of a model of any format.

    ``n_heads`` and ``n_kv_heads`` are the largest of a layer. ``context_length`` is in positions.
    An ``attention_soft_cap`` of 0 is none. ``has_key_bias`` tells of biases of the key projection.
    ``fingerprint`` names the weights, whatever their quantisation.
    """

    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    attention_scale: float
    attention_soft_cap: float = 0.0
    has_key_bias: bool = False
    fingerprint: str = ""

    @property
    def n_slots(self) -> int:
        """KV heads of all layers."""
        return self.n_layers * self.n_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What a layer has of its own.

    ``window`` counts the positions that a query sees, its own included; 0: all. ``ffn_dim`` is the
    width of the feed-forward network, or of each expert. ``has_rope`` is false for layers without
    positions. A ``head_dim`` of 0 is that of the model. Keys and values are the layer's own, or
    those of ``kv_distance`` layers before it.
    """

    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    window: int = 0
    has_rope: bool = True
    head_dim: int = 0
    kv_distance: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Shape and constants of a decoder that the core runs, as read from a model file.

    ``rope_inv_freq`` has ``rotary_dim / 2`` entries in radians per position, with every scaling
    of the file already applied. Layers with a sliding window take ``sliding_rope_inv_freq``
    instead unless it is empty, and a session for more than ``long_rope_after`` positions
    ``long_rope_inv_freq``.

    ``norm_placement`` says what of a residual branch is normalised: "pre" its input, "post" its
    output, "both". ``qk_norm`` normalises queries and keys: of each "head", of the whole
    "projection", or "none"; before the rotary embedding or after it. With experts, every token
    goes through ``n_experts_used`` of ``n_experts`` feed-forward networks, whose shares may add up
    to 1 (``normalises_experts``), and through a shared one of width ``shared_ffn_dim``, 0 for none,
    weighted by a gate if it has one. A query at position p is multiplied by ``1 +
    temperature_scale * ln(1 + floor(p / temperature_period))``; a period of 0 is none, and so is a
    ``logit_soft_cap`` of 0. ``norms_values`` norms the heads of the values, without weights. Layers
    may have an input of their own per token, of width ``token_input_dim``, and a factor of their
    output.
    """

    layers: tuple[LayerConfig, ...]
    model_dim: int
    rotary_dim: int
    norm_eps: float
    rope_inv_freq: tuple[float, ...]
    n_experts: int = 0
    n_experts_used: int = 0
    normalises_experts: bool = True
    shared_ffn_dim: int = 0
    has_shared_gate: bool = False
    rope_attention_factor: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    tied_embeddings: bool = False
    norm_placement: str = "pre"
    qk_norm: str = "none"
    qk_norm_after_rope: bool = False
    temperature_scale: float = 0.0
    temperature_period: int = 0
    norms_values: bool = False
    token_input_dim: int = 0
    has_output_scale: bool = False
    activation: str = "silu"
    logit_soft_cap: float = 0.0
    sliding_rope_inv_freq: tuple[float, ...] = ()
    long_rope_inv_freq: tuple[float, ...] = ()
    long_rope_after: int = 0

    @property
    def has_like_layers(self) -> bool:
        """Whether all layers have keys and values of their own, in heads of one size."""
        return not any(layer.head_dim or layer.kv_distance for layer in self.layers)

    @property
    def n_slots(self) -> int:
        return sum(layer.n_kv_heads for layer in self.layers)


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
                f"{_label(self, 'stop')} must be non-empty strings, got {self.stop!r}; "
                "an empty stop text would end the answer before its first character"
            )
        object.__setattr__(self, "stop", tuple(stop))
        lookup = str(self.lookup) if isinstance(self.lookup, (str, int)) else ""
        is_number = lookup.isascii() and lookup.isdigit() and 1 <= int(lookup) <= MAX_LOOKUP
        if not is_number and lookup not in (AUTO_LOOKUP, LOOKUP_OFF):
            raise UsageError(
                f"{_label(self, 'lookup')} must be auto, off or a number of tokens from 1 to "
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
class RuntimeConfig:
    """What a run takes from the machine.

    ``context_size=None`` is what the prompt and ``max_tokens`` need, at least 4,096 and at most
    the model's trained length; ``0`` is the trained length. ``threads=None`` counts usable cores.
    Keys and values of the cache have the number type ``cache_type`` unless ``cache_type_k`` or
    ``cache_type_v`` says another.
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
