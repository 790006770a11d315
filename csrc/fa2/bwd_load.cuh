// How the backward's operands get to shared memory: cp.async, a group for each block of queries.
#pragma once

#include "device/mma_bwd_work.cuh"

namespace flash_ext::fa2 {

using namespace device;

// Rows [first_row, first_row + kRows) of a matrix; rows at or past row_end and chunks past dim
// arrive as zeros and are not read.
template <typename Traits, int kRows>
__device__ __forceinline__ void load_matrix(uint32_t smem, const typename Traits::Element* base,
                                            int64_t row_stride, int first_row, int row_end,
                                            int dim) {
  using Rows = typename Traits::Rows;
  constexpr int kPass = Traits::kThreads / Rows::kGroup;  // rows of one pass
  static_assert(kPass % 8 == 0, "the permutation of a thread is the same in every pass");
  const int row = threadIdx.x / Rows::kGroup, chunk = threadIdx.x % Rows::kGroup;
  if (kRows < kPass && row >= kRows) return;
  const auto* source = base + (first_row + row) * row_stride + chunk * 8;
  smem += Rows::offset(row, chunk);
#pragma unroll
  for (int r = 0; r < kRows; r += kPass) {
    const bool row_used = first_row + row + r < row_end;
#pragma unroll
    for (int c = 0; c < Rows::kChunks; c += Rows::kGroup) {
      cp_async_16(Rows::right(smem, c) + Rows::down(r), source + c * 8,
                  row_used && (chunk + c) * 8 < dim);
    }
    source += kPass * row_stride;
  }
}

// kCount values of a tile of queries: lse or delta.
template <int kCount>
__device__ __forceinline__ void load_values(uint32_t smem, const float* source) {
  if (threadIdx.x < kCount / 4)
    cp_async_16(smem + threadIdx.x * 16, source + threadIdx.x * 4, true);
}

template <typename Traits>
struct AsyncLoads {
  using Element = typename Traits::Element;

  static __device__ __forceinline__ void keys(uint32_t smem, const BwdParams& params,
                                              const BwdWork& work) {
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

  // Q, dO, lse and delta of a block of queries to a stage, and one committed group, also when
  // there is no such block.
  static __device__ __forceinline__ void queries(uint32_t stage, const BwdParams& params,
                                                 const BwdWork& work, Cursor at) {
    if (at.head < params.heads_per_kv) {
      const int head = work.keys.head * params.heads_per_kv + at.head;
      const int first = at.m * Traits::kBlockM;
      load_matrix<Traits, Traits::kBlockM>(
          stage,
          head_rows<const Element*>(params.q, params.q_stride, work.batch_q, work.q_row, head),
          params.q_stride.row, first, work.used_q, params.head_dim);
      load_matrix<Traits, Traits::kBlockM>(
          stage + Traits::kQBytes,
          head_rows<const Element*>(params.dout, params.dout_stride, work.batch_q, work.q_row,
                                    head),
          params.dout_stride.row, first, work.used_q, params.head_dim_v);
      const int64_t values =
          (work.first_tile + int64_t{at.head} * params.query_tiles.m_slots + at.m) *
          Traits::kBlockM;
      load_values<Traits::kBlockM>(stage + 2 * Traits::kQBytes, params.lse_log2 + values);
      load_values<Traits::kBlockM>(stage + 2 * Traits::kQBytes + Traits::kRowValueBytes,
                                   params.delta + values);
    }
    cp_async_commit();
  }

  static __device__ __forceinline__ SmemRows<Traits> values(uint32_t address, const BwdParams&,
                                                            const BwdWork&) {
    return {address};
  }

  // Until this thread's part of all but the last kPending blocks of queries is there.
  template <int kPending>
  static __device__ __forceinline__ void wait(uint32_t, const BwdParams&, const BwdWork&) {
    cp_async_wait<kPending>();
  }
};

}  // namespace flash_ext::fa2
