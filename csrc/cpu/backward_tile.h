// Backward, five products a block pair, P recomputed from lse. A tile is tile.m queries of one head
// and walks over the keys it can see in blocks of tile.n; queries are vector lanes as in the
// forward:
//   S^T [keys][m]  = K Q^T          P^T  = exp(S^T - lse)
//   dP^T [keys][m] = V dO^T         dS^T = P^T (dP^T - delta)
//   dV [keys][head_dim_v] += P^T dO
//   dK [keys][head_dim]   += dS^T Q
//   dQ^T [head_dim][m]    += K^T dS^T
// dQ of a tile is finished when its walk ends. dK and dV grow in the workspace: one worker runs all
// queries of a head of K in order, so nothing is shared and the sums always have the same order.
// Where such heads are too few to keep the threads busy, their tiles are dealt into chunks with
// sums of their own, which a second loop adds up in order.
#pragma once

#include <cmath>

#include "cpu/backward_cut.h"
#include "cpu/gemm.h"
#include "cpu/scores.h"

namespace flash_ext::cpu {

template <class A>
constexpr int kLaneStep = std::max(kWidth<A>, kPhiloxBlock);  // lanes come in multiples of this

// One worker's blocks.
template <class T>
struct BackwardScratch {
  Word<T>* q_t;       // [head_dim / kPack][pitch]
  Word<T>* do_t;      // [head_dim_v / kPack][pitch]
  Word<T>* q;         // [m / kPack][dk_pitch]
  Word<T>* d_out;     // [m / kPack][dv_pitch]
  Acc<T>* lse;        // [m]
  Acc<T>* delta;      // [m]
  Acc<T>* dq_t;       // [head_dim][pitch]
  Word<T>* k;         // [n][k_pitch], natural
  Word<T>* v;         // [n][v_pitch], natural
  Word<T>* k_pairs;   // [n / kPack][dk_pitch], interleaved
  Acc<T>* s;          // [n][pitch], then P^T
  Acc<T>* dp;         // [n][pitch], then dS^T
  Word<T>* words[3];  // P^T and dS^T natural, dS^T interleaved; for pairs
  Acc<T>* keep;       // [n][pitch], for dropout
  Acc<T>* slope;      // [n][pitch], derivative of softcap
  int pitch;  // from key to key: one vector more than m, so that keys do not share cache sets
  int k_pitch, v_pitch;

  BackwardScratch(const Problem& p, const Cut<T>& cut, Arena& arena) {
    constexpr bool kPairs = kPack<T> == 2;
    const int64_t m = cut.tile.m, n = cut.tile.n;
    pitch = cut.tile.m + kLaneStep<Acc<T>>;
    k_pitch = kPairs ? (p.head_dim + 1) / 2 : cut.dk_pitch;
    v_pitch = kPairs ? (p.head_dim_v + 1) / 2 : cut.dv_pitch;
    q_t = arena.take<Word<T>>(int64_t{k_pitch} * pitch);
    do_t = arena.take<Word<T>>(int64_t{v_pitch} * pitch);
    q = arena.take<Word<T>>(m / kPack<T> * cut.dk_pitch);
    d_out = arena.take<Word<T>>(m / kPack<T> * cut.dv_pitch);
    lse = arena.take<Acc<T>>(m);
    delta = arena.take<Acc<T>>(m);
    dq_t = arena.take<Acc<T>>(int64_t{p.head_dim} * pitch);
    k = arena.take<Word<T>>(n * k_pitch);
    v = arena.take<Word<T>>(n * v_pitch);
    k_pairs = kPairs ? arena.take<Word<T>>(n / 2 * cut.dk_pitch) : k;
    s = arena.take<Acc<T>>(n * pitch);
    dp = arena.take<Acc<T>>(n * pitch);
    for (Word<T>*& piece : words) piece = arena.take<Word<T>>(kPairs ? n * pitch / 2 : 0);
    keep = arena.take<Acc<T>>(p.dropout_threshold ? n * pitch : 0);
    slope = arena.take<Acc<T>>(p.softcap > 0 ? n * pitch : 0);
  }
};

// Keys [begin, begin + keys) against the lanes [lane, lane + lanes) of a tile, which see some of
// them.
struct BackwardBlock {
  int64_t begin;
  int keys, lane, lanes;
};

template <class T>
class BackwardWorker {
 public:
  BackwardWorker(const Problem& problem, const BwdTensors& tensors, const Cut<T>& cut, Arena& arena)
      : p_(problem), t_(tensors), cut_(cut), scratch_(problem, cut, arena) {}

  // Adds the tiles of one chunk of a head of K to the sums at dk and dv, which start at the
  // sequence's first key.
  void run(const Sequence& sequence, int head_k, int chunk, Acc<T>* dk, Acc<T>* dv, double* d_sink);

 private:
  using A = Acc<T>;

  void run_tile(int head, int64_t m_block, A* dk, A* dv, double* d_sink);
  double load_queries();
  BackwardBlock block_at(const Mask& mask, int64_t n_block) const;
  void load_keys(const BackwardBlock& block);
  void recompute(const BackwardBlock& block, const Mask& mask);
  void differentiate(const BackwardBlock& block);
  void accumulate(const BackwardBlock& block, A* dk, A* dv);
  void write_dq(int extent);

  const Problem& p_;
  const BwdTensors& t_;
  const Cut<T>& cut_;
  const BackwardScratch<T> scratch_;

  // The tile in work.
  Sequence sequence_;
  int head_;
  int64_t row_;  // first query, from the start of the sequence
  int rows_;     // queries that count
  int lanes_;    // rows_ in whole vectors
  ScoreChange<A> change_;
  bool changes_scores_;
  Dropout<A> dropout_;
};

template <class T>
void BackwardWorker<T>::run(const Sequence& sequence, int head_k, int chunk, A* dk, A* dv,
                            double* d_sink) {
  sequence_ = sequence;
  std::fill_n(dk, sequence.k.used * cut_.dk_pitch, A{0});
  std::fill_n(dv, sequence.k.used * cut_.dv_pitch, A{0});
  const int group = p_.nheads / p_.nheads_k;
  if (p_.has_sinks) std::fill_n(d_sink, group, 0.0);
  const int64_t m_blocks = cut_.m_blocks(sequence);
  for (int64_t i = chunk; i < group * m_blocks; i += cut_.chunks) {
    const int member = static_cast<int>(i / m_blocks);
    run_tile(head_k * group + member, i % m_blocks, dk, dv, d_sink + (p_.has_sinks ? member : 0));
  }
}

template <class T>
void BackwardWorker<T>::run_tile(int head, int64_t m_block, A* dk, A* dv, double* d_sink) {
  head_ = head;
  row_ = m_block * cut_.tile.m;
  const int extent = static_cast<int>(std::min<int64_t>(cut_.tile.m, sequence_.q.length - row_));
  rows_ = static_cast<int>(std::clamp<int64_t>(sequence_.q.used - row_, 0, extent));
  lanes_ = static_cast<int>(round_up(rows_, kLaneStep<A>));
  if (rows_ > 0) {
    const Mask mask(p_, sequence_);
    change_ = score_change<A>(p_, t_, sequence_.batch, head, mask.offset());
    changes_scores_ = change_.softcap > 0 || change_.slope != 0;
    dropout_ = dropout_of<A>(p_, t_, sequence_.batch, head);
    const double d_sink_of_tile = load_queries();
    if (p_.has_sinks) *d_sink += d_sink_of_tile;
    const Range any = mask.visible_to_any(row_, row_ + rows_ - 1);
    const int n = cut_.tile.n;
    for (int64_t n_block = any.begin / n; n_block * n < any.end; ++n_block) {
      const BackwardBlock block = block_at(mask, n_block);
      load_keys(block);
      recompute(block, mask);
      differentiate(block);
      accumulate(block, dk + block.begin * cut_.dk_pitch, dv + block.begin * cut_.dv_pitch);
    }
  }
  write_dq(extent);
}

// The part of a key block that the tile sees, and the lanes that see some of it.
template <class T>
BackwardBlock BackwardWorker<T>::block_at(const Mask& mask, int64_t n_block) const {
  const int64_t align = dropout_.threshold ? kPhiloxBlock : 1;
  const Range any = mask.visible_to_any(row_, row_ + rows_ - 1);
  const int64_t begin = std::max(n_block * cut_.tile.n, any.begin / align * align);
  const int64_t end = std::min((n_block + 1) * cut_.tile.n, any.end);
  const Range seen_by = mask.queries_of(begin, end - 1);
  const int64_t first = std::clamp<int64_t>(seen_by.begin - row_, 0, rows_ - 1);
  const int64_t last = std::clamp<int64_t>(seen_by.end - row_, first + 1, rows_);
  const int lane = static_cast<int>(first / kLaneStep<A> * kLaneStep<A>);
  return {begin, static_cast<int>(end - begin), lane,
          static_cast<int>(round_up(last - lane, kLaneStep<A>))};
}

// Q and dO in both layouts, lse, delta, and a cleared dQ. Returns the tile's part of -d_sink.
template <class T>
double BackwardWorker<T>::load_queries() {
  const auto rows_at = [&](const void* data, const Strides& strides) {
    return row_pointer<const T>(data, strides, p_.packed_q, sequence_.batch, sequence_.q.row + row_,
                                head_);
  };
  const Source<T> q = {rows_at(t_.q, p_.q), p_.q.row, rows_, p_.head_dim};
  const Source<T> d_out = {rows_at(t_.dout, p_.dout), p_.dout.row, rows_, p_.head_dim_v};
  pack_transposed(q, scratch_.q_t, lanes_, scratch_.pitch);
  pack_transposed(d_out, scratch_.do_t, lanes_, scratch_.pitch);
  pack_interleaved(q, scratch_.q, cut_.dk_pitch, lanes_);
  pack_interleaved(d_out, scratch_.d_out, cut_.dv_pitch, lanes_);
  std::fill_n(scratch_.dq_t, int64_t{p_.head_dim} * scratch_.pitch, A{0});

  const double infinity = std::numeric_limits<double>::infinity();
  const T* out = rows_at(t_.out, p_.out);
  const int64_t lse_row = lse_index(p_, sequence_, head_) + row_;
  const A* lse = static_cast<const A*>(t_.lse) + lse_row;
  const A* d_lse = t_.d_lse ? static_cast<const A*>(t_.d_lse) + lse_row : nullptr;
  const double sink =
      p_.has_sinks ? static_cast<double>(static_cast<const A*>(t_.sinks)[head_]) : -infinity;
  double d_sink = 0;
  for (int row = 0; row < lanes_; ++row) {
    A delta = 0;
    const bool counts = row < rows_ && lse[row] != -infinity;  // else P = 0 and delta is never used
    if (counts) {
      delta = dot(out + row * p_.out.row, d_out.data + row * d_out.stride, p_.head_dim_v);
      if (d_lse) delta -= d_lse[row];
      d_sink += std::exp(sink - lse[row]) * delta;
    }
    scratch_.lse[row] = counts ? lse[row] : static_cast<A>(infinity);
    scratch_.delta[row] = delta;
  }
  return d_sink;
}

template <class T>
void BackwardWorker<T>::load_keys(const BackwardBlock& block) {
  const int head_k = head_ / (p_.nheads / p_.nheads_k);
  const auto rows_at = [&](const void* data, const Strides& strides) {
    return row_pointer<const T>(data, strides, p_.packed_k, sequence_.batch,
                                sequence_.k.row + block.begin, head_k);
  };
  const Source<T> k = {rows_at(t_.k, p_.k), p_.k.row, block.keys, p_.head_dim};
  const Source<T> v = {rows_at(t_.v, p_.v), p_.v.row, block.keys, p_.head_dim_v};
  pack_natural(k, scratch_.k, scratch_.k_pitch, block.keys);
  pack_natural(v, scratch_.v, scratch_.v_pitch, block.keys);
  if (kPack<T> == 2) {
    pack_interleaved(k, scratch_.k_pairs, cut_.dk_pitch, static_cast<int>(round_up(block.keys, 2)));
  }
}

// S^T, changed and masked, and dP^T.
template <class T>
void BackwardWorker<T>::recompute(const BackwardBlock& block, const Mask& mask) {
  const BackwardScratch<T>& x = scratch_;
  const auto [begin, keys, lane, lanes] = block;
  const int k_steps = (p_.head_dim + kPack<T> - 1) / kPack<T>;
  const int v_steps = (p_.head_dim_v + kPack<T> - 1) / kPack<T>;
  const Matrix<A> s = {x.s + lane, x.pitch}, dp = {x.dp + lane, x.pitch};
  multiply<T, Left::kNatural, Result::kReplace>(
      {{x.k, x.k_pitch}, {x.q_t + lane, x.pitch}, s, keys, lanes, k_steps});
  multiply<T, Left::kNatural, Result::kReplace>(
      {{x.v, x.v_pitch}, {x.do_t + lane, x.pitch}, dp, keys, lanes, v_steps});
  const int rows = std::min(lanes, rows_ - lane);
  const ScoreBlock<A> scores = {s.data, x.pitch, lanes, row_ + lane, begin, rows, keys};
  const Range all = mask.visible_to_all(row_ + lane, row_ + lane + rows - 1);
  if (changes_scores_) change_scores(scores, change_, p_.softcap > 0 ? x.slope + lane : nullptr);
  if (begin < all.begin || begin + keys > all.end) mask_scores(scores, mask, all);
  if (dropout_.threshold) draw_dropout(scores, dropout_, x.keep + lane);
}

// S^T becomes P^T as the values met it, after dropout; dP^T becomes dS^T.
template <class T>
void BackwardWorker<T>::differentiate(const BackwardBlock& block) {
  const A unit = changes_scores_ ? A{1} : change_.scale;
  const A* keep = dropout_.threshold ? scratch_.keep : nullptr;
  const A* slope = p_.softcap > 0 ? scratch_.slope : nullptr;
  for (int key = 0; key < block.keys; ++key) {
    for (int lane = block.lane; lane < block.lane + block.lanes; lane += kWidth<A>) {
      const int at = key * scratch_.pitch + lane;
      const Vec<A> x = load<A>(scratch_.s + at) * unit - load<A>(scratch_.lse + lane);
      const Vec<A> p = exp2<A>(x, static_cast<A>(kLog2e));
      Vec<A> dp = load<A>(scratch_.dp + at);
      if (keep) dp *= load<A>(keep + at);
      Vec<A> ds = p * (dp - load<A>(scratch_.delta + lane));
      if (slope) ds *= load<A>(slope + at);
      store<A>(scratch_.s + at, keep ? p * load<A>(keep + at) : p);
      store<A>(scratch_.dp + at, ds);
    }
  }
}

// The three products behind the softmax; dk and dv point at the block's first key.
template <class T>
void BackwardWorker<T>::accumulate(const BackwardBlock& block, A* dk, A* dv) {
  const BackwardScratch<T>& x = scratch_;
  const auto [begin, keys, lane, lanes] = block;
  const int m_steps = lanes / kPack<T>, n_steps = (keys + kPack<T> - 1) / kPack<T>;
  const int64_t dk_pitch = cut_.dk_pitch, dv_pitch = cut_.dv_pitch;
  const Scores<A> p = {x.s + lane, x.pitch, keys, lanes}, ds = {x.dp + lane, x.pitch, keys, lanes};
  const Matrix<const Word<T>> p_t = {scores_natural<T>(p, x.words[0]), x.pitch / kPack<T>};
  const Matrix<const Word<T>> ds_t = {scores_natural<T>(ds, x.words[1]), x.pitch / kPack<T>};
  const Matrix<const Word<T>> ds_pairs = {scores_interleaved<T>(ds, x.words[2]), x.pitch};
  const Matrix<const Word<T>> d_out = {x.d_out + lane / kPack<T> * dv_pitch, dv_pitch};
  const Matrix<const Word<T>> q = {x.q + lane / kPack<T> * dk_pitch, dk_pitch};
  multiply<T, Left::kNatural, Result::kAdd>(
      {p_t, d_out, {dv, dv_pitch}, keys, cut_.dv_pitch, m_steps});
  multiply<T, Left::kNatural, Result::kAdd>(
      {ds_t, q, {dk, dk_pitch}, keys, cut_.dk_pitch, m_steps});
  multiply<T, Left::kInterleaved, Result::kAdd>(
      {{x.k_pairs, dk_pitch}, ds_pairs, {x.dq_t + lane, x.pitch}, p_.head_dim, lanes, n_steps});
}

template <class T>
void BackwardWorker<T>::write_dq(int extent) {
  T* dq = row_pointer<T>(t_.dq, p_.dq, p_.packed_q, sequence_.batch, sequence_.q.row + row_, head_);
  for (int row = 0; row < extent; ++row, dq += p_.dq.row) {
    const A scale = row < rows_ ? static_cast<A>(p_.softmax_scale) : A{0};
    write_lane(scratch_.dq_t + row, scratch_.pitch, scale, dq, p_.head_dim);
  }
}

}  // namespace flash_ext::cpu
