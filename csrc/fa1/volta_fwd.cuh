// The forward for Volta (7.0), on mma.sync m8n8k4: one CTA computes one block of kBlockM queries of
// one head.
//
// Schedule. The warps split the queries. Q lies in shared memory, and so does one block of K and
// one of V: a thread keeps its part of the next one to come, K and V in turn, in registers. Behind
// the first barrier of a block V moves in, and the next K is asked for, while S = Q K^T is
// computed; behind the second one K moves in and the next V is asked for, under the softmax and O
// += P V. So a load has half a block's work to arrive, and costs the registers of one operand.
//
// S becomes P in place. As an A operand it lies differently (volta_mma.cuh): three values of four
// go to a neighbouring lane, by shuffle. A warp has 32 queries where O of so many fits registers:
// with 16 it would read shared memory as long as it multiplies.
#pragma once

#include <cuda_runtime.h>

#include "device/warp_rows.cuh"
#include "fa1/launch.h"
#include "fa1/staged_block.cuh"
#include "fa1/volta_mma.cuh"

namespace flash_ext::fa1 {

using namespace device;

template <int kHeadDim_, int kBlockM_, int kBlockN_, bool kModified_>
struct VoltaFwdTraits {
  using Element = __half;
  using Lanes = VoltaLanes;
  static constexpr int kHeadDim = kHeadDim_;  // the bucket: head_dim and head_dim_v may be less
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr bool kModified = kModified_;
  static constexpr int kWarpRows = kHeadDim > 128 ? 16 : 32;
  static constexpr int kWarps = kBlockM / kWarpRows, kThreads = 32 * kWarps;
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kChunks = kRowBytes / 16;  // of a row: what a lane loads at once
  static constexpr int kMTiles = kWarpRows / 16;
  static constexpr int kSharers = 1;  // no other warp has its rows
  static constexpr int kDTiles = kHeadDim / 8;
  static constexpr int kStepN = kBlockN;  // keys whose scores are in registers at once
  static constexpr int kNTiles = kStepN / 8;
  static constexpr int kQBytes = kBlockM * kRowBytes, kKVBytes = kBlockN * kRowBytes;
  static constexpr int kSmemBytes = kQBytes + 2 * kKVBytes;
  static constexpr int kBlocksPerSM = 8 / kWarps;
  static_assert(kBlockM % kWarpRows == 0, "a warp owns whole rows");
  static_assert(kBlockN % 16 == 0, "an A fragment of P has 16 keys");
  static_assert(kHeadDim % 32 == 0, "lanes of a row write four chunks of 8 columns");
  static_assert(kBlocksPerSM * (kSmemBytes + 512) <= 96 * 1024, "what an SM of 7.0 has");
};

// Writes O, divided by the sum, and lse; rows past used_rows get 0 and -inf.
template <typename Traits>
__device__ __forceinline__ void write_tile(const FwdParams& params, const Work& work,
                                           WarpRows<Traits>& rows, float kept_scale) {
  const int first_row = lane_row<Traits>(work);
  const bool first_of_row = VoltaLanes::column_pair(fresh_thread_index() % 32) == 0;
  float* lse = params.lse + work.lse_offset;
  const float sink = params.sinks ? params.sinks[work.head] : -INFINITY;
  auto* out = static_cast<__half*>(params.out) + work.head * params.out_stride.head +
              work.q_row * params.out_stride.row + work.batch_q * params.out_stride.batch;
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) {
    rows.softmax[m].reduce();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_row + 16 * m + 8 * half;
      const bool used = i < work.used_rows;
      const auto finished =
          rows.softmax[m].finish(half, params.score_scale, params.score_slack, sink);
      const float weight = finished.weight * kept_scale;
      const bool seen = used && weight > 0.f;
      if (first_of_row && i < work.rows) lse[i] = used ? finished.lse : -INFINITY;
#pragma unroll
      for (int d = 0; d < Traits::kChunks; d += 4) {
        uint32_t words[4];
        gather_row(&rows.o[m][8 * (d / 2) + 2 * half], weight, words);
#pragma unroll
        for (uint32_t& word : words) word = seen ? word : 0u;
        const int column = (d + gathered_chunk()) * 8;
        if (i < work.rows && column < params.head_dim_v)
          st_global_16(out + i * params.out_stride.row + column, words);
      }
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSM)
    volta_fwd_kernel(const __grid_constant__ FwdParams params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const uint32_t smem_q = smem_address(smem_bytes), smem_k = smem_q + Traits::kQBytes,
                 smem_v = smem_k + Traits::kKVBytes;
  // What a tile is lies in shared memory: in registers it would live through the whole loop.
  __shared__ Work work;
  __shared__ Modifier modifier;
  __shared__ MatrixRows q_rows, k_rows, v_rows;

  for (uint32_t tile = blockIdx.x; tile < params.scheduler.num_tiles; tile += gridDim.x) {
    block_barrier();  // the tile before has left V's buffer and its work
    if (threadIdx.x == 0) {
      find_work<Traits::kBlockM, Traits::kBlockN>(params, tile, work);
      if constexpr (Traits::kModified) {
        if (work.sequence >= 0) modifier = make_modifier(params, work);
      }
      const int kv_head = work.head / params.heads_per_kv,
                batch_k = params.cu_seqlens_k ? 0 : work.sequence, keys = work.visible.seqlen_k;
      q_rows = matrix_rows<__half>(params.q, params.q_stride, work.batch_q, work.q_row, work.head,
                                   work.used_rows, params.head_dim);
      k_rows = matrix_rows<__half>(params.k, params.k_stride, batch_k, work.k_row, kv_head, keys,
                                   params.head_dim);
      v_rows = matrix_rows<__half>(params.v, params.v_stride, batch_k, work.k_row, kv_head, keys,
                                   params.head_dim_v);
    }
    block_barrier();
    if (work.m_block * Traits::kBlockM >= work.rows) continue;

    StagedRows<Traits> ahead;
    const int n_last = work.range.max - 1;
    if (work.range.min < work.range.max) {
      ahead.load(k_rows, n_last * Traits::kBlockN);
      load_rows_of_a<Traits, Traits::kBlockM>(smem_q, q_rows, work.m_block * Traits::kBlockM);
      ahead.store(smem_k);
      ahead.load(v_rows, n_last * Traits::kBlockN);
    }
    WarpRows<Traits> rows = {};
    const uint32_t thread = fresh_thread_index(), lane = thread % 32;
    const uint32_t q = smem_q + thread / 32 * Traits::kWarpRows * Traits::kRowBytes +
                       VoltaAddress<Traits>::a(lane),
                   k = smem_k + VoltaAddress<Traits>::b(lane),
                   v = smem_v + VoltaAddress<Traits>::b_rows(lane, 0, false),
                   v_other = smem_v + VoltaAddress<Traits>::b_rows(lane, 0, true);
    for (int n = n_last; n >= work.range.min; --n) {
      const int n_begin = n * Traits::kBlockN;
      View seen = View::kWhole;
      if (n < work.range.full_min || n >= work.range.full_max) seen = view<Traits>(work, n_begin);
      block_barrier();  // K is there, and nobody reads the V of block n + 1 any more
      ahead.store(smem_v);
      if (n > work.range.min) ahead.load(k_rows, n_begin - Traits::kBlockN);
      Scores<Traits> s;
      if (seen != View::kNone) {
        float start[Traits::kMTiles][4] = {};  // S - reference; of modified scores Q K^T alone
#pragma unroll
        for (int m = 0; m < Traits::kMTiles && !Traits::kModified; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) start[m][i] = rows.softmax[m].start[i];
        }
        multiply<Traits>(s, q, k, start);
      }
      block_barrier();  // V is there, and nobody reads K any more
      if (n > work.range.min) {
        ahead.store(smem_k);
        ahead.load(v_rows, n_begin - Traits::kBlockN);
      }
      if (seen == View::kNone) continue;
      if constexpr (Traits::kModified) modify<Traits>(s, rows, work, modifier, n_begin);
      if (seen == View::kPart) mask<Traits>(s, work, n_begin);
      keep_below_reference<Traits>(s, rows, params.score_scale_log2, params.score_slack);
#pragma unroll
      for (int i = 0; i < Traits::kStepN / 16; ++i) {
        uint32_t p[Traits::kMTiles][4];
        exponentiate<Traits>(s, rows, work, modifier, n_begin, i, params.score_scale_log2, p);
        const int step = i * 16 * Traits::kRowBytes;
        uint32_t a[Traits::kMTiles][4][2];
#pragma unroll
        for (int m = 0; m < Traits::kMTiles; ++m) relay(p[m], a[m]);
        add_product<Traits, 4>(rows.o, a, v + step, v_other + step);
      }
    }
    write_tile<Traits>(params, work, rows, Traits::kModified ? modifier.kept_scale : 1.f);
  }
}

// ---- launch -----------------------------------------------------------------------------------

#ifndef __CUDACC_RTC__
// Returns cudaGetLastError's answer; the device is the current one.
template <int kHeadDim, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_volta_fwd(const FwdParams& params, int64_t grid, cudaStream_t stream) {
  using Traits = VoltaFwdTraits<kHeadDim, kBlockM, kBlockN, kModified>;
  auto* kernel = &volta_fwd_kernel<Traits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(grid), Traits::kThreads, Traits::kSmemBytes, stream>>>(params);
  return cudaGetLastError();
}
#endif

}  // namespace flash_ext::fa1

#ifdef __CUDACC_RTC__  // the kernel alone: NVRTC, which still knows 7.0, makes no host code
#define INSTANCE(header, ...)                                            \
  namespace flash_ext::fa1 {                                             \
  template __global__ void header##_kernel<VoltaFwdTraits<__VA_ARGS__>>( \
      const __grid_constant__ FwdParams);                                \
  }
#else
#define INSTANCE(header, ...)                                                                 \
  namespace flash_ext::fa1 {                                                                  \
  template cudaError_t launch_##header<__VA_ARGS__>(const FwdParams&, int64_t, cudaStream_t); \
  }
#endif
