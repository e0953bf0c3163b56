"""What the products of prefill attention are rounded to, by the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from .. import isa as instruction_sets
from ..attention.base import SparseAttentionConfig
from ..config import RuntimeConfig
from ..model_config import DecoderConfig, ModelConfig

# Shorter prompts wait for their weights: 512 tokens of SmolLM2-135M take as long in 8 bits.
MIN_ROUNDED_TOKENS = 1024
# Percent. What rounding to 8 bits adds to an output is 1.4 % of its norm (SmolLM2-135M; 2.2 % in
# the worst layer), and the guard cannot tell it from what a sparse attention leaves out.
MIN_ROUNDED_ERROR = 4.0


@dataclass(frozen=True, slots=True)
class AttentionPrecisions:
    """``exact`` is for any prompt, ``rounded`` for long ones; the same if one was asked for."""

    exact: str
    rounded: str

    @classmethod
    def of(cls, config: ModelConfig, runtime: RuntimeConfig, device: str) -> AttentionPrecisions:
        """Those of a model on this machine. Raises UsageError for one that it has not."""
        # Biases make a few dimensions of keys large, which 8 bits hold badly: the decoder of the
        # CPU evens them out (cpp/model/key_balance.h), what an ONNX graph computes stays as it is.
        if isinstance(config, DecoderConfig):
            is_fit = config.latent is None
        else:
            is_fit = not config.has_key_bias
        exact, rounded = (
            instruction_sets.attention_precision(
                runtime.attention_precision,
                has_key_bias=config.has_key_bias,
                may_round=may_round,
            )
            for may_round in (False, device == "cpu" and is_fit)
        )
        return cls(exact, rounded)

    @property
    def may_round(self) -> bool:
        """Whether there are products in 8 bits, and no precision was asked for."""
        return self.rounded != self.exact

    def choose(
        self,
        attention: SparseAttentionConfig,
        n_tokens: int,
        error_percent: float | None,
    ) -> str:
        """The precision for a prompt of ``n_tokens``.

        Long ones are rounded by an ``attention`` of whose model it is known that this is harmless,
        where everything is read, or the guard has no limit (``error_percent`` is None) or one far
        above what rounding adds to the error.
        """
        if n_tokens < MIN_ROUNDED_TOKENS or not attention.may_round_products:
            return self.exact
        is_harmless = error_percent is None or error_percent >= MIN_ROUNDED_ERROR
        return self.rounded if is_harmless or attention.reads_all else self.exact
