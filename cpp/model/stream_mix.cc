#include "model/stream_mix.h"

#include <algorithm>

#include "ops/matmul.h"
#include "ops/rows.h"
#include "ops/stream_mix.h"

namespace edgeh2o {
namespace {

// Of rows from `first` on: all their streams, what branches read and give, and the shares of it.
struct MixedRows {
  MatView<float> streams, x, shares;

  MixedRows(const DecoderConfig& config, const Activations& a, size_t first, size_t n)
      : streams{a.mixed_streams + first * config.streams_dim(), n, config.streams_dim(),
                config.streams_dim()},
        x{a.x + first * config.model_dim, n, config.model_dim, config.model_dim},
        shares{a.shares + first * config.n_streams, n, config.n_streams, config.n_streams} {}
};

MatmulOutput output_of(const Linear& linear, const MatView<float>& out) {
  return {&linear.weight, linear.bias.empty() ? nullptr : linear.bias.data(), out.data, out.stride, false};
}

// At most mix_rows.
void mix_rows(const DecoderConfig& config, const KernelTable& table, const StreamMixer& mixer, Activations& a,
              size_t first, size_t n, const AdapterScales& adapters) {
  const MixedRows rows(config, a, first, n);
  const size_t dim = config.streams_dim(), rank = config.stream_rank;
  const MatView<float> normed{a.mix_norm, n, dim, dim}, gates{a.mix_gate, n, dim, dim},
      vectors{a.mix_vectors, n, rank, rank};
  const MatmulContext products{a.scratch, adapters};
  norm_groups(table, as_const(rows.streams), config.model_dim, {mixer.norm.data(), mixer.norm.size()},
              config.norm_eps, normed);
  const bool has_shares = static_cast<bool>(mixer.shares.weight);
  const PackedMatrix *down = &mixer.down.weight, *shares = has_shares ? &mixer.shares.weight : down;
  const PackedOut packed = packed_for(table, a.packed, {down, shares}, adapters.any());
  const MatmulOutput outputs[] = {output_of(mixer.down, vectors), output_of(mixer.shares, rows.shares)};
  matmul(table, pack_rows(table, as_const(normed), packed), {outputs, has_shares ? size_t{2} : size_t{1}},
         products);
  scaled_silu(table, vectors, 1.0f / static_cast<float>(config.n_streams));
  const PackedOut packed_vectors = packed_for(table, a.packed, {&mixer.up.weight}, adapters.any());
  const MatmulOutput output = output_of(mixer.up, gates);
  matmul(table, pack_rows(table, as_const(vectors), packed_vectors), {&output, 1}, products);
  mean_of_gated(table, normed, as_const(gates), rows.x);
}

}  // namespace

void copy_to_streams(const DecoderConfig& config, Activations& a, size_t first, size_t n) {
  const MixedRows rows(config, a, first, n);
  MatView<float> stream{rows.streams.data, n, config.model_dim, rows.streams.stride};
  for (size_t k = 0; k < config.n_streams; ++k, stream.data += config.model_dim) {
    copy_rows(as_const(rows.x), stream);
  }
}

void mix_streams(const DecoderConfig& config, const KernelTable& table, const StreamMixer& mixer,
                 Activations& a, size_t first, size_t n, const AdapterScales& adapters) {
  for (size_t begin = 0; begin < n; begin += a.mix_rows) {
    AdapterScales own = adapters;
    if (own.rows) own.rows += begin;
    mix_rows(config, table, mixer, a, first + begin, std::min(a.mix_rows, n - begin), own);
  }
}

void add_to_streams(const DecoderConfig& config, Activations& a, size_t first, size_t n) {
  const MixedRows rows(config, a, first, n);
  share_out(rows.streams, as_const(rows.x), as_const(rows.shares));
}

}  // namespace edgeh2o
