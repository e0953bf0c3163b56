"""An object of config.json whose every key must have been understood."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, overload

from ...errors import FormatError
from ...formats.metadata import quote

MAX_COUNT = 2**31 - 1

# Keys that say nothing about what is computed.
_IGNORED = frozenset(
    (
        *("architectures", "auto_map", "model_type", "transformers_version", "torch_dtype"),
        *("dtype", "use_cache", "cache_implementation", "initializer_range", "tokenizer_class"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "residual_dropout"),
        *("attention_bias", "mlp_bias", "qkv_bias"),  # biases are where the weights have them
        *("pretraining_tp", "is_llama_config", "transformers.js_config"),
        *("output_router_logits", "router_aux_loss_coef", "router_z_loss_coef"),
        *("output_attentions", "output_hidden_states", "return_dict", "problem_type"),
        *("id2label", "label2id", "task_specific_params", "torchscript", "num_logits_to_keep"),
        *("do_sample", "temperature", "top_p", "max_length", "min_length", "repetition_penalty"),
        *("unsloth_fixed", "unsloth_version"),
    )
)
_MISSING = object()


class Settings:
    """Reads keys one by one; what nobody read is refused by ``refuse_rest``.

    Getters raise FormatError that names the key. One whose value is null counts as missing.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: str = "config.json",
        *,
        ignored: Collection[str] = (),
    ) -> None:
        self._values, self._path = values, path
        self._read: set[str] = set(ignored)

    def label(self, key: str) -> str:
        """The key as error messages name it."""
        return f"{self._path}: {quote(key)}"

    def take(self, key: str, default: Any = None) -> Any:
        """The value as it is; ``default`` where the key is missing."""
        self._read.add(key)
        return self._values.get(key, default)

    def has(self, key: str) -> bool:
        return key in self._values

    def flag(self, key: str) -> bool | None:
        """Whether a key is true; None where it is missing."""
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return bool(value) if value is not None else None

    def integer(self, key: str, *, default: int | None = None) -> int:
        """A count of at least 1; without a default the key must be there."""
        value = self.take(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            self._refuse(key, value, "a whole number of at least 1")
        return int(value)

    def count(self, key: str, *, default: int) -> int:
        """As ``integer``, but it may be 0."""
        return 0 if self.take(key) == 0 else self.integer(key, default=default)

    @overload
    def number(self, key: str, *, default: None) -> float | None: ...
    @overload
    def number(self, key: str, *, default: float) -> float: ...
    @overload
    def number(self, key: str) -> float: ...

    def number(self, key: str, *, default: Any = _MISSING) -> float | None:
        """A finite number; without a default the key must be there."""
        value = self.take(key)
        if value is None and default is not _MISSING:
            return None if default is None else float(default)
        if not _is_number(value):
            self._refuse(key, value, "a number")
        return float(value)

    def numbers(self, key: str, count: int) -> list[float]:
        """A list of ``count`` finite numbers."""
        value = self.take(key)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_number, value)):
            self._refuse(key, value, f"a list of {count} numbers")
        return [float(item) for item in value]

    def kinds(self, key: str, count: int, known: tuple[str, ...]) -> list[str] | None:
        """A list of ``count`` of the ``known`` words; None where it is missing."""
        value = self.take(key)
        if value is not None and (
            not isinstance(value, list)
            or len(value) != count
            or not all(isinstance(kind, str) and kind in known for kind in value)
        ):
            raise FormatError(
                f"{self.label(key)} must be a list of {count} times {' or '.join(known)}; other "
                "layers are not supported"
            )
        return value

    def section(self, key: str) -> Settings | None:
        """The object below a key; None where it is missing."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._refuse(key, value, "an object")
        return Settings(value, f"{self._path}, {key}")

    def require(self, key: str, allowed: tuple[object, ...]) -> None:
        """Refuses another value than those, where the key is there."""
        if self.has(key) and self.take(key) not in allowed:
            value = self.take(key)
            raise FormatError(
                f"{self.label(key)} is {value!r:.60}, which is not supported for this model (only "
                f"{' or '.join(map(repr, allowed))} is); leaving it out would give wrong answers"
            )

    def refuse_rest(self) -> None:
        """Raises FormatError for a key that has not been read and may change what is computed."""
        for key, value in self._values.items():
            if key in self._read or key in _IGNORED or key.startswith("_") or value is None:
                continue
            raise FormatError(
                f"{self.label(key)} is not known for this model; leaving it out could give wrong "
                "answers. Use a GGUF file of the model, or a newer edgeh2o"
            )

    def _refuse(self, key: str, value: object, wanted: str) -> None:
        if value is None:
            raise FormatError(f"{self.label(key)} is missing; it must be {wanted}")
        raise FormatError(f"{self.label(key)} is {value!r:.60}, but must be {wanted}")


def _is_number(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < 1e30
        and math.isfinite(value)
    )
