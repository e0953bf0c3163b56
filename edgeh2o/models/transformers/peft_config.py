"""adapter_config.json of PEFT: by how much each module of a LoRA adapter counts.

Whatever else changes what is computed is refused, be it a variant of LoRA or an initialisation that
changed the weights of the model itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ...errors import FormatError
from ...formats.metadata import quote
from ...formats.model_folder import ADAPTER_CONFIG
from ..lora import MERGE
from .settings import Settings

# Of what was trained, where, and how it began, none of which counts once it was saved: what is in
# the file says which modules have an update.
_IGNORED = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("peft_version", "runtime_config", "ensure_weight_tying", "lora_dropout"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("megatron_config", "megatron_core", "qalora_group_size", "velora_config"),
        *("eva_config", "corda_config", "loftq_config", "lora_ga_config"),
        # A and B are those of the product, rows of outputs first, however the matrix is stored.
        "fan_in_fan_out",
        # Said by tensors of their own.
        *("modules_to_save", "bias"),
    )
)
# Initialisations that leave the model as it is; the others move a part of it into A and B.
_INITIALISATIONS = ("gaussian", "eva", "orthogonal", "mica")
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA, whose magnitudes scale whole rows,",
    "use_qalora": "QA-LoRA, whose inputs are averaged in groups,",
    "use_bdlora": "BD-LoRA, whose factors are parted into blocks,",
    "alora_invocation_tokens": "activated LoRA, which counts behind certain tokens only,",
    "arrow_config": "Arrow, which chooses among adapters per token,",
    "kasa_config": "KaSA, which changes the weights of the model,",
    "monteclora_config": "MonteCLoRA, which draws what it adds,",
    "layer_replication": "a model whose layers are repeated",
    "trainable_token_indices": "new rows of single tokens",
    "lora_bias": "biases of updates",
}
_READ = ("peft_type", "init_lora_weights", "r", "lora_alpha", "use_rslora")
_KNOWN = {*_READ, "rank_pattern", "alpha_pattern", "target_parameters", *_IGNORED, *_REFUSED}
_MAX_PATTERN, _MAX_PATTERNS = 256, 2**14
# Patterns are untrusted. A repeated part may be tried at about so many lengths, and this is how
# many ways to match all patterns of a file may have together.
_LENGTHS, _MAX_WAYS = 64, 2**18
_ATOM = r"(?:[\w.-]|\\[.\-_dw]|\[[\w.-]+\])"
_GROUP = rf"\((?:\?:)?{_ATOM}*(?:\|{_ATOM}*)*\)"
_PATTERN = re.compile(rf"\^?(?:{_ATOM}[*+]?|{_GROUP})*\$?", re.ASCII)


class PeftConfig:
    """What an adapter_config.json says. Raises FormatError for what is not understood.

    ``base_model`` is what the adapter was trained on, as far as it is said.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        settings = Settings(values, ADAPTER_CONFIG)
        kind = settings.take("peft_type")
        if kind != "LORA":
            raise FormatError(
                f"{settings.label('peft_type')} is {quote(str(kind))}; only adapters of the kind "
                f"LORA are supported; {MERGE}"
            )
        for key, what in _REFUSED.items():
            if _is_set(settings.take(key)):
                raise FormatError(f"{settings.label(key)} is set: {what} is not supported; {MERGE}")
        _check_initialisation(settings)
        self._rank = settings.integer("r")
        self._alpha = settings.number("lora_alpha")
        self._is_root = bool(settings.flag("use_rslora"))
        self._ranks = _Patterns(settings, "rank_pattern")
        self._alphas = _Patterns(settings, "alpha_pattern")
        parameters = settings.take("target_parameters") or []
        if not isinstance(parameters, list) or not all(
            isinstance(each, str) for each in parameters
        ):
            raise FormatError(f"{settings.label('target_parameters')} must be a list of names")
        self._parameters = tuple(f".{each}" for each in parameters)
        base = settings.take("base_model_name_or_path")
        self.base_model = base if isinstance(base, str) else ""
        for key, value in values.items():
            if key not in _KNOWN and _is_set(value):
                raise FormatError(
                    f"{settings.label(key)} is not known; leaving it out could give wrong answers. "
                    f"Use a newer edgeh2o, or {MERGE}"
                )

    def factor(self, module: str, rank: int) -> float:
        """What B A of a module counts: alpha over the rank, or over its root (rsLoRA).

        Kalajdzievski 2023 has the latter. ``module`` may be a parameter of one, ``rank`` is that of
        its tensors. Raises FormatError for another one than the settings say.
        """
        if f".{module}.weight".endswith(self._parameters):
            module = f"{module}.weight"  # which the patterns are for then
        expected = self._ranks.find(module, self._rank)
        if rank != expected:
            raise FormatError(
                f"module {quote(module)} has a rank of {rank}, but {ADAPTER_CONFIG} says "
                f"{expected:g}; the files belong to different adapters, fetch both again"
            )
        alpha = self._alphas.find(module, self._alpha)
        return alpha / math.sqrt(rank) if self._is_root else alpha / rank


class _Patterns:
    """Numbers of modules by patterns of their names, of which the first that matches counts."""

    def __init__(self, settings: Settings, key: str) -> None:
        values = settings.take(key)
        if values is not None and not isinstance(values, dict):
            raise FormatError(f"{settings.label(key)} must be an object of patterns and numbers")
        numbers = Settings(values or {}, f"{ADAPTER_CONFIG}, {key}")
        self._numbers: dict[str, float] = {}
        self._patterns: list[tuple[re.Pattern[str], float]] = []
        ways = 0
        if len(values or {}) > _MAX_PATTERNS:
            raise FormatError(f"{settings.label(key)} has more than {_MAX_PATTERNS} patterns")
        for pattern in values or {}:
            self._numbers[pattern] = numbers.number(pattern)
            ways += _count_ways(settings.label(key), pattern)
            try:
                # As PEFT matches them: of the whole name, or of what is behind a dot.
                compiled = re.compile(rf"(.*\.)?({pattern})$")
            except re.error as error:
                raise _not_understood(settings.label(key), pattern, str(error)) from None
            self._patterns.append((compiled, self._numbers[pattern]))
        if ways > _MAX_WAYS:
            raise FormatError(
                f"{settings.label(key)} has patterns that match in too many ways; write the names "
                "of modules"
            )

    def find(self, module: str, default: float) -> float:
        """The number of a module."""
        for pattern, number in self._patterns:
            if pattern.match(module):
                return number
        return self._numbers.get(module, default)


def _count_ways(label: str, pattern: str) -> int:
    """About how often it may be tried in each place. Raises FormatError for an odd one."""
    if len(pattern) > _MAX_PATTERN or not _PATTERN.fullmatch(pattern):
        raise _not_understood(label, pattern, "only names, '.', '*', '+' and groups of names are")
    ways: int = _LENGTHS ** min(pattern.count("*") + pattern.count("+"), 8)
    for group in re.findall(r"\([^)]*\)", pattern):
        ways *= 1 + group.count("|")
    return ways


def _not_understood(label: str, pattern: str, cause: str) -> FormatError:
    return FormatError(
        f"{label} has the pattern {quote(pattern)}, which is not understood ({cause}); "
        "write the name of each module"
    )


def _check_initialisation(settings: Settings) -> None:
    value = settings.take("init_lora_weights")
    if isinstance(value, bool) or value is None or value in _INITIALISATIONS:
        return
    raise FormatError(
        f"{settings.label('init_lora_weights')} is {quote(str(value))}, which may have moved a "
        "part of the model's weights into the adapter; save it as a plain one (save_pretrained "
        f"with path_initial_model_for_weight_conversion), or {MERGE}"
    )


def _is_set(value: object) -> bool:
    """Whether a key has another value than one that is left as it is."""
    return value is not None and value is not False and value not in ([], {}, "")
