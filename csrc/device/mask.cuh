// The mask on an accumulator tile, and the work of one tile of queries.
#pragma once

#include <cmath>

#include "device/lanes.cuh"
#include "device/tile_scheduler.cuh"
#include "device/visible.cuh"

namespace flash_ext::device {

// Scores of keys that a query does not see become -inf. row: the query of this lane's first row
// (the other is row + 8); n_begin: the key of the tile's first column. Bit by bit: a register of
// bits fills seven predicates at once, where two comparisons an element took most of a masked
// block's time. Of S^T, rows are keys and visible says which queries see a key.
template <typename Lanes = MmaLanes, int kCount, typename Range>
__device__ __forceinline__ void apply_mask(float (&s)[kCount], const Range& visible, int row,
                                           int n_begin) {
  constexpr int kWordCount = 64;  // registers of both rows whose columns fill a word: 128 columns
  const int column = n_begin + 2 * Lanes::column_pair(threadIdx.x % 32);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = visible.begin(row + 8 * half) - column,
              end = visible.end(row + 8 * half) - column;
#pragma unroll
    for (int word = 0; word < kCount; word += kWordCount) {
      const uint32_t seen = columns_below(end - 2 * word) & ~columns_below(begin - 2 * word);
#pragma unroll
      for (int i = word + 2 * half; i < kCount && i < word + kWordCount; i += 4) {
        const int bit = (i - word) / 4 * 2;
        if (!(seen >> bit & 1)) s[i] = -INFINITY;
        if (!(seen >> bit & 2)) s[i + 1] = -INFINITY;
      }
    }
  }
}

// Which queries of which sequence and head a tile is, and which keys they see.
struct Work {
  int sequence;  // -1: rows outside every sequence, which are only zeroed
  int head, m_block;
  int64_t q_row;  // the sequence's first row: 0 when padded
  int64_t k_row;
  int batch_q;          // coordinate in padded q: 0 when packed
  int rows, used_rows;  // queries to write, and those that are not 0 by rule
  int64_t lse_offset;   // of the sequence's first row
  Visible visible;
  BlockRange range;
};

// Fills in work, which lies in shared memory: the one thread that does it has few registers.
// Params: FwdParams of a generation.
template <int kBlockM, int kBlockN, typename Params>
__device__ __forceinline__ void find_work(const Params& params, uint32_t tile, Work& work) {
  int lane, slot;
  params.scheduler.decode(tile, &lane, &slot);
  int sequence, rows;
  if (params.rows_q.cu_seqlens) {
    const int s = params.rows_q.template sequence_of<kBlockM>(slot);
    const int64_t first = params.rows_q.start(s);
    sequence = s == 0 || s == params.batch + 1 ? -1 : s - 1;
    rows = static_cast<int>(params.rows_q.start(s + 1) - first);
    slot -= static_cast<int>(params.rows_q.template first_slot<kBlockM>(s));
    work.head = lane;
    work.batch_q = 0;
    work.q_row = first;
    work.lse_offset = lane * params.rows_q.total + first;
  } else {
    sequence = lane / params.nheads;
    rows = params.seqlen_q;
    work.head = lane % params.nheads;
    work.batch_q = sequence;
    work.q_row = 0;
    work.lse_offset = int64_t{lane} * params.seqlen_q;
  }
  work.sequence = sequence;
  work.m_block = slot;
  work.rows = rows;
  work.range = {};
  work.visible = {};
  work.used_rows = 0;
  work.k_row = 0;
  if (sequence < 0) return;
  int seqlen_k = params.seqlen_k;
  if (params.cu_seqlens_k) {
    const int first = params.cu_seqlens_k[sequence];
    work.k_row = first;
    seqlen_k = params.cu_seqlens_k[sequence + 1] - first;
  }
  if (params.seqused_q) rows = min(params.seqused_q[sequence], rows);
  if (params.seqused_k) seqlen_k = min(params.seqused_k[sequence], seqlen_k);
  work.used_rows = rows;
  const Visible visible{seqlen_k, params.top_left ? 0 : seqlen_k - rows, params.window_left,
                        params.window_right};
  work.visible = visible;
  const int m_begin = slot * kBlockM, m_end = min(m_begin + kBlockM, rows);
  if (m_begin < m_end) work.range = block_range<kBlockN>(visible, m_begin, m_end);
}

}  // namespace flash_ext::device
