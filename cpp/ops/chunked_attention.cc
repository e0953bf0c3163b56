#include "ops/chunked_attention.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"
#include "ops/attention_sinks.h"

namespace edgeh2o {
namespace {

// First position that the query at `position` sees (below 0: there are fewer than a window's), if there is a
// window.
ptrdiff_t first_seen(size_t position, size_t window) {
  if (window == 0) return kNoneHidden;
  return static_cast<ptrdiff_t>(position + 1) - static_cast<ptrdiff_t>(window);
}

}  // namespace

ChunkedAttention::ChunkedAttention(const AttentionPlan& plan, SparsePolicy& policy, size_t first_slot,
                                   uint8_t* scratch, size_t n_threads)
    : plan_(plan),
      table_(plan.table),
      kernels_(plan.kernels),
      shape_(plan.shape),
      heads_(plan.shape.heads),
      n_sets_(plan.shape.n_sets()),
      set_heads_(plan.shape.set_heads()),
      needs_(plan.needs),
      sizes_(plan.sizes),
      policy_(policy),
      first_slot_(first_slot),
      scratch_(scratch),
      n_threads_(n_threads),
      rounds_(kernels_, shape_, sizes_, buffers_),
      page_scores_(table_, shape_, needs_) {
  Arena arena(scratch);
  buffers_.take(arena, shape_, sizes_, n_threads);
  page_scores_.take_scratch(arena);
}

void ChunkedAttention::check_call(const Call& call) const {
  const size_t n_tokens = call.plan.n_tokens;
  EH2O_CHECK(n_tokens > 0 && n_tokens <= shape_.batch_size,
             "a call takes 1 to batch_size = ", shape_.batch_size, " tokens, got ", n_tokens);
  EH2O_CHECK(call.plan.first_position + n_tokens <= shape_.max_context, "positions ",
             call.plan.first_position, " to ", call.plan.first_position + n_tokens, " exceed the context of ",
             shape_.max_context);
  EH2O_CHECK(call.q.cols == heads_.q_dim() && call.out.cols == heads_.out_dim() && call.out.rows == n_tokens,
             "queries and outputs must have n_heads * head_dim = ", heads_.q_dim(), " and ", heads_.out_dim(),
             " columns, got ", call.q.cols, " and ", call.out.cols);
  EH2O_CHECK(heads_.is_causal || call.plan.first_position == 0,
             "attention that is not causal reads a text in one call, not from position ",
             call.plan.first_position, " on");
}

uint64_t ChunkedAttention::run(MatView<const float> q, const LayerKv& kv, size_t first_position,
                               size_t window, PromptEnd end, MatView<float> out, const SetReads* reads) {
  const ChunkPlan plan{first_position, q.rows, shape_.longest_chunk()};
  const bool is_last = end == PromptEnd::kFinal && !needs_.ends_by_scores;
  const Call call{q, kv, plan, window, is_last, out, reads};
  check_call(call);
#ifdef EH2O_DEBUG
  std::memset(scratch_, 0xFF, plan_.scratch_bytes(n_threads_));  // nobody counts on what others left
#endif
  n_pairs_ = 0;
  choose_sets(call);
  const bool has_tail = end != PromptEnd::kLater && window == 0;
  const size_t n_tail = has_tail ? std::min(needs_.n_dense_tail, q.rows) : 0;
  if (n_tail == 0) {
    run_part(call);
  } else {
    const size_t n_head = q.rows - n_tail;
    if (n_head > 0) run_part(part_of(call, 0, n_head));
    Call tail = part_of(call, n_head, n_tail);
    tail.window = first_position + q.rows;  // everything
    run_part(tail);
  }
  bool asks_policy = false;
  for (size_t set = 0; set < n_sets_; ++set) asks_policy |= reads_of(call, set) == SetReads::kByPolicy;
  if (window == 0 && asks_policy) policy_.end_layer();
  return n_pairs_ * heads_.n_kv_heads / n_sets_;
}

// The others have nothing to gather, nor tasks.
void ChunkedAttention::choose_sets(const Call& call) {
  n_read_ = 0;
  for (size_t set = 0; set < n_sets_; ++set) {
    buffers_.sets[set].n_jobs = 0;
    if (reads_of(call, set) != SetReads::kNone) buffers_.order[n_read_++] = set;
  }
}

// Runs f for the sets of the run, in parallel.
template <typename F>
void ChunkedAttention::for_each_set(const F& f) const {
  parallel_for(n_read_, [&](size_t i, size_t) { f(buffers_.order[i]); });
}

// Tokens [first, first + n_tokens) of the call.
ChunkedAttention::Call ChunkedAttention::part_of(const Call& call, size_t first, size_t n_tokens) {
  Call part = call;
  part.q = call.q.rows_from(first, n_tokens);
  part.out = call.out.rows_from(first, n_tokens);
  part.plan.first_position += first;
  part.plan.n_tokens = n_tokens;
  part.first_row = first;
  return part;
}

void ChunkedAttention::run_part(const Call& call) {
  const size_t first_position = call.plan.first_position, window = call.window;
  const size_t n_chunks = call.plan.n_chunks(), n_without_past = first_position == 0 ? 1 : 0;
  std::sort(buffers_.order, buffers_.order + n_read_);
  rounds_.pack_batch(call.kv, call.plan);
  run_phase_1(call, is_joint(call) ? n_without_past : n_chunks);
  for (size_t i = 0; i < n_chunks; ++i) {
    const size_t n = call.plan.chunk(i).size();
    n_pairs_ += n_read_ * (heads_.is_causal ? causal_pairs(0, n, window) : symmetric_pairs(n, window));
    if (i >= n_without_past) run_phase_2(call, i);
  }
  if (!call.is_last) {
    for_each_set([&](size_t set) { observe_chunk(call, n_chunks - 1, set); });
  }
}

void ChunkedAttention::read_state(size_t n_tokens, float* m, float* l) const {
  for (size_t token = 0; token < n_tokens; ++token) {
    for (size_t head = 0; head < heads_.n_heads; ++head) {
      const size_t row = head / set_heads_ * rows_per_set() + token * set_heads_ + head % set_heads_;
      m[token * heads_.n_heads + head] = buffers_.m[row] / kLog2E;
      l[token * heads_.n_heads + head] = buffers_.l[row];
    }
  }
}

void ChunkedAttention::run_phase_1(const Call& call, size_t n_chunks) const {
  for_each_task(call, 0, n_chunks, [&](const Task& task, size_t thread) {
    clear_sums(call, task, true, false);
    for_each_tile(call, task, thread, [&](const LoadedTile& tile) { attend_intra(call, task, tile, true); });
  });
}

void ChunkedAttention::run_phase_2(const Call& call, size_t chunk_idx) {
  const SetWork* sets = buffers_.sets;
  const size_t *const first_set = buffers_.order, *const end_set = first_set + n_read_;
  for_each_set([&](size_t set) { advance_set(call, chunk_idx, set); });
  plan_round(call);
  order_sets();
  const PositionRange chunk = call.plan.chunk(chunk_idx);
  if (call.window == 0) {
    for (const size_t* set = first_set; set < end_set; ++set) {
      n_pairs_ += chunk.size() * sets[*set].memory.n_rows();
    }
  } else {
    n_pairs_ += n_read_ * (causal_pairs(chunk.begin, chunk.size(), call.window) -
                           causal_pairs(0, chunk.size(), call.window));
  }

  for (bool is_first = true;; is_first = false) {
    rounds_.gather();
    for_each_task(call, chunk_idx, 1, [&](const Task& task, size_t thread) {
      const SetWork& work = sets[task.set];
      const bool is_intra_left = is_joint(call) && work.is_last_round;
      if (work.is_over || (work.n_pieces == 0 && !is_intra_left)) return;
      clear_sums(call, task, is_joint(call), true);
      for_each_tile(call, task, thread, [&](const LoadedTile& tile) {
        attend_memory(call, task, tile, is_joint(call) && is_first);
        if (!is_intra_left) return;
        attend_intra(call, task, tile, is_first && work.n_pieces == 0);
        if (work.is_scored) add_joint_memory_sums(call, task, tile);
      });
    });
    if (std::all_of(first_set, end_set, [&](size_t set) { return sets[set].is_last_round; })) return;
    plan_round(call);
  }
}

// What the sets attend to next. Query heads of a KV head that read the same range share its panels.
void ChunkedAttention::plan_round(const Call& call) const {
  for (size_t set = 0; set < n_sets_; ++set) {
    if (reads_of(call, set) == SetReads::kNone) continue;
    size_t first = shape_.kv_head_of(set) * heads_.group_size() / set_heads_;
    while (first < set && (reads_of(call, first) == SetReads::kNone || !rounds_.read_alike(first, set)))
      ++first;
    if (first < set) {
      rounds_.share_round(first, set);
    } else {
      rounds_.plan_next(set, call.kv, call.plan);
    }
  }
}

// What the next chunk reads besides itself: the policy's choice, the windows of its queries, or everything.
MemorySet ChunkedAttention::select_memory(const Call& call, PositionRange chunk, size_t set) const {
  if (call.window > 0 || reads_of(call, set) == SetReads::kAll) {
    return MemorySet::all_seen(chunk.begin, call.window);
  }
  const size_t width = set_heads_ * heads_.key_dim, kv_head = shape_.kv_head_of(set);
  const float* queries = call.q.row(chunk.begin - call.plan.first_position) + set * width;
  SelectionInput input{chunk,
                       {queries, chunk.size(), width, call.q.stride},
                       call.kv.k(kv_head),
                       call.kv.v(kv_head),
                       table_.add_kv_rows_f32,
                       &page_scores_};
  input.add_kv_squares = table_.add_kv_squares_f32;
  input.scale = heads_.scale;
  return policy_.select(Phase::kPrefill, slot(set), input);
}

// What happens for one memory set between two chunks.
void ChunkedAttention::advance_set(const Call& call, size_t chunk_idx, size_t set) {
  if (chunk_idx > 0) observe_chunk(call, chunk_idx - 1, set);
  const PositionRange chunk = call.plan.chunk(chunk_idx);
  const MemorySet memory = select_memory(call, chunk, set);
  EH2O_DASSERT(memory.is_valid(chunk.begin) && memory.synthetic.count <= needs_.max_synthetic);
  EH2O_DASSERT(!is_scored(call, set) || memory.n_positions() <= needs_.max_scored_memory);
  rounds_.begin(set, memory, first_seen(chunk.begin, call.window), is_scored(call, set));
}

bool ChunkedAttention::is_scored(const Call& call, size_t set) const {
  return call.window == 0 && reads_of(call, set) == SetReads::kByPolicy &&
         needs_.column_sums != ColumnSums::kNone && policy_.is_scored(slot(set));
}

bool ChunkedAttention::wants_sums(const Call& call, const Task& task) const {
  return is_scored(call, task.set) && !(call.is_last && task.chunk_idx + 1 == call.plan.n_chunks());
}

// Sets with much to read first: a long task that begins last leaves the other threads waiting.
void ChunkedAttention::order_sets() const {
  const SetWork* sets = buffers_.sets;
  std::sort(buffers_.order, buffers_.order + n_read_, [&](size_t a, size_t b) {
    const size_t rows_a = sets[a].memory.n_rows(), rows_b = sets[b].memory.n_rows();
    return rows_a != rows_b ? rows_a > rows_b : a < b;
  });
}

// Runs f(task, thread) for all tasks of some chunks; those with the most visible keys of a chunk come first.
template <typename F>
void ChunkedAttention::for_each_task(const Call& call, size_t first_chunk, size_t n_chunks,
                                     const F& f) const {
  parallel_for(n_chunks * n_read_ * sizes_.n_tasks, [&](size_t i, size_t thread) {
    const size_t chunk_idx = first_chunk + i / sizes_.n_tasks / n_read_;
    const Task task{chunk_idx, buffers_.order[i / sizes_.n_tasks % n_read_],
                    sizes_.n_tasks - 1 - i % sizes_.n_tasks, call.plan.chunk(chunk_idx)};
    if (task.task_idx * task_queries() < task.chunk.size()) f(task, thread);
  });
}

// Loads the tiles of a task one after another and runs f on each.
template <typename F>
void ChunkedAttention::for_each_tile(const Call& call, const Task& task, size_t thread, const F& f) const {
  const size_t width = set_heads_ * heads_.key_dim;
  const size_t row_words = sizes_.query_words;
  const size_t end = std::min((task.task_idx + 1) * task_queries(), task.chunk.size());
  LoadedTile tile{buffers_.tile_scratch(sizes_, shape_, thread), {}, 0};
  float* q = const_cast<float*>(tile.scratch.tile.q);  // kernels only read it
  for (size_t first = task.task_idx * task_queries(); first < end; first += sizes_.tile_queries) {
    const size_t n_queries = std::min(sizes_.tile_queries, end - first);
    const size_t token = task.chunk.begin - call.plan.first_position + first;
    kernels_.pack_queries(q, call.q.row(token) + task.set * width, call.q.stride, heads_.scale * kLog2E,
                          n_queries, set_heads_, heads_.key_dim);
    const size_t n_rows = n_queries * set_heads_;
    const size_t n_padding = round_up(n_rows, table_.layout.float_rows) - n_rows;
    std::memset(q + n_rows * row_words, 0, n_padding * row_words * sizeof(float));
    tile.scratch.tile.n_rows = n_rows;
    if (!plan_.slopes.empty()) tile.scratch.tile.slopes = plan_.slopes.data() + task.set * set_heads_;
    const size_t row = task.set * rows_per_set() + (call.first_row + token) * set_heads_;
    tile.state = {buffers_.m + row, buffers_.l + row,
                  call.out.row(token) + task.set * set_heads_ * heads_.value_dim, call.out.stride};
    tile.first_query = first;
    f(tile);
  }
}

// Whether the rows have sinks, which they begin with.
bool ChunkedAttention::has_begun(const Call& call, size_t set, const LoadedTile& tile) const {
  if (call.kv.sinks) {
    begin_with_sinks(tile.state, call.kv.sinks + set * set_heads_, tile.scratch.tile.n_rows, set_heads_,
                     heads_.value_dim);
  }
  return call.kv.sinks != nullptr;
}

// Attends to the chunk's own keys: in one piece if they get column sums.
void ChunkedAttention::attend_intra(const Call& call, const Task& task, const LoadedTile& tile,
                                    bool is_first) const {
  is_first = is_first && !has_begun(call, task.set, tile);
  AttentionTile part = tile.scratch.tile;
  const bool is_whole = is_scored(call, task.set);
  const size_t n_behind = this->n_behind(call, task.chunk.size());
  // Keys that the last query sees.
  const size_t n_visible =
      std::min(tile.first_query + part.n_rows / part.group_size + n_behind, task.chunk.size());
  const size_t step = is_whole ? task.chunk.size() : sizes_.piece_keys;
  if (is_whole && is_joint(call)) part.weights += sizes_.weight_words(sizes_.memory_keys);
  // The first piece begins at most a block of keys before the first key of the tile's first query, so that it
  // holds a key of every query's window.
  const ptrdiff_t n_hidden = first_seen(tile.first_query, call.window);
  const size_t first_key =
      static_cast<size_t>(std::max<ptrdiff_t>(0, n_hidden)) / sizes_.key_block * sizes_.key_block;
  for (size_t begin = first_key; begin < n_visible; begin += step) {
    AttentionPiece piece = rounds_.batch_piece(shape_.kv_head_of(task.set), task.chunk_idx, begin,
                                               std::min(step, task.chunk.size() - begin));
    piece.n_visible = static_cast<ptrdiff_t>(tile.first_query + 1 + n_behind) - static_cast<ptrdiff_t>(begin);
    if (call.window > 0) piece.n_hidden = n_hidden - static_cast<ptrdiff_t>(begin);
    piece.distance = static_cast<ptrdiff_t>(tile.first_query) - static_cast<ptrdiff_t>(begin);
    kernels_.attention_tile(part, piece);
    table_.merge_softmax_f32(tile.state, part, tile.scratch.factors, is_first && begin == first_key);
    if (wants_sums(call, task)) {
      add_sums(call, task, tile, part, piece, part.m, intra_sums(task.chunk_idx, task.set, task.task_idx));
    }
  }
}

void ChunkedAttention::attend_memory(const Call& call, const Task& task, const LoadedTile& tile,
                                     bool is_first) const {
  const SetWork& work = buffers_.sets[task.set];
  is_first = is_first && !has_begun(call, task.set, tile);
  for (size_t i = 0; i < work.n_pieces; ++i) {
    AttentionTile part = tile.scratch.tile;
    const bool has_sums = work.is_scored && i == 0 && work.memory.n_positions() > 0;
    if (work.is_scored && is_joint(call) && !has_sums)
      part.weights += sizes_.weight_words(sizes_.memory_keys);
    AttentionPiece piece = work.pieces[i];
    if (call.window > 0) piece.n_hidden += static_cast<ptrdiff_t>(tile.first_query);
    piece.distance += static_cast<ptrdiff_t>(task.chunk.begin + tile.first_query);
    if (piece.n_hidden >= static_cast<ptrdiff_t>(piece.n_keys)) continue;
    kernels_.attention_tile(part, piece);
    table_.merge_softmax_f32(tile.state, part, tile.scratch.factors, is_first && i == 0);
    if (!has_sums) continue;
    if (is_joint(call)) {
      std::memcpy(tile.scratch.memory_m, part.m, part.n_rows * sizeof(float));
    } else if (wants_sums(call, task)) {
      add_sums(call, task, tile, part, piece, part.m, memory_sums(task.set, task.task_idx));
    }
  }
}

}  // namespace edgeh2o
