"""What the products of prefill attention are rounded to, by the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from .. import isa as instruction_sets
from ..attention.base import SparseAttentionConfig
from ..config import RuntimeConfig
from ..model_config import DecoderConfig, ModelConfig

# Shorter prompts wait for their weights: 512 tokens of SmolLM2-135M take as long in 8 bits.
MIN_ROUNDED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class AttentionPrecisions:
    """``exact`` is for any prompt, ``rounded`` for long ones; the same if one was asked for."""

    exact: str
    rounded: str

    @classmethod
    def of(cls, config: ModelConfig, runtime: RuntimeConfig, device: str) -> AttentionPrecisions:
        """Those of a model on this machine. Raises UsageError for one that it has not."""
        # Biases make a few dimensions of keys large, which integers hold badly: the decoder of the
        # CPU evens them out (cpp/model/key_balance.h), what an ONNX graph computes stays as it is.
        if isinstance(config, DecoderConfig):
            is_fit = config.latent is None
        else:
            is_fit = not config.has_key_bias
        is_fit = is_fit and device == "cpu"
        exact, rounded = (
            instruction_sets.attention_precision(
                runtime.attention_precision,
                has_key_bias=config.has_key_bias,
                has_even_keys=is_fit,
                may_round=may_round,
            )
            for may_round in (False, config.is_causal)
        )
        return cls(exact, rounded)

    @property
    def may_round(self) -> bool:
        """Whether there are products in 8 bits, and no precision was asked for."""
        return self.rounded != self.exact

    def choose(self, attention: SparseAttentionConfig, n_tokens: int) -> str:
        """The precision for a prompt of ``n_tokens``.

        Long ones are rounded by an ``attention`` of whose model it is known that this is harmless.
        """
        is_rounded = n_tokens >= MIN_ROUNDED_TOKENS and attention.may_round_products
        return self.rounded if is_rounded else self.exact
