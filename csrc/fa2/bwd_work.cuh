// What one tile of the backward's main kernel is, the walk over its blocks of queries, and loads.
#pragma once

#include "device/row_tile.cuh"
#include "fa2/bwd_tile.cuh"

namespace flash_ext::fa2 {

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

// Q, dO, lse and delta of a block of queries to a stage, and one committed group, also when there
// is no such block.
template <typename Traits>
__device__ __forceinline__ void load_queries(uint32_t stage, const BwdParams& params,
                                             const BwdWork& work, Cursor at) {
  using Element = typename Traits::Element;
  if (at.head < params.heads_per_kv) {
    const int head = work.keys.head * params.heads_per_kv + at.head;
    const int first = at.m * Traits::kBlockM;
    load_matrix<Traits, Traits::kBlockM>(
        stage, head_rows<const Element*>(params.q, params.q_stride, work.batch_q, work.q_row, head),
        params.q_stride.row, first, work.used_q, params.head_dim);
    load_matrix<Traits, Traits::kBlockM>(
        stage + Traits::kQBytes,
        head_rows<const Element*>(params.dout, params.dout_stride, work.batch_q, work.q_row, head),
        params.dout_stride.row, first, work.used_q, params.head_dim_v);
    const int64_t values =
        (work.first_tile + int64_t{at.head} * params.query_tiles.m_slots + at.m) * Traits::kBlockM;
    load_values<Traits::kBlockM>(stage + 2 * Traits::kQBytes, params.lse_log2 + values);
    load_values<Traits::kBlockM>(stage + 2 * Traits::kQBytes + Traits::kRowValueBytes,
                                 params.delta + values);
  }
  cp_async_commit();
}

template <typename Traits>
__device__ __forceinline__ void load_keys(uint32_t smem, const BwdParams& params,
                                          const BwdWork& work) {
  using Element = typename Traits::Element;
  const RowTile& keys = work.keys;
  const int first = keys.block * Traits::kBlockN;
  load_matrix<Traits, Traits::kBlockN>(
      smem,
      head_rows<const Element*>(params.k, params.k_stride, keys.batch, keys.first_row, keys.head),
      params.k_stride.row, first, keys.used, params.head_dim);
  load_matrix<Traits, Traits::kBlockN>(
      smem + Traits::kV,
      head_rows<const Element*>(params.v, params.v_stride, keys.batch, keys.first_row, keys.head),
      params.v_stride.row, first, keys.used, params.head_dim_v);
}

}  // namespace flash_ext::fa2
