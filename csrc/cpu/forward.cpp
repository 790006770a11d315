// Forward. A tile is tile.m queries of one head; it walks over the keys it can see in blocks of
// tile.n, which it widens once for all its queries. The queries are handled in panels, one query a
// vector lane, everything transposed:
//   S^T [keys][panel]        = K Q^T
//   P^T                      = exp(S^T - max), max and sum one a lane
//   O^T [head_dim_v][panel] += V^T P^T
// So the softmax needs no reduction across lanes, K and V enter the products as they lie in memory,
// and P^T leaves the softmax in the layout in which the second product reads it.
#include <cmath>
#include <iterator>

#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/scores.h"
#include "cpu/sequence.h"

namespace flash_ext::cpu {
namespace {

struct Tile {
  int m, n;  // queries, keys of a block
};
// 256 queries: a block of keys is widened and read from far away half as often as for 128.
constexpr Tile kTiles[] = {{256, 128}, {64, 128}, {32, 64}};

template <class A>
constexpr int kPanel = std::max(2 * kWidth<A>, kPhiloxBlock);  // queries in flight

// The tiles of the problem, for packed queries at most: their lengths are known at run time only.
int64_t tile_count(const Problem& p, Tile tile) {
  const int64_t blocks = p.packed_q ? p.total_q / tile.m + sequence_count(p)
                                    : p.batch * ((p.seqlen_q + tile.m - 1) / tile.m);
  return blocks * p.nheads;
}

// The largest that leaves each worker two tiles.
Tile choose_tile(const Problem& p) {
  if (p.tile > 0) return kTiles[p.tile - 1];
  for (const Tile tile : kTiles) {
    if (tile_count(p, tile) >= 2 * max_workers(p)) return tile;
  }
  return *std::rbegin(kTiles);
}

int worker_count(const Problem& p, Tile tile) {
  return static_cast<int>(std::clamp<int64_t>(tile_count(p, tile), 1, max_workers(p)));
}

// One worker's part of the workspace.
template <class T>
struct Scratch {
  Word<T>* q_t;      // [m / panel][head_dim / kPack][panel]
  Acc<T>* o_t;       // [m / panel][head_dim_v][panel]
  Acc<T>* row_max;   // [m], of the scores before `unit`
  Acc<T>* row_sum;   // [m]
  Word<T>* k;        // [n][k_pitch]
  Word<T>* v;        // [n / kPack][v_pitch]
  Acc<T>* s;         // [n][panel]
  Word<T>* p_words;  // [n / kPack][panel], for pairs
  Acc<T>* keep;      // [n][panel], for dropout
  int steps, v_pitch;

  Scratch(const Problem& p, Tile tile, Arena& arena)
      : steps((p.head_dim + kPack<T> - 1) / kPack<T>),
        v_pitch(static_cast<int>(round_up(p.head_dim_v, kWidth<Acc<T>>))) {
    constexpr int kLanes = kPanel<Acc<T>>;
    q_t = arena.take<Word<T>>(int64_t{tile.m} * steps);
    o_t = arena.take<Acc<T>>(int64_t{tile.m} * p.head_dim_v);
    row_max = arena.take<Acc<T>>(tile.m);
    row_sum = arena.take<Acc<T>>(tile.m);
    k = arena.take<Word<T>>(int64_t{tile.n} * steps);
    v = arena.take<Word<T>>(int64_t{tile.n} / kPack<T> * v_pitch);
    s = arena.take<Acc<T>>(tile.n * kLanes);
    p_words = arena.take<Word<T>>(kPack<T> == 1 ? 0 : tile.n / kPack<T> * kLanes);
    keep = arena.take<Acc<T>>(p.dropout_threshold ? tile.n * kLanes : 0);
  }
};

template <class T>
class ForwardWorker {
 public:
  ForwardWorker(const Problem& problem, const FwdTensors& tensors, Tile tile, Arena& arena)
      : p_(problem), tensors_(tensors), tile_(tile), scratch_(problem, tile, arena) {}

  void run(const Sequence& sequence, int head, int64_t m_block);

 private:
  using A = Acc<T>;
  static constexpr int kLanes = kPanel<A>;

  void load_queries();
  void load_keys(int64_t begin, int64_t end);
  void attend(int panel, int64_t n_begin, int64_t n_end, const Mask& mask);
  void softmax(int panel, int lanes, int keys, const A* keep);
  void write_rows();

  const Problem& p_;
  const FwdTensors& tensors_;
  const Tile tile_;
  const Scratch<T> scratch_;

  // The tile in work.
  Sequence sequence_;
  int head_;
  int64_t row_;  // first query, from the start of the sequence
  int rows_;     // queries that count
  int extent_;   // rows in memory, those past the sequence's used length included
  ScoreChange<A> change_;
  bool changes_scores_;
  A unit_ = 1;  // a score times unit is its natural logarithm
  Dropout<A> dropout_;
};

template <class T>
void ForwardWorker<T>::run(const Sequence& sequence, int head, int64_t m_block) {
  sequence_ = sequence;
  head_ = head;
  row_ = m_block * tile_.m;
  extent_ = static_cast<int>(std::min<int64_t>(tile_.m, sequence.q.length - row_));
  rows_ = static_cast<int>(std::clamp<int64_t>(sequence.q.used - row_, 0, extent_));
  if (rows_ > 0) {
    const Mask mask(p_, sequence);
    change_ = score_change<A>(p_, tensors_, sequence.batch, head, mask.offset());
    changes_scores_ = change_.softcap > 0 || change_.slope != 0;
    unit_ = changes_scores_ ? A{1} : change_.scale;
    dropout_ = dropout_of<A>(p_, tensors_, sequence.batch, head);
    load_queries();
    const Range keys = mask.visible_to_any(row_, row_ + rows_ - 1);
    for (int64_t n = keys.begin / tile_.n * tile_.n; n < keys.end; n += tile_.n) {
      const int64_t n_end = std::min(n + tile_.n, keys.end);
      load_keys(n, n_end);
      for (int panel = 0; panel * kLanes < rows_; ++panel) attend(panel, n, n_end, mask);
    }
  }
  write_rows();
}

template <class T>
void ForwardWorker<T>::load_queries() {
  const T* q = row_pointer<const T>(tensors_.q, p_.q, p_.packed_q, sequence_.batch,
                                    sequence_.q.row + row_, head_);
  for (int first = 0; first < rows_; first += kLanes) {
    const int rows = std::min(kLanes, rows_ - first);
    pack_transposed<T>({q + first * p_.q.row, p_.q.row, rows, p_.head_dim},
                       scratch_.q_t + first * scratch_.steps, kLanes, kLanes);
  }
  const int lanes = static_cast<int>(round_up(rows_, kLanes));
  std::fill_n(scratch_.o_t, int64_t{lanes} * p_.head_dim_v, A{0});
  std::fill_n(scratch_.row_max, lanes, -std::numeric_limits<A>::infinity());
  std::fill_n(scratch_.row_sum, lanes, A{0});
}

template <class T>
void ForwardWorker<T>::load_keys(int64_t begin, int64_t end) {
  const int head_k = head_ / (p_.nheads / p_.nheads_k);
  const int rows = static_cast<int>(end - begin);
  const int64_t row = sequence_.k.row + begin;
  const T* k = row_pointer<const T>(tensors_.k, p_.k, p_.packed_k, sequence_.batch, row, head_k);
  const T* v = row_pointer<const T>(tensors_.v, p_.v, p_.packed_k, sequence_.batch, row, head_k);
  pack_natural<T>({k, p_.k.row, rows, p_.head_dim}, scratch_.k, scratch_.steps, rows);
  pack_interleaved<T>({v, p_.v.row, rows, p_.head_dim_v}, scratch_.v, scratch_.v_pitch,
                      static_cast<int>(round_up(rows, kPack<T>)));
}

// One panel of queries against the keys [n_begin, n_end) that are loaded, as far as it sees them.
template <class T>
void ForwardWorker<T>::attend(int panel, int64_t n_begin, int64_t n_end, const Mask& mask) {
  const int64_t first = row_ + panel * kLanes;
  const int rows = std::min(kLanes, rows_ - panel * kLanes);
  const int lanes = static_cast<int>(round_up(rows, kWidth<A>));
  const Range any = mask.visible_to_any(first, first + rows - 1);
  const Range all = mask.visible_to_all(first, first + rows - 1);
  const int64_t end = std::min(any.end, n_end);
  if (end <= std::max(any.begin, n_begin)) return;
  // From a whole word, or a whole dropout block, on.
  const int64_t align = dropout_.threshold ? kPhiloxBlock : kPack<T>;
  const int64_t begin = std::max(any.begin, n_begin) / align * align;
  const int keys = static_cast<int>(end - begin);

  const int from = static_cast<int>(begin - n_begin);
  const Word<T>* k = scratch_.k + from * scratch_.steps;
  const Word<T>* v = scratch_.v + from / kPack<T> * scratch_.v_pitch;
  const Word<T>* q_t = scratch_.q_t + panel * kLanes * scratch_.steps;
  A* o_t = scratch_.o_t + panel * kLanes * p_.head_dim_v;

  multiply<T, Left::kNatural, Result::kReplace>(
      {{k, scratch_.steps}, {q_t, kLanes}, {scratch_.s, kLanes}, keys, lanes, scratch_.steps});
  const ScoreBlock<A> block = {scratch_.s, kLanes, lanes, first, begin, rows, keys};
  if (changes_scores_) change_scores<A>(block, change_, nullptr);
  if (begin < all.begin || end > all.end) mask_scores(block, mask, all);
  const A* keep = nullptr;
  if (dropout_.threshold) {
    draw_dropout(block, dropout_, scratch_.keep);
    keep = scratch_.keep;
  }
  softmax(panel, lanes, keys, keep);
  const Word<T>* p_t = scores_interleaved<T>({scratch_.s, kLanes, keys, lanes}, scratch_.p_words);
  const int steps = (keys + kPack<T> - 1) / kPack<T>;
  multiply<T, Left::kInterleaved, Result::kAdd>(
      {{v, scratch_.v_pitch}, {p_t, kLanes}, {o_t, kLanes}, p_.head_dim_v, lanes, steps});
}

// S^T becomes P^T, one vector of queries after the other; maxima and sums go on, and O^T is
// rescaled where a maximum rose.
template <class T>
void ForwardWorker<T>::softmax(int panel, int lanes, int keys, const A* keep) {
  const A factor = static_cast<A>(unit_ * kLog2e);
  const Vec<A> none = splat<A>(-std::numeric_limits<A>::infinity());
  for (int lane = 0; lane < lanes; lane += kWidth<A>) {
    A* s = scratch_.s + lane;
    A* row_max = scratch_.row_max + panel * kLanes + lane;
    A* row_sum = scratch_.row_sum + panel * kLanes + lane;
    A* o_t = scratch_.o_t + panel * kLanes * p_.head_dim_v + lane;

    const Vec<A> before = load<A>(row_max);
    Vec<A> max = before;
    Vec<A> other = before;  // two chains, as a maximum waits for the one before it
    for (int key = 0; key + 1 < keys; key += 2) {
      max = maximum<A>(load<A>(s + key * kLanes), max);
      other = maximum<A>(load<A>(s + (key + 1) * kLanes), other);
    }
    max = maximum<A>(load<A>(s + (keys - 1) * kLanes), maximum<A>(max, other));
    store<A>(row_max, max);
    max = max == none ? Vec<A>{} : max;  // nothing seen yet: -inf - 0, not -inf - -inf
    const Vec<A> rescale = exp2<A>(before - max, factor);
    if (any_differs<A>(rescale, 1)) {
      for (int i = 0; i < p_.head_dim_v; ++i) {
        store<A>(o_t + i * kLanes, load<A>(o_t + i * kLanes) * rescale);
      }
    }
    Vec<A> sum{};
    for (int key = 0; key < keys; ++key) {
      const Vec<A> p = exp2<A>(load<A>(s + key * kLanes) - max, factor);
      sum += p;
      store<A>(s + key * kLanes, keep ? p * load<A>(keep + key * kLanes + lane) : p);
    }
    store<A>(row_sum, load<A>(row_sum) * rescale + sum);
  }
}

// O = O^T / sum and lse; rows past the used length get 0 and -inf.
template <class T>
void ForwardWorker<T>::write_rows() {
  const double infinity = std::numeric_limits<double>::infinity();
  const double sink =
      p_.has_sinks ? static_cast<double>(static_cast<const A*>(tensors_.sinks)[head_]) : -infinity;
  T* out = row_pointer<T>(tensors_.out, p_.out, p_.packed_q, sequence_.batch,
                          sequence_.q.row + row_, head_);
  A* lse = static_cast<A*>(tensors_.lse) + lse_index(p_, sequence_, head_) + row_;
  for (int row = 0; row < extent_; ++row, out += p_.out.row) {
    double max = -infinity, sum = 0;
    if (row < rows_) {
      max = static_cast<double>(scratch_.row_max[row]) * unit_;
      sum = scratch_.row_sum[row];
    }
    // The sink is one more term of the sum, without a value.
    const double top = row < rows_ ? std::max(max, sink) : -infinity;
    const double weight = max == -infinity ? 0 : std::exp(max - top);
    const double total = sum * weight + (top == -infinity ? 0 : std::exp(sink - top));
    lse[row] = static_cast<A>(top == -infinity ? top : top + std::log(total));
    const A scale = weight == 0 ? A{0} : static_cast<A>(weight / total);
    const A* o_t = scratch_.o_t + row / kLanes * kLanes * p_.head_dim_v + row % kLanes;
    write_lane(o_t, kLanes, scale, out, p_.head_dim_v);
  }
}

template <class T>
uint64_t scratch_bytes(const Problem& p, Tile tile) {
  Arena counter(nullptr);
  Scratch<T>(p, tile, counter);
  return counter.used();
}

template <class T>
void run_forward(const Problem& p, const FwdTensors& tensors, const Call& call) {
  const Tile tile = choose_tile(p);
  const uint64_t bytes = scratch_bytes<T>(p, tile);
  const auto m_blocks = [tile](const Sequence& s) { return (s.q.length + tile.m - 1) / tile.m; };
  const auto tiles = [&](const Sequence& s) { return m_blocks(s) * p.nheads; };
  std::atomic<int64_t> next{0};
  run_workers(call, worker_count(p, tile), [&](int worker) {
    Arena arena(static_cast<char*>(call.workspace) + worker * bytes);
    ForwardWorker<T> tile_worker(p, tensors, tile, arena);
    TileQueue queue(p, tensors, &next, tiles);
    Sequence sequence;
    // Block by block of one head, so that its keys stay in the cache; the last block first, which
    // is the longest under a causal mask.
    for (int64_t index; queue.take(&sequence, &index);) {
      const int64_t blocks = m_blocks(sequence);
      tile_worker.run(sequence, static_cast<int>(index / blocks), blocks - 1 - index % blocks);
    }
  });
}

}  // namespace

Status plan_forward(const Problem& p, Plan* plan) {
  if (p.tile < 0 || p.tile > static_cast<int>(std::size(kTiles))) return no_such_tile(p);
  const Tile tile = choose_tile(p);
  const int workers = worker_count(p, tile);
  return with_element_type(p, [&](auto element) {
    plan->workspace_bytes = workers * scratch_bytes<decltype(element)>(p, tile);
    plan->tile_m = tile.m;
    plan->tile_n = tile.n;
    plan->grid = tile_count(p, tile);
    plan->stages = 1;
    plan->launches = 1;
    const bool enough = plan->grid >= 2 * max_workers(p);
    std::snprintf(plan->why, sizeof(plan->why),
                  enough ? "the largest tile that leaves two to each of %d threads"
                         : "the smallest tile: few queries for %d threads",
                  max_workers(p));
    return ok_status();
  });
}

Status forward(const Problem& p, const FwdTensors& tensors, const Call& call) {
  return with_element_type(p, [&](auto element) {
    run_forward<decltype(element)>(p, tensors, call);
    return ok_status();
  });
}

}  // namespace flash_ext::cpu
