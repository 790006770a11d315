// What one tile of the backward's main kernel is, and the walk over its blocks of queries.
#pragma once

#include "device/mma_bwd_tile.cuh"
#include "device/row_tile.cuh"

namespace flash_ext::device {

// One block of keys of one key head, and the queries that see it.
struct BwdWork {
  RowTile keys;
  int batch_q;         // coordinate in padded tensors: 0 when packed
  int64_t q_row;       // the sequence's first query: 0 when padded
  int used_q;          // queries that count
  int m_min, m_max;    // blocks of queries that see a key of this block
  int64_t first_tile;  // of queries: block 0 of the group's first head
  Visible visible;
};

template <typename Traits>
__device__ __forceinline__ void find_bwd_work(const BwdParams& params, int64_t tile,
                                              BwdWork& work) {
  work.keys = find_row_tile<Traits::kBlockN>(params.key_rows, params.key_tiles, tile);
  work.m_min = work.m_max = 0;
  const int sequence = work.keys.sequence;
  const int n_begin = work.keys.block * Traits::kBlockN,
            n_end = min(n_begin + Traits::kBlockN, work.keys.used);
  if (sequence < 0 || n_begin >= n_end) return;
  work.batch_q = params.query_rows.packed.cu_seqlens ? 0 : sequence;
  work.q_row = first_row_of(params.query_rows, sequence);
  work.used_q = used_of(params.query_rows, sequence);
  work.first_tile = first_slot_of<Traits::kBlockM>(params.query_rows, params.query_tiles, sequence,
                                                   work.keys.head * params.heads_per_kv);
  const int offset = params.top_left ? 0 : work.keys.used - work.used_q;
  work.visible = {work.keys.used, offset, params.window_left, params.window_right};
  // Query i sees keys i + offset - left to i + offset + right.
  const int i_begin = params.window_right < 0 ? 0 : max(n_begin - offset - params.window_right, 0);
  const int i_end =
      params.window_left < 0 ? work.used_q : min(n_end - offset + params.window_left, work.used_q);
  if (i_begin >= i_end) return;
  work.m_min = i_begin / Traits::kBlockM;
  work.m_max = (i_end + Traits::kBlockM - 1) / Traits::kBlockM;
}

// The first row of a sequence, of one head.
template <typename Pointer, typename Void>
__device__ __forceinline__ Pointer head_rows(Void* tensor, const Strides& stride, int batch,
                                             int64_t row, int head) {
  return static_cast<Pointer>(tensor) + batch * stride.batch + row * stride.row +
         head * stride.head;
}

// ---- the walk ----------------------------------------------------------------------------------

// Where a walk over the blocks of queries is: heads one after the other, in each the last block
// first.
struct Cursor {
  int head, m;

  __device__ __forceinline__ void next(const BwdWork& work) {
    if (--m < work.m_min) m = work.m_max - 1, ++head;
  }
};

}  // namespace flash_ext::device
