#include "model/mixer_slots.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

namespace edgeh2o {
namespace {

// Of one layer, a function for every kind of mixer.
struct MixerSlots : SlotList {
  const std::string& prefix;
  const DecoderConfig& config;
  const LayerSpec& spec;
  LayerWeights& layer;
  size_t model_dim;

  void short_conv() const;
  void delta_net() const;
  void rwkv7() const;
  void rwkv6() const;
  void mamba1() const;
  void latent_attention() const;
  void attention() const;
  void mamba2() const;
};

void MixerSlots::short_conv() const {
  linear(prefix + "shortconv.in_proj", layer.conv_in, 3 * model_dim, model_dim);
  add(prefix + "shortconv.conv.weight",
      Weights::Slot{nullptr, &layer.conv, model_dim, spec.n_conv_taps, true});
  linear(prefix + "shortconv.out_proj", layer.conv_out, model_dim, model_dim);
}

void MixerSlots::delta_net() const {
  const DeltaHeads& delta = spec.delta;
  const bool is_split = delta.decays_by_row;
  if (!is_split) {
    linear(prefix + "attn_qkv", layer.delta_qkv, delta.conv_dim(), model_dim);
    linear(prefix + "attn_gate", layer.delta_z, delta.value_dim(), model_dim);
  }
  const auto gate = [&](const std::string& name, Linear& whole, Linear& first) {
    const size_t rank = delta.gate_rank;
    linear(prefix + name + "_a", rank > 0 ? first : whole, rank > 0 ? rank : delta.value_dim(), model_dim);
    if (rank > 0) linear(prefix + name + "_b", whole, delta.value_dim(), rank);
  };
  if (is_split) {
    for (const auto& [name, slot, taps] : {std::tuple("q", &layer.attn_q, &layer.conv_parts[0]),
                                           {"k", &layer.attn_k, &layer.conv_parts[1]},
                                           {"v", &layer.attn_v, &layer.conv_parts[2]}}) {
      linear(prefix + "attn_" + name, *slot, delta.value_dim(), model_dim);
      add(prefix + "ssm_conv1d_" + name + ".weight",
          Weights::Slot{nullptr, taps, delta.value_dim(), spec.n_conv_taps, true});
    }
    linear(prefix + "ssm_beta", layer.delta_rate, delta.n_value_heads, model_dim);
    gate("ssm_g", layer.delta_z, layer.delta_z_a);
    gate("ssm_f", layer.delta_decay, layer.delta_decay_a);
    add(prefix + "ssm_a", Weights::Slot{nullptr, &layer.delta_a, delta.n_value_heads, 1, true});
  } else if (delta.are_grouped) {
    linear(prefix + "ssm_ba", layer.delta_gates, 2 * delta.n_value_heads, model_dim);
  } else {
    linear(prefix + "ssm_beta", layer.delta_rate, delta.n_value_heads, model_dim);
    linear(prefix + "ssm_alpha", layer.delta_decay, delta.n_value_heads, model_dim);
  }
  if (!is_split) {
    add(prefix + "ssm_conv1d.weight",
        Weights::Slot{nullptr, &layer.conv, delta.conv_dim(), spec.n_conv_taps, true});
    vector(prefix + "ssm_a", layer.delta_a, delta.n_value_heads, true);
  }
  vector(prefix + "ssm_dt.bias", layer.delta_bias, delta.n_decays(), true);
  vector(prefix + "ssm_norm.weight", layer.delta_norm, delta.head_dim, true);
  linear(prefix + (is_split ? "attn_output" : "ssm_out"), layer.delta_out, model_dim, delta.value_dim());
  // An RMS norm, over the root of the size, has length 1.
  const float scale = 1.0f / std::sqrt(static_cast<float>(delta.head_dim));
  layer.delta_k_scale.assign(delta.head_dim, scale);
  layer.delta_q_scale.assign(delta.head_dim, scale * scale);
}

void MixerSlots::rwkv7() const {
  TimeMix& mix = layer.time_mix;
  const WkvHeads& wkv = spec.wkv;
  const auto pair = [&](const std::string& name, Linear& in, Linear& out, size_t rank) {
    linear(prefix + "time_mix_" + name + "1", in, rank, model_dim);
    linear(prefix + "time_mix_" + name + "2", out, model_dim, rank);
  };
  const auto numbers = [&](const std::string& name, std::vector<float>& slot) {
    vector(prefix + name, slot, model_dim, true);
  };
  for (size_t i = 0; i < mix.shares.size() - (wkv.gate_rank == 0); ++i) {
    numbers("time_mix_lerp_fused." + std::to_string(i) + ".weight", mix.shares[i]);
  }
  linear(prefix + "time_mix_receptance", mix.queries, model_dim, model_dim);
  linear(prefix + "time_mix_key", mix.keys, model_dim, model_dim);
  linear(prefix + "time_mix_value", mix.values, model_dim, model_dim);
  linear(prefix + "time_mix_output", mix.output, model_dim, model_dim);
  pair("w", mix.decays_in, mix.decays_out, wkv.decay_rank);
  pair("a", mix.rates_in, mix.rates_out, wkv.rate_rank);
  if (wkv.gate_rank > 0) pair("g", mix.gates_in, mix.gates_out, wkv.gate_rank);
  numbers("time_mix_w0.weight", mix.decay_bias);
  numbers("time_mix_a0.weight", mix.rate_bias);
  if (wkv.value_rank > 0) {
    pair("v", mix.values_in, mix.values_out, wkv.value_rank);
    numbers("time_mix_v0.weight", mix.value_bias);
  }
  numbers("time_mix_k_k.weight", mix.direction_factors);
  numbers("time_mix_k_a.weight", mix.key_factors);
  numbers("time_mix_r_k.weight", mix.bonus);
  if (wkv.norms_heads) {
    numbers("time_mix_ln.weight", mix.norm);
    numbers("time_mix_ln.bias", mix.norm_bias);
  }
  mix.ones.assign(std::max(model_dim, wkv.gate_rank), 1.0f);
  if (spec.ffn == FfnKind::kShifted) numbers("channel_mix_lerp_k.weight", layer.ffn_shares);
}

void MixerSlots::rwkv6() const {
  TimeMix& mix = layer.time_mix;
  const WkvHeads& wkv = spec.wkv;
  const auto numbers = [&](const std::string& name, std::vector<float>& slot) {
    vector(prefix + name + ".weight", slot, model_dim, true);
  };
  numbers("time_mix_lerp_x", mix.first_shares);
  linear(prefix + "time_mix_w1", mix.shifts_in, mix.shifts_out.size() * wkv.shift_rank, model_dim);
  for (size_t i = 0; i < mix.shifts_out.size(); ++i) {
    numbers("time_mix_lerp_fused." + std::to_string(i), mix.shares[i]);
    linear(prefix + "time_mix_w2." + std::to_string(i), mix.shifts_out[i], model_dim, wkv.shift_rank);
  }
  linear(prefix + "time_mix_decay_w1", mix.decays_in, wkv.decay_rank, model_dim);
  linear(prefix + "time_mix_decay_w2", mix.decays_out, model_dim, wkv.decay_rank);
  for (const auto& [name, slot, n_outputs] : {std::tuple("receptance", &mix.queries, model_dim),
                                              {"key", &mix.keys, wkv.kv_dim()},
                                              {"value", &mix.values, wkv.kv_dim()},
                                              {"gate", &mix.gates_in, model_dim},
                                              {"output", &mix.output, model_dim}}) {
    linear(prefix + "time_mix_" + name, *slot, n_outputs, model_dim);
  }
  numbers("time_mix_decay", mix.decay_bias);
  if (wkv.norms_heads) {
    add(prefix + "time_mix_first.weight",
        Weights::Slot{nullptr, &mix.bonus, wkv.n_heads, wkv.head_dim, true, false, 1});
    numbers("time_mix_ln", mix.norm);
    vector(prefix + "time_mix_ln.bias", mix.norm_bias, model_dim, true);
  }
  if (spec.ffn == FfnKind::kShifted) {
    numbers("channel_mix_lerp_k", layer.ffn_shares);
    numbers("channel_mix_lerp_r", layer.ffn_gate_shares);
    linear(prefix + "channel_mix_receptance", layer.ffn_output_gate, model_dim, model_dim);
  }
}

void MixerSlots::mamba1() const {
  const ScanSizes& scan = spec.scan;
  linear(prefix + "ssm_in", layer.ssm_in, 2 * scan.n_channels, model_dim);
  add(prefix + "ssm_conv1d.weight",
      Weights::Slot{nullptr, &layer.conv, scan.n_channels, spec.n_conv_taps, true});
  vector(prefix + "ssm_conv1d.bias", layer.conv_bias, scan.n_channels, false);
  linear(prefix + "ssm_x", layer.ssm_x, scan.projected_dim(), scan.n_channels);
  linear(prefix + "ssm_dt", layer.ssm_dt, scan.n_channels, scan.step_rank);
  const auto scan_norm = [&](const char* name, std::vector<float>& slot, size_t size) {
    if (scan.norms == ScanNorms::kWeighted) vector(prefix + name, slot, size, true);
    if (scan.norms == ScanNorms::kPlain) slot.assign(size, 1.0f);
  };
  scan_norm("ssm_dt_norm.weight", layer.ssm_dt_norm, scan.step_rank);
  scan_norm("ssm_b_norm.weight", layer.ssm_b_norm, scan.state_dim);
  scan_norm("ssm_c_norm.weight", layer.ssm_c_norm, scan.state_dim);
  add(prefix + "ssm_a",
      Weights::Slot{nullptr, &layer.ssm_a, scan.n_channels, scan.state_dim, true, false, kScanChannels});
  vector(prefix + "ssm_d", layer.ssm_d, scan.n_channels, true);
  linear(prefix + "ssm_out", layer.ssm_out, model_dim, scan.n_channels);
}

void MixerSlots::latent_attention() const {
  const AttentionHeads& heads = spec.heads;
  const LatentHeads& latent = spec.latent;
  const size_t q_inputs = latent.q_rank > 0 ? latent.q_rank : model_dim;
  if (latent.q_rank > 0) {
    linear(prefix + "attn_q_a", layer.attn_q_a, latent.q_rank, model_dim);
    vector(prefix + "attn_q_a_norm.weight", layer.attn_q_a_norm, latent.q_rank, true);
  }
  linear(prefix + "attn_q", layer.attn_q, heads.n_heads * latent.head_dim(), q_inputs);
  if (spec.has_gate_matrix()) linear(prefix + "attn_gate", layer.attn_gate, spec.gate_dim(), model_dim);
  linear(prefix + "attn_kv_a", layer.attn_kv_a, latent.row_dim(), model_dim);
  vector(prefix + "attn_kv_a_norm.weight", layer.attn_kv_a_norm, latent.rank, true);
  if (spec.has_latent_key_norm) {
    vector(prefix + "attn_k_norm.weight", layer.attn_k_norm, latent.rope_dim, true);
  }
  if (heads.index.has_own()) {
    const IndexHeads& index = heads.index;
    linear(prefix + "indexer.attn_q_b", layer.index_q, index.q_dim(), latent.q_rank);
    linear(prefix + "indexer.attn_k", layer.index_k, index.key_dim, model_dim);
    linear(prefix + "indexer.proj", layer.index_weights, index.n_heads, model_dim);
    vector(prefix + "indexer.k_norm.weight", layer.index_k_norm, index.key_dim, true);
    vector(prefix + "indexer.k_norm.bias", layer.index_k_norm_bias, index.key_dim, true);
  }
  layer.attn_k_b.resize(heads.n_heads);
  layer.attn_v_b.resize(heads.n_heads);
  for (size_t head = 0; head < heads.n_heads; ++head) {
    const std::string number = "." + std::to_string(head) + ".weight";
    PackedMatrix& k_b = layer.attn_k_b[head];
    matrix(prefix + "attn_k_b" + number, k_b, latent.rank, latent.nope_dim, true);
    // Of older files: the rows of a head's keys.
    add(prefix + "attn_kv_b_k" + number,
        Weights::Slot{&k_b, nullptr, latent.nope_dim, latent.rank, false, true});
    matrix(prefix + "attn_v_b" + number, layer.attn_v_b[head], latent.value_dim, latent.rank, true);
  }
  linear(prefix + "attn_output", layer.attn_output, model_dim, heads.n_heads * latent.value_dim);
}

void MixerSlots::attention() const {
  const AttentionHeads& heads = spec.heads;
  const size_t n_inputs = config.joins(HiddenJoin::kApart) ? 2 * model_dim : model_dim;
  linear(prefix + "attn_q", layer.attn_q, spec.q_gate_dim() + heads.q_dim(), n_inputs);
  if (spec.has_gate_matrix()) linear(prefix + "attn_gate", layer.attn_gate, spec.gate_dim(), model_dim);
  if (heads.has_own_kv()) {
    linear(prefix + "attn_k", layer.attn_k, heads.k_dim(), n_inputs);
    linear(prefix + "attn_v", layer.attn_v, heads.v_dim(), n_inputs);
  }
  linear(prefix + "attn_output", layer.attn_output, model_dim, heads.out_dim());
  if (const IndexHeads& index = heads.index; index.has_own()) {
    linear(prefix + "indexer.q_proj", layer.index_q, index.q_dim(), model_dim);
    linear(prefix + "indexer.k_proj", layer.index_k, index.key_dim, model_dim);
    vector(prefix + "indexer.q_norm.weight", layer.index_q_norm, index.key_dim, true);
    vector(prefix + "indexer.k_norm.weight", layer.index_k_norm, index.key_dim, true);
    layer.index_ones.assign(index.n_heads, 1.0f);
  }
  if (spec.has_sub_norms) {
    for (const auto& [name, slot] : {std::pair("attn_q", &layer.attn_q),
                                     {"attn_k", &layer.attn_k},
                                     {"attn_v", &layer.attn_v},
                                     {"attn_output", &layer.attn_output}}) {
      vector(prefix + name + ".scale", slot->scale, 1, false);
    }
    vector(prefix + "attn_sub_norm.weight", layer.attn_sub_norm, heads.out_dim(), true);
  }
}

void MixerSlots::mamba2() const {
  const SsdHeads& ssd = spec.ssd;
  linear(prefix + "ssm_in", layer.ssm_in, ssd.in_dim(), model_dim);
  add(prefix + "ssm_conv1d.weight",
      Weights::Slot{nullptr, &layer.conv, ssd.conv_dim(), spec.n_conv_taps, true});
  vector(prefix + "ssm_conv1d.bias", layer.conv_bias, ssd.conv_dim(), false);
  const bool selects = ssd.step_rank > 0;
  const size_t rows = selects ? 1 : ssd.n_heads, cols = selects ? ssd.n_heads : 1;
  add(prefix + "ssm_a", Weights::Slot{nullptr, &layer.ssm_a, rows, cols, true});
  add(prefix + "ssm_d", Weights::Slot{nullptr, &layer.ssm_d, rows, cols, true});
  vector(prefix + "ssm_dt.bias", layer.ssm_bias, ssd.n_heads, true);
  if (selects) {
    linear(prefix + "ssm_x", layer.ssm_x, ssd.projected_dim(), ssd.inner_dim());
    matrix(prefix + "ssm_dt.weight", layer.ssm_dt.weight, ssd.n_heads, ssd.step_rank, true);
    vector(prefix + "ssm_dt_norm.weight", layer.ssm_dt_norm, ssd.step_rank, true);
    vector(prefix + "ssm_b_norm.weight", layer.ssm_b_norm, ssd.state_dim, true);
    vector(prefix + "ssm_c_norm.weight", layer.ssm_c_norm, ssd.state_dim, true);
  }
  layer.ssm_norm.resize(ssd.n_groups);
  for (size_t group = 0; group < ssd.n_groups; ++group) {
    vector(prefix + "ssm_norm." + std::to_string(group) + ".weight", layer.ssm_norm[group],
           ssd.inner_dim() / ssd.n_groups, false);
  }
  linear(prefix + "ssm_out", layer.ssm_out, model_dim, ssd.inner_dim());
}

}  // namespace

void list_mixer(const SlotList& list, const std::string& prefix, const DecoderConfig& config,
                const LayerSpec& spec, LayerWeights& layer) {
  const MixerSlots slots{list, prefix, config, spec, layer, config.model_dim};
  if (spec.mixer == MixerKind::kShortConv) {
    slots.short_conv();
  } else if (spec.mixer == MixerKind::kDeltaNet) {
    slots.delta_net();
  } else if (spec.mixer == MixerKind::kRwkv7) {
    slots.rwkv7();
  } else if (spec.mixer == MixerKind::kRwkv6) {
    slots.rwkv6();
  } else if (spec.mixer == MixerKind::kMamba1) {
    slots.mamba1();
  } else if (!spec.latent.is_none()) {
    slots.latent_attention();
  } else if (spec.attends()) {
    slots.attention();
  }
  if (spec.has_ssd()) slots.mamba2();
}

}  // namespace edgeh2o
