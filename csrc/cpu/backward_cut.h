// How the backward is cut into work for threads, and where the sums of dK and dV lie.
#pragma once

#include "cpu/operand.h"
#include "cpu/sequence.h"

namespace flash_ext::cpu {

struct BackwardTile {
  int m, n;  // queries, keys of a block
};
constexpr BackwardTile kBackwardTiles[] = {{128, 64}, {32, 64}};

// How the work is cut.
template <class T>
struct Cut {
  BackwardTile tile;
  int workers;
  int chunks;              // of a head of K
  int64_t sums;            // sets of dK and dV sums in the workspace
  int64_t sum_rows;        // rows of a set
  bool sums_of_workers;    // a set for each worker, else for each chunk
  int dk_pitch, dv_pitch;  // of a row, whole vectors
  int64_t items;           // (sequence, head of K, chunk)

  explicit Cut(const Problem& p) {
    const bool few_rows = !p.packed_q && p.seqlen_q <= kBackwardTiles[1].m;
    tile = kBackwardTiles[p.tile > 0 ? p.tile - 1 : few_rows];
    const int64_t heads = p.batch * int64_t{p.nheads_k};
    chunks = choose_chunks(p, heads);
    items = int64_t{sequence_count(p)} * p.nheads_k * chunks;
    workers = static_cast<int>(std::clamp<int64_t>(items, 1, max_workers(p)));
    // Packed sequences never overlap, so all of them share one set of rows.
    const int64_t sets = p.packed_k ? p.nheads_k : heads;
    sums_of_workers = chunks == 1 && workers < sets;
    sums = sums_of_workers ? workers : sets * chunks;
    sum_rows = p.packed_k ? p.total_k : p.seqlen_k;
    dk_pitch = static_cast<int>(round_up(p.head_dim, kWidth<Acc<T>>));
    dv_pitch = static_cast<int>(round_up(p.head_dim_v, kWidth<Acc<T>>));
  }

  // Row of the workspace where the sums of a head of K begin: at the sequence's first key.
  int64_t first_sum_row(const Problem& p, const Sequence& s, int head_k, int chunk,
                        int worker) const {
    if (s.k.length == 0) return 0;
    const int64_t head = p.packed_k ? head_k : int64_t{s.batch} * p.nheads_k + head_k;
    const int64_t set = sums_of_workers ? worker : head * chunks + chunk;
    return set * sum_rows + (p.packed_k ? s.k.row : 0);
  }

  int64_t m_blocks(const Sequence& s) const { return (s.q.length + tile.m - 1) / tile.m; }

 private:
  // The fewest that keep nine tenths of the threads busy. Each costs another set of sums.
  static int choose_chunks(const Problem& p, int64_t heads) {
    if (heads == 0) return 1;
    const int64_t threads = max_workers(p);
    const int64_t rows = p.packed_q ? p.total_q / p.batch : p.seqlen_q;
    const int64_t tiles = rows / kBackwardTiles[0].m * (p.nheads / p.nheads_k);
    const auto busy = [&](int64_t chunks) {
      const int64_t rounds = (heads * chunks + threads - 1) / threads;
      return static_cast<double>(heads * chunks) / static_cast<double>(rounds * threads);
    };
    int best = 1;
    for (int c = 2; c <= tiles && heads * c <= 4 * threads && busy(best) < 0.9; ++c) {
      if (busy(c) > busy(best)) best = c;
    }
    return best;
  }
};

// Sums of dK and dV, one set a worker or one a chunk, and the chunks' parts of d_sink.
template <class T>
struct Sums {
  Acc<T>* dk;
  Acc<T>* dv;
  double* d_sink;  // [items][group]
  int group;       // heads of Q that share a head of K

  Sums(const Problem& p, const Cut<T>& cut, Arena& arena) {
    dk = arena.take<Acc<T>>(cut.sums * cut.sum_rows * cut.dk_pitch);
    dv = arena.take<Acc<T>>(cut.sums * cut.sum_rows * cut.dv_pitch);
    group = p.nheads_k ? p.nheads / p.nheads_k : 0;
    d_sink = arena.take<double>(p.has_sinks ? cut.items * group : 0);
  }
};

}  // namespace flash_ext::cpu
