"""In what tiny models of an architecture may differ from a llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Tensors and metadata in which an architecture differs.

    Attributes:
        pre_norms, post_norms: the input and the output of a branch are normed.
        post_norm_suffix: with what the names of norms of outputs end.
        qk_norm: "head", "own_head" or "projection": queries and keys are normed.
        qkv_biases: Q, K and V have biases.
        ffn_norm: name of the norm of the feed-forward network's input.
        fused_qkv, fused_gate_up: Q, K and V are one matrix; gate and up are.
        has_experts: the feed-forward network is a mixture of experts.
        has_expert_width: a key says how wide an expert is, not feed_forward_length.
        shared_gate: the shared expert has a gate.
        has_shared_width: there is a shared expert, and a key says how wide it is.
        is_gpt_oss: attention has sinks, and experts and their router have biases.
        is_gemma4: windows are an array, pairs are rotated in part, layers may share keys and values
            and have inputs per token.
        is_gemma3n: windows are an array, tokens have several residual streams, layers a branch of
            low rank and inputs per token, and may share keys and values.
        has_short_conv: layers without KV heads, by default every other one, have a convolution.
        has_delta_net: every other layer has a gated delta net, and attention has a gate.
        has_grouped_heads: neighbouring value heads of a delta net share a key head, and its gates
            are one matrix.
        has_row_decays: every other layer has a delta net whose rows decay by themselves.
        has_decay_vectors: they do so by vectors as long as a head, without a bound.
        mamba2: layers have Mamba-2: "other" than those with KV heads, by default every other one;
            "beside" attention; "single", by turns with attention and feed-forward networks
            without a gate, of which a layer has one; or "only", all are that and nothing else.
        has_selecting_mamba2: Mamba-2 makes what it selects by of its channels, and layers that have
            it no heads.
        has_mamba1: layers without KV heads, by default every other one, have Mamba-1.
        has_only_mamba1: all layers are that and nothing else.
        has_rwkv6, has_rwkv7: all layers have the mixer and the network of RWKV-6 or RWKV-7.
        has_plain_networks: these have RMS norms and a plain network instead.
        goes_by_turns: every other layer has experts, the second first, as no key says.
        is_ungated: the feed-forward network has no gate, but the square of ReLU.
        has_layer_norm, has_norm_biases: norms are LayerNorm; norms of either kind have biases.
        has_norm_weights: norms have weights.
        has_parallel_norm: the network beside attention has a norm of its own, if there are two.
        has_network_biases: matrices of networks have biases.
        has_output_biases, has_logit_biases: the output of attention has a bias, and logits have.
        is_parallel: the feed-forward network has the normed input of attention.
        has_xielu: activations are xIELU.
        has_expert_scales: files say how experts are chosen and weighted, as those of deepseek2.
        has_softmax_gate: shares of experts are a softmax, also of those with biases.
        normalises_experts: files say that the shares of a token's experts add up to 1.
        has_dense_layers: the first layer has one feed-forward network, without biases of experts.
        has_expert_bias: a bias counts in the choice of experts, whose shares are sigmoids, and the
            first layer has one feed-forward network.
        has_only_experts: the first layer has experts too.
        expert_bias_name: name of the biases that count in the choice of experts.
        output_norm: name of the norm behind the last layer.
        is_latent: attention is of the latent kind (``tools/tiny_models/latent.py``).
        has_sliding_latent: layers with a window have heads of other sizes, and what is rotated of
            keys is normed.
        is_indexed: its layers have indexers, which choose what is read.
        chooses_by_head: layers with experts have one for every KV head.
        chooses_adapters: files have adapters, which tokens choose.
        has_sections: rotated pairs are parted among axes.
        has_window_pattern: files say which layers have a window.
        has_sinks: attention has sinks.
        has_window_sinks: layers with a window have.
        has_other_values: values of heads have ``value_dim`` numbers.
        drafts_dense: layers that guess tokens ahead have one network.
        hides_dense: no key says how many of the first layers have one network.
        has_fused_experts: gate and up of experts are one matrix.
        output_gate: the output of attention has a gate by a matrix of its own, "per_output" or
            "per_head".
        has_position_table: positions are rows of a table.
        has_gate_limits: files give a limit of the gates of every layer.
        has_shared_limits: they give others of the shared expert and of dense layers.
        lacks_mixers: layers without KV heads, by default the second, have no mixer.
        has_file_gate: files say how shares are made of a router's logits.
        has_joint_width: files give the widths of gate and up together.
        has_sub_norms: what attention gives, and what the activation, is normed.
        has_head_gains: heads of queries have a factor each, and so have outputs of branches and the
            embedding that is added behind a layer.
        has_loops: files say how often layers are gone through.
        has_two_stacks: there are two stacks of layers, gone through by cycles.
        has_adjugates: neighbouring experts share others.
        mixes_streams: tokens have several residual streams, which are mixed before every branch,
            indexers score blocks, and n-grams are looked up.
        has_equal_shared: there is a shared expert as wide as the others.
        has_temperature_length: files say after how many positions queries grow.
        has_sum_norms: the residual stream is normed behind every branch, as in BERT, and so is the
            embedding, of a token of the first type; the tokenizer is WordPiece.
        has_down_bias: the last matrix of the network has a bias.
        has_embedding_norm: the embedding is normed, with weights and biases.
        has_distance_bias: attention has a bias by distance (ALiBi).
        lacks_first_norm: the embedding is normed, and the input of the first mixer is not.
        needs_window: files say how wide windows are.
        keys: float metadata after the architecture's name. Scales and caps are far from 1 and
            small enough to show in the logits.
    """

    pre_norms: bool = True
    post_norms: bool = False
    post_norm_suffix: str = ".weight"
    qk_norm: str | None = None
    qkv_biases: bool = False
    ffn_norm: str = "ffn_norm"
    fused_qkv: bool = False
    fused_gate_up: bool = False
    has_experts: bool = False
    has_expert_width: bool = True
    shared_gate: bool = False
    has_shared_width: bool = False
    is_gpt_oss: bool = False
    is_gemma4: bool = False
    is_gemma3n: bool = False
    has_short_conv: bool = False
    has_delta_net: bool = False
    has_grouped_heads: bool = False
    has_row_decays: bool = False
    has_decay_vectors: bool = False
    mamba2: Literal["other", "beside", "single", "only"] | None = None
    has_selecting_mamba2: bool = False
    has_mamba1: bool = False
    has_only_mamba1: bool = False
    has_rwkv6: bool = False
    has_rwkv7: bool = False
    has_plain_networks: bool = False
    goes_by_turns: bool = False
    has_expert_bias: bool = False
    is_ungated: bool = False
    has_layer_norm: bool = False
    has_norm_biases: bool = False
    has_norm_weights: bool = True
    has_parallel_norm: bool = False
    has_network_biases: bool = False
    has_output_biases: bool = False
    has_logit_biases: bool = False
    is_parallel: bool = False
    has_xielu: bool = False
    has_expert_scales: bool = False
    has_softmax_gate: bool = False
    normalises_experts: bool = True
    has_dense_layers: bool = False
    has_only_experts: bool = False
    expert_bias_name: str = "exp_probs_b.bias"
    output_norm: str = "output_norm"
    is_latent: bool = False
    has_sliding_latent: bool = False
    is_indexed: bool = False
    chooses_by_head: bool = False
    chooses_adapters: bool = False
    has_sections: bool = False
    has_window_pattern: bool = False
    has_sinks: bool = False
    has_window_sinks: bool = False
    has_other_values: bool = False
    hides_dense: bool = False
    drafts_dense: bool = False
    has_fused_experts: bool = False
    output_gate: Literal["per_output", "per_head"] | None = None
    has_position_table: bool = False
    has_gate_limits: bool = False
    has_shared_limits: bool = False
    lacks_mixers: bool = False
    has_file_gate: bool = False
    has_joint_width: bool = False
    has_sub_norms: bool = False
    has_head_gains: bool = False
    has_loops: bool = False
    has_two_stacks: bool = False
    has_temperature_length: bool = False
    has_equal_shared: bool = False
    has_adjugates: bool = False
    has_sum_norms: bool = False
    has_down_bias: bool = False
    has_embedding_norm: bool = False
    has_distance_bias: bool = False
    lacks_first_norm: bool = False
    needs_window: bool = False
    mixes_streams: bool = False
    keys: Mapping[str, float] = field(default_factory=dict)

    @property
    def begins_dense(self) -> bool:
        """Whether the first layers of a mixture of experts have one feed-forward network."""
        return (self.has_dense_layers or self.has_expert_bias) and not self.has_only_experts

    @property
    def has_only_mamba(self) -> bool:
        """Whether layers are Mamba and nothing else."""
        return self.has_only_mamba1 or self.mamba2 == "only"

    @property
    def is_rwkv(self) -> bool:
        return self.has_rwkv6 or self.has_rwkv7

    @property
    def has_shifted_networks(self) -> bool:
        return self.is_rwkv and not self.has_plain_networks

    @property
    def attends(self) -> bool:
        """Whether some layer does."""
        return not (self.has_only_mamba or self.is_rwkv)

    @property
    def is_hybrid(self) -> bool:
        """Whether the first layer does not attend, but the second does."""
        has_mamba = self.has_mamba1 or self.mamba2 in ("other", "single", "only")
        has_delta_net = self.has_delta_net or self.has_row_decays
        return self.has_short_conv or has_delta_net or has_mamba or self.is_rwkv

    @property
    def reads_all(self) -> bool:
        """Whether no sparse rule says what is read."""
        return self.has_indexers or self.has_distance_bias

    @property
    def has_indexers(self) -> bool:
        """Whether an indexer of the model's own says what is read."""
        return self.is_indexed or self.chooses_by_head or self.mixes_streams

    @property
    def is_recurrent(self) -> bool:
        return self.is_hybrid or self.mamba2 is not None
