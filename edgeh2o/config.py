"""Settings as frozen dataclasses: how a model is run (how tokens are drawn: ``sampling_config``).

Every class checks its values when it is made and raises ``UsageError`` that names the field, the
command line flag and the cure. The command line takes flags, defaults and help from the field
metadata (``flags`` and ``help``), so an option is described once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .errors import UsageError
from .lora_config import LoraAdapter
from .option_fields import MAX_CONTEXT, check_flag, check_int, check_real, option
from .rope_config import ROPE_OF_FILE, RopeConfig

MAX_BATCH = 2**20
MAX_THREADS = 256
CACHE_TYPES = ("f16", "f32", "q8_0")
DEVICE_NAME = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
# In the place of a draft model: the layer of the model's own file that guesses tokens ahead.
MTP_DRAFT = "mtp"
PACKED_OFF, PACKED_AUTO = "off", "auto"
ATTENTION_PRECISIONS = ("auto", "f32", "bf16", "f16", "int8", "int16")
# What weights can be written as: tensor types of GGUF, and mixtures of llama-quantize.
QUANTISED_TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0"),
    *("q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s"),
)
DEFAULT_QUANTISED_TYPE = "q8_0"


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
        "has shown it, else int16 or bf16 where they are known to be faster, else f32",
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
        "the size of the model, which starts map into memory instead of packing them anew, and of "
        "which a model larger than memory runs; "
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
        metavar="PATH[:SCALE]",
        help="LoRA adapter that is added to the weights, a folder of PEFT or a GGUF file, and by "
        "how much of what it was trained with; several times for several",
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
