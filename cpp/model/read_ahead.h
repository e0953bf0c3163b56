// Weights that lie in a mapped file are asked for before they are multiplied. A page fault waits for the
// disk, which reads little more than that page.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <vector>

#include "base/mapped_file.h"
#include "base/mat_view.h"
#include "ops/experts.h"
#include "quant/packed_matrix.h"

namespace edgeh2o {

class ReadAhead {
 public:
  // What a file larger than memory holds is asked for whenever it is needed, else once: asking for what is
  // there takes 6 us a MiB. `file` outlives this.
  ReadAhead(const MappedFile& file, size_t n_layers, bool is_beyond_memory);

  // A matrix that is multiplied in every call, in a layer or, for n_layers, behind the last one; none where
  // it lies elsewhere.
  void add(size_t layer, const PackedMatrix& matrix) { add_to(layer, 0, matrix); }
  void add_expert(size_t layer, size_t expert, const PackedMatrix& matrix) {
    add_to(layer, 1 + expert, matrix);
  }

  // Asks for what add() has of the layer, or for an expert of it.
  void layer(size_t layer) const { ask(layers_[layer][0]); }
  void expert(size_t layer, size_t expert) const { ask(layers_[layer][1 + expert]); }
  // The first experts of a layer, before it is known which are chosen: many rows choose almost all.
  void experts(size_t layer, size_t n_rows) const;
  size_t expert_bytes(size_t layer, size_t expert) const;  // 0 where they are not mapped

 private:
  struct Group {
    std::vector<Span<const uint8_t>> pages;
    mutable std::atomic<bool> was_asked_for{false};
  };
  void add_to(size_t layer, size_t group, const PackedMatrix& matrix);
  void ask(const Group& group) const;

  const MappedFile& file_;
  bool is_beyond_memory_;
  std::vector<std::deque<Group>> layers_;  // [n_layers + 1], a layer's experts behind the rest of it
};

// Experts of one layer, as they are multiplied one after the other. `ahead` is null where none are mapped.
class ExpertsAhead {
 public:
  ExpertsAhead(const ReadAhead* ahead, size_t layer, const ExpertRoutes& routes)
      : ahead_(ahead), layer_(layer), routes_(routes) {}
  // Expert e is next. What those behind it need is asked for as long as it is not too much.
  void before(size_t e);

 private:
  const ReadAhead* ahead_;
  size_t layer_;
  const ExpertRoutes& routes_;
  size_t next_ = 0;     // the first one that was not looked at
  size_t at_hand_ = 0;  // the last one that was next
  size_t n_bytes_ = 0;  // of those before next_, from the one at hand on
};

}  // namespace edgeh2o
