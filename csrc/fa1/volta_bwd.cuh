// The backward for Volta (7.0), on mma.sync m8n8k4: one CTA computes dK and dV of one block of
// kBlockN keys.
//
// Schedule. K and V lie in shared memory; the CTA walks over the blocks of kBlockM queries that see
// its keys, for every query head of the key head's group. Scores are made transposed: a warp owns
// 16 or 32 keys, so that P^T and dS^T, traded between lanes (volta_mma.cuh), are A operands.
//
//   S^T = K Q^T   P^T = exp(S^T - lse)   dP^T = V dO^T   dS^T = P^T (dP^T - delta)
//   dV += P^T dO                         dK += dS^T Q    dQ = dS K
//
// dQ needs the dS of all keys: it goes through shared memory, and its sum over blocks of keys
// through float32 atomics in global memory. Two barriers a block: behind the first Q and dO, which
// were asked for a block ago, are there, and dS is free; behind the second dS is there, and Q and
// dO are free: they are replaced when a warp is done with its dQ.
//
// Deterministic: as in device/bwd_params.h, tiles come from a counter and wait for their turns.
#pragma once

#include <cuda_runtime.h>

#include "device/bwd_rows.cuh"
#include "device/mma_bwd_modify.cuh"
#include "fa1/launch.h"
#include "fa1/volta_bwd_tile.cuh"

namespace flash_ext::fa1 {

using namespace device;

// ---- the kernel -------------------------------------------------------------------------------

// Whether some, and whether all, of a warp's keys are seen by some, or all, queries of a block.
template <typename Traits>
__device__ __forceinline__ bool sees_some(const Visible& visible, int query, int key) {
  return key < visible.end(query + Traits::kBlockM - 1) &&
         key + Traits::kWarpKeys > visible.begin(query);
}
template <typename Traits>
__device__ __forceinline__ bool sees_all(const Visible& visible, int query, int key) {
  return key >= visible.begin(query + Traits::kBlockM - 1) &&
         key + Traits::kWarpKeys <= visible.end(query);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    volta_bwd_kernel(const __grid_constant__ BwdParams params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const uint32_t smem = smem_address(smem_bytes);
  // Facts of the tile lie in shared memory: the registers are taken by the gradients.
  __shared__ BwdWork work;
  __shared__ Modifier modifiers[2];  // of query heads, even and odd
  __shared__ int64_t next, added;    // added: the tile of queries whose turn is not passed on yet
  if (threadIdx.x == 0) next = int64_t{blockIdx.x} - gridDim.x;

  while (true) {
    block_barrier();  // the tile before has left shared memory
    if (threadIdx.x == 0) {
      next = params.next_tile ? atomicAdd(params.next_tile, 1u) : next + gridDim.x;
      const bool found = next / Traits::kParts < params.key_tiles.num_tiles;
      if (found) find_bwd_work<Traits>(params, next / Traits::kParts, work);
      if (Traits::kModified && found && work.keys.sequence >= 0)
        modifiers[0] = head_modifier(params, work, 0);
      added = -1;
    }
    block_barrier();
    if (next / Traits::kParts >= params.key_tiles.num_tiles) return;
    const int n_begin = work.keys.block * Traits::kBlockN;
    if (n_begin >= work.keys.rows) continue;
    const int part = static_cast<int>(next % Traits::kParts);

    const uint32_t thread = fresh_thread_index(), lane = thread % 32;
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the same for all lanes
    const int first_key = n_begin + Traits::kWarpKeys * warp;
    const uint32_t stage = smem + Traits::kStage;
    const uint32_t k = smem + warp * Traits::kWarpKeys * Traits::kRowBytes +
                       VoltaAddress<Traits>::a(lane),
                   q = stage + VoltaAddress<Traits>::b(lane),
                   q_rows = stage + VoltaAddress<Traits>::b_rows(lane, 4 * part, false),
                   q_other = stage + VoltaAddress<Traits>::b_rows(lane, 4 * part, true),
                   row_values = stage + 2 * Traits::kQBytes + 8 * VoltaLanes::column_pair(lane);

    StagedQueries<Traits> ahead;
    Cursor at{0, work.m_max - 1};
    const bool any = work.m_min < work.m_max;
    if (any) {
      ahead.load(params, work, at);
      const RowTile& keys = work.keys;
      load_rows_of_a<Traits, Traits::kBlockN>(
          smem,
          matrix_rows<__half>(params.k, params.k_stride, keys.batch, keys.first_row, keys.head,
                              keys.used, params.head_dim),
          n_begin);
      load_rows_of_a<Traits, Traits::kBlockN>(
          smem + Traits::kV,
          matrix_rows<__half>(params.v, params.v_stride, keys.batch, keys.first_row, keys.head,
                              keys.used, params.head_dim_v),
          n_begin);
    }
    float dk[Traits::kTiles][Traits::kGradCount] = {}, dv[Traits::kTiles][Traits::kGradCount] = {};
    while (any && at.head < params.heads_per_kv) {
      ahead.store(stage);
      block_barrier();  // Q and dO are there (K and V too), and nobody reads dS any more
      const int head = at.head, m_block = at.m, query = m_block * Traits::kBlockM;
      at.next(work);
      ahead.load(params, work, at);

      const uint32_t ds = smem + Traits::kDs + warp * Traits::kWarpKeys * DsTile::kRowBytes +
                          RowsOfA<DsTile>::offset(VoltaLanes::a_row(lane), lane / 4 % 2);
      if (sees_some<Traits>(work.visible, query, first_key)) {
        const float zero[Traits::kTiles][4] = {};
        KeyScores<Traits> s, dp;
        uint32_t kept[Traits::kTiles];
        multiply<Traits>(s, k, q, zero);
        if constexpr (Traits::kModified) {
          multiply<Traits>(dp, k + Traits::kV, q + Traits::kQBytes, zero);
          modify_scores<Traits>(s, dp, modifiers[head % 2], {query, first_key, work.visible.offset},
                                row_values + Traits::kRowValueBytes, kept);
        }
        if (!sees_all<Traits>(work.visible, query, first_key)) {
#pragma unroll
          for (int m = 0; m < Traits::kTiles; ++m) {
            apply_mask<VoltaLanes>(s[m], VisibleQueries{work.visible},
                                   first_key + 16 * m + VoltaLanes::row(lane), query);
          }
        }
        exponentials<Traits>(s, row_values, Traits::kModified ? kLog2e : params.softmax_scale_log2);
        if constexpr (!Traits::kModified)
          multiply<Traits>(dp, k + Traits::kV, q + Traits::kQBytes, zero);
        score_gradients<Traits>(s, dp, row_values + Traits::kRowValueBytes);
        if constexpr (Traits::kModified) {
#pragma unroll
          for (int m = 0; m < Traits::kTiles; ++m) drop(s[m], kept[m]);
        }
#pragma unroll
        for (int n = 0; n < Traits::kBlockM / 16; ++n) {
          const uint32_t down = n * 16 * Traits::kRowBytes;
          uint32_t a[Traits::kTiles][4][2];
          take_fragments<Traits>(s, n, a);
          add_product<Traits, Traits::kApart>(dv, a, q_rows + down + Traits::kQBytes,
                                              q_other + down + Traits::kQBytes);
          take_fragments<Traits>(dp, n, a);
#pragma unroll
          for (int m = 0; m < Traits::kTiles; ++m) {
            st_shared_16(Swizzle<DsTile>::step(ds, 2 * n) + m * 16 * DsTile::kRowBytes,
                         make_uint4(a[m][0][0], a[m][2][0], a[m][0][1], a[m][2][1]));
          }
          add_product<Traits, Traits::kApart>(dk, a, q_rows + down, q_other + down);
        }
      } else {
#pragma unroll
        for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
          for (int n = 0; n < Traits::kBlockM / 16; ++n) {
            st_shared_16(Swizzle<DsTile>::step(ds, 2 * n) + m * 16 * DsTile::kRowBytes,
                         make_uint4(0, 0, 0, 0));
          }
        }
      }
      if (Traits::kModified && thread == 0 && m_block == work.m_min) {
        if (head + 1 < params.heads_per_kv)
          modifiers[(head + 1) % 2] = head_modifier(params, work, head + 1);
      }
      block_barrier();  // dS is there, and nobody reads Q and dO any more
      const int64_t q_tile = work.first_tile + int64_t{head} * params.query_tiles.m_slots + m_block;
      uint32_t* turns =
          params.dq_turns ? params.dq_turns + q_tile * Traits::kParts + part : nullptr;
      if (turns && thread == 0) {
        if (added >= 0) add_release(params.dq_turns + added, 1);  // all warps have added to it
        added = q_tile * Traits::kParts + part;
      }
      const int row_block = warp % Traits::kDqWarpsM, column = warp / Traits::kDqWarpsM;
      const int chunk = Traits::kApart * (column / 2) + 4 * part + 2 * (column % 2);
      float dq[Traits::kDqTiles][8] = {};
      multiply_dq<Traits>(
          dq, smem + Traits::kDs + VoltaAddress<DsTile>::four_columns(lane, 2 * row_block),
          smem + VoltaAddress<Traits>::four_rows(lane, chunk));
      if (turns) {
        // So many blocks of keys add to this dQ before: those from the first one that it sees on.
        const int turn = work.keys.block - work.visible.begin(query) / Traits::kBlockN;
        wait_for_value(turns, turn);
      }
      add_dq<Traits>(params.dq_sum + q_tile * (Traits::kBlockM * Traits::kDqColumns), dq, row_block,
                     chunk);
    }

    if (params.dq_turns) {
      block_barrier();  // everybody has added its dQ
      if (thread == 0 && added >= 0) add_release(params.dq_turns + added, 1);
    }
    const float kept_scale =
        Traits::kModified && work.keys.sequence >= 0 ? modifiers[0].kept_scale : 1.f;
    write_gradient<Traits>(params.dk, params.dk_stride, work.keys, dk, params.softmax_scale,
                           first_key, 4 * part, params.head_dim);
    write_gradient<Traits>(params.dv, params.dv_stride, work.keys, dv, kept_scale, first_key,
                           4 * part, params.head_dim_v);
  }
}

// ---- launch -----------------------------------------------------------------------------------

// What the row kernels know of the main kernel's tiles.
template <typename Cut>
struct VoltaBwdRowTraits {
  using Element = __half;
  static constexpr int kBlockM = Cut::kBlockM;
  static constexpr int kHeadDim = Cut::kDqColumns, kHeadDimV = Cut::kHeadDim;
  static constexpr bool kDqVector = false;
};

#ifndef __CUDACC_RTC__
template <int kHeadDim, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_volta_bwd(const BwdRowsParams& rows, const BwdParams& params, int64_t grid,
                             cudaStream_t stream) {
  using Cut = VoltaBwdCut<kHeadDim, kBlockM, kBlockN, kModified>;
  cudaError_t error = launch_prepare<VoltaBwdRowTraits<Cut>>(rows, stream);
  if (error == cudaSuccess && grid > 0) {
    auto* kernel = &volta_bwd_kernel<VoltaBwdTraits<Cut>>;
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Cut::kSmemBytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(grid), Cut::kThreads, Cut::kSmemBytes, stream>>>(params);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? launch_finish<VoltaBwdRowTraits<Cut>>(rows, stream) : error;
}
#endif

}  // namespace flash_ext::fa1

#ifdef __CUDACC_RTC__  // the kernels alone: NVRTC, which still knows 7.0, makes no host code
#define INSTANCE(header, ...)                                                \
  namespace flash_ext::fa1 {                                                 \
  using Cut = VoltaBwdCut<__VA_ARGS__>;                                      \
  template __global__ void header##_kernel<VoltaBwdTraits<Cut>>(             \
      const __grid_constant__ BwdParams);                                    \
  }                                                                          \
  namespace flash_ext::device {                                              \
  template __global__ void prepare_kernel<fa1::VoltaBwdRowTraits<fa1::Cut>>( \
      const __grid_constant__ BwdRowsParams);                                \
  template __global__ void finish_kernel<fa1::VoltaBwdRowTraits<fa1::Cut>>(  \
      const __grid_constant__ BwdRowsParams);                                \
  template __global__ void d_sink_kernel<fa1::VoltaBwdRowTraits<fa1::Cut>>(  \
      const __grid_constant__ BwdRowsParams);                                \
  }
#else
#define INSTANCE(header, ...)                                                               \
  namespace flash_ext::fa1 {                                                                \
  template cudaError_t launch_##header<__VA_ARGS__>(const BwdRowsParams&, const BwdParams&, \
                                                    int64_t, cudaStream_t);                 \
  }
#endif
