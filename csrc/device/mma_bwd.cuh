// FlashAttention-2 backward on mma.sync, of any generation before WGMMA: one CTA computes dK and dV
// of one block of kBlockN keys.
//
// Schedule. The CTA keeps K and V in shared memory and walks over the blocks of kBlockM queries
// that see its keys, for every query head of the key head's group, so that dK and dV are summed in
// registers and written once. Scores are made transposed: a warp owns 32 keys, so that P^T and
// dS^T, as they come out of one product, are the A operand of the next.
//
//   S^T = K Q^T   P^T = exp(S^T - lse)   dP^T = V dO^T   dS^T = P^T (dP^T - delta)
//   dV += P^T dO                         dK += dS^T Q    dQ = dS K
//
// dQ needs the dS of all keys: it goes through shared memory, and its sum over blocks of keys
// through float32 atomics in global memory. Where the head dim is too large for a warp to hold 32
// rows of dK and dV, several warps share the 32 keys (BwdCut::kSharers): each makes S^T for its
// part of the queries, they trade P^T and dS^T through shared memory, and each sums its part of the
// columns.
//
// One barrier a block, before dQ: dS is there, Q and dO of the next block are there, and those of
// this one are free. Up to the next barrier warps run apart, so that one's exponentials meet
// another's products. With one buffer of dS, or of Q and dO, there is a second barrier behind dQ.
//
// Deterministic: tiles are taken in their order from a counter, and each warp waits for its tile's
// turn at a dQ, so that atomics come in the order of the blocks of keys. Nobody waits for a tile
// that comes later, and all walk from the last query to the first, so that they follow each other.
#pragma once

#include "device/bwd_rows.cuh"
#include "device/mbarrier.cuh"
#include "device/mma_bwd_modify.cuh"
#include "device/mma_bwd_output.cuh"
#include "device/mma_bwd_tile.cuh"
#include "device/mma_bwd_work.cuh"

namespace flash_ext::device {

// ---- one step: kStepM queries -----------------------------------------------------------------

// Scores of a step become probabilities. lse: this lane's first value in shared memory.
template <typename Traits>
__device__ __forceinline__ void exponentials(float (&s)[2][Traits::kStepM / 2], uint32_t lse,
                                             float scale_log2) {
#pragma unroll
  for (int n = 0; n < Traits::kStepM / 8; ++n) {
    const float2 l = ld_shared_floats(lse + 32 * n);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 4 * n; i < 4 * n + 4; i += 2) {
        s[m][i] = exp2_approx(fmaf(s[m][i], scale_log2, -l.x));
        s[m][i + 1] = exp2_approx(fmaf(s[m][i + 1], scale_log2, -l.y));
      }
    }
  }
}

// P, rounded and packed; probabilities whose bit is not set were dropped.
template <typename Traits>
__device__ __forceinline__ void pack_p(const float (&p)[2][Traits::kStepM / 2], uint32_t kept,
                                       uint32_t (&packed)[2][Traits::kStepM / 4]) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < Traits::kStepM / 2; i += 2) {
      const uint32_t bits = Traits::kModified ? kept >> (m * Traits::kStepM / 2 + i) : 3;
      packed[m][i / 2] =
          pack<typename Traits::Element>(bits & 1 ? p[m][i] : 0.f, bits & 2 ? p[m][i + 1] : 0.f);
    }
  }
}

// dS = P (dP - delta), rounded and packed. delta: this lane's first value in shared memory; of
// modified scores dp is dP - delta already.
template <typename Traits>
__device__ __forceinline__ void pack_ds(const float (&p)[2][Traits::kStepM / 2],
                                        const float (&dp)[2][Traits::kStepM / 2], uint32_t delta,
                                        uint32_t (&packed)[2][Traits::kStepM / 4]) {
#pragma unroll
  for (int n = 0; n < Traits::kStepM / 8; ++n) {
    const float2 d = Traits::kModified ? float2{} : ld_shared_floats(delta + 32 * n);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 4 * n; i < 4 * n + 4; i += 2) {
        packed[m][i / 2] = pack<typename Traits::Element>(p[m][i] * (dp[m][i] - d.x),
                                                          p[m][i + 1] * (dp[m][i + 1] - d.y));
      }
    }
  }
}

// ---- the kernel -------------------------------------------------------------------------------

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    bwd_kernel(const __grid_constant__ BwdParams params) {
  using Element = typename Traits::Element;
  using Rows = typename Traits::Rows;
  using Scores = typename Traits::Scores;
  constexpr int kSharers = Traits::kSharers, kStepM = Traits::kStepM;
  constexpr bool kOwnFragments = kStepM >= 16;  // a warp's own P^T is an A operand in registers
  extern __shared__ __align__(128) char smem_bytes[];
  const uint32_t smem = smem_address(smem_bytes);
  // Sharers are neighbours: on an SM's four schedulers, one group's products then run beside
  // another's exponentials.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int key_warp = warp / kSharers, sharer = warp % kSharers;
  const int warp_m = warp % Traits::kDqWarpsM, warp_d = warp / Traits::kDqWarpsM;

  // This lane's ldmatrix addresses: the four matrices row by row, or chunk by chunk.
  const int row_16 = lane % 16, chunk_16 = lane / 16, row_by_chunk = lane % 8 + lane / 16 * 8;
  const uint32_t k_rows = smem + Rows::offset(32 * key_warp + row_16, chunk_16);
  const uint32_t k_columns = smem + Rows::offset(row_16, 2 * warp_d + chunk_16);
  const uint32_t ds_columns =
      smem + Traits::kDs +
      Scores::offset(row_by_chunk, 2 * Traits::kDqRowBlocks * warp_m + lane / 8 % 2);
  const int own = kOwnFragments ? sharer * (kStepM / 16) : 0;  // its first 16 queries
  const uint32_t score_rows = smem + Scores::offset(32 * key_warp + row_16, 2 * own + chunk_16);
  const uint32_t q_rows =
      smem + Traits::kStage + sharer * Rows::down(kStepM) +
      (kStepM == 8 ? Rows::offset(lane % 8, lane / 8) : Rows::offset(row_by_chunk, lane / 8 % 2));
  const uint32_t q_columns = smem + Traits::kStage + Rows::offset(row_16, 2 * sharer + chunk_16);

  // Facts of the tile lie in shared memory: the registers are taken by the gradients.
  __shared__ BwdWork work;
  __shared__ Modifier modifiers[2];  // of query heads, even and odd
  __shared__ int64_t tile, added;    // added: the tile of queries whose turn is not passed on yet
  typename Traits::Loads loads;
  if (threadIdx.x == 0) tile = int64_t{blockIdx.x} - gridDim.x;

  while (true) {
    block_barrier();  // the tile before has left shared memory
    if (threadIdx.x == 0) {
      tile = params.next_tile ? atomicAdd(params.next_tile, 1u) : tile + gridDim.x;
      added = -1;
      if (tile < params.key_tiles.num_tiles) {
        find_bwd_work<Traits>(params, tile, work);
        if (Traits::kModified && work.keys.sequence >= 0)
          modifiers[0] = head_modifier(params, work, 0);
      }
    }
    block_barrier();
    if (tile >= params.key_tiles.num_tiles) return;
    const int n_begin = work.keys.block * Traits::kBlockN;
    if (n_begin >= work.keys.rows) continue;

    Cursor ahead{0, work.m_max - 1};  // the next block to load
    if (work.m_min < work.m_max) {
      loads.keys(smem, params, work);
#pragma unroll
      for (int i = 0; i < Traits::kStages; ++i) {
        loads.queries(smem + Traits::kStage + i * Traits::kStageBytes, params, work, ahead);
        ahead.next(work);
      }
      loads.template wait<Traits::kStages - 1>(smem + Traits::kStage, params, work);
      block_barrier();  // K, V and the first block are there
    }

    float dk[2][8 * Traits::kColumnBlocks] = {}, dv[2][8 * Traits::kColumnBlocks] = {};
    uint32_t stage = 0, ds_stage = 0;  // offsets of the block's buffers
    Cursor at{0, work.m_max - 1};
    for (; at.head < params.heads_per_kv && work.m_min < work.m_max; at.next(work)) {
      const bool masked = work.visible.begin((at.m + 1) * Traits::kBlockM - 1) > n_begin ||
                          work.visible.end(at.m * Traits::kBlockM) < n_begin + Traits::kBlockN;
#pragma unroll
      for (int step = 0; step < Traits::kSteps; ++step) {
        const int first = (step * kSharers + sharer) * kStepM;
        const uint32_t q = q_rows + stage + step * Rows::down(kSharers * kStepM);
        float s[2][kStepM / 2], dp[2][kStepM / 2];
        multiply_scores<Traits>(s, SmemRows<Traits>{k_rows}, q);
        const int key = n_begin + 32 * key_warp, query = at.m * Traits::kBlockM + first;
        const uint32_t lse =
            smem + Traits::kStage + stage + 2 * Traits::kQBytes + 4 * first + 8 * (lane % 4);
        const uint32_t delta = lse + Traits::kRowValueBytes;
        uint32_t kept = 0;
        if constexpr (Traits::kModified) {
          multiply_scores<Traits>(dp, loads.values(k_rows + Traits::kV, params, work),
                                  q + Traits::kQBytes);
          kept = modify_step<Traits>(s, dp, delta, modifiers[at.head % 2], work.visible.offset, key,
                                     query);
        }
        if (masked) apply_mask_transposed(s, work.visible, key + lane / 4, query + 2 * (lane % 4));
        exponentials<Traits>(s, lse, Traits::kModified ? kLog2e : params.softmax_scale_log2);
        // Behind the mask's branch, so that these products can run beside the exponentials.
        if constexpr (!Traits::kModified)
          multiply_scores<Traits>(dp, loads.values(k_rows + Traits::kV, params, work),
                                  q + Traits::kQBytes);
        uint32_t p[2][kStepM / 4], ds[2][kStepM / 4];
        pack_p<Traits>(s, kept, p);
        const uint32_t rows = q_columns + stage + Rows::down(kStepM) * (step * kSharers + sharer);
        if constexpr (kOwnFragments) {
#pragma unroll
          for (int j = 0; j < kStepM / 16; ++j) {
            uint32_t a[2][4];
            take_fragments(a, p, j);
            add_product<Traits, 2 * kSharers>(dv, a, rows + Rows::down(16 * j) + Traits::kQBytes);
          }
        }
        pack_ds<Traits>(s, dp, delta, ds);
        store_scores<Scores>(smem + Traits::kDs + ds_stage, 32 * key_warp, first / 8, ds);
        if constexpr (kSharers > 1)
          store_scores<Scores>(smem + Traits::kP, 32 * key_warp, first / 8, p);
        if constexpr (kOwnFragments) {
#pragma unroll
          for (int j = 0; j < kStepM / 16; ++j) {
            uint32_t a[2][4];
            take_fragments(a, ds, j);
            add_product<Traits, 2 * kSharers>(dk, a, rows + Rows::down(16 * j));
          }
        }
      }
      if constexpr (kSharers > 1) {
        named_barrier_sync(1 + key_warp, 32 * kSharers);  // the other sharers' scores are there
#pragma unroll
        for (int j = 0; j < Traits::kBlockM / 16; ++j) {
          if (kOwnFragments && j * 16 / kStepM % kSharers == 0) continue;
          const uint32_t rows = q_columns + stage + Rows::down(16) * (own ^ j);
          const uint32_t scores = Scores::right(score_rows, 2 * j);
          uint32_t a[2][4];
          load_fragments<Scores>(a, scores + Traits::kP);
          add_product<Traits, 2 * kSharers>(dv, a, rows + Traits::kQBytes);
          load_fragments<Scores>(a, scores + Traits::kDs + ds_stage);
          add_product<Traits, 2 * kSharers>(dk, a, rows);
        }
      }

      if (Traits::kModified && threadIdx.x == 0 && at.m == work.m_min) {
        if (at.head + 1 < params.heads_per_kv)
          modifiers[(at.head + 1) % 2] = head_modifier(params, work, at.head + 1);
      }
      if constexpr (Traits::kStages == 2)
        loads.template wait<0>(smem + Traits::kStage, params, work);
      block_barrier();  // dS and the next block are there, and this block's buffers are free
      const int64_t q_tile = work.first_tile + int64_t{at.head} * params.query_tiles.m_slots + at.m;
      if (params.dq_turns && threadIdx.x == 0) {
        if (added >= 0) add_release(params.dq_turns + added, 1);  // all warps have added to it
        added = q_tile;
      }
      loads.queries(smem + Traits::kStage + stage, params, work, ahead);
      ahead.next(work);

      float dq[Traits::kDqRowBlocks][8 * Traits::kDqColumnBlocks] = {};
#pragma unroll
      for (int j = 0; j < Traits::kBlockN / 16; ++j) {
        uint32_t a[Traits::kDqRowBlocks][4];
#pragma unroll
        for (int i = 0; i < Traits::kDqRowBlocks; ++i) {
          ldmatrix_x4_trans(a[i],
                            Scores::right(ds_columns + ds_stage, 2 * i) + Scores::down(16 * j));
        }
        add_product<Traits, 2 * Traits::kDqWarpsD>(dq, a, k_columns + Rows::down(16 * j));
      }
      if (params.dq_turns) {
        // So many blocks of keys add to this dQ before: those from the first one that it sees on.
        const int turn =
            work.keys.block - work.visible.begin(at.m * Traits::kBlockM) / Traits::kBlockN;
        wait_for_value(params.dq_turns + q_tile, turn);
      }
      add_dq<Traits>(params.dq_sum + q_tile * (Traits::kBlockM * Traits::kDqColumns), dq, warp_m,
                     warp_d);

      if constexpr (Traits::kDsStages == 1) {
        if constexpr (Traits::kStages == 1)
          loads.template wait<0>(smem + Traits::kStage, params, work);
        block_barrier();  // dS is free; with one stage: the next block is there
      }
      if constexpr (Traits::kStages == 2) stage = Traits::kStageBytes - stage;
      if constexpr (Traits::kDsStages == 2) ds_stage = Traits::kScoreBytes - ds_stage;
    }

    loads.template wait<0>(smem + Traits::kStage, params, work);
    block_barrier();  // everybody has left K and V, where the gradients go, and has added its dQ
    if (params.dq_turns && threadIdx.x == 0 && added >= 0) add_release(params.dq_turns + added, 1);
    stage_gradient<Traits>(smem, dk, params.softmax_scale, 32 * key_warp, sharer);
    stage_gradient<Traits>(
        smem + Traits::kV, dv,
        Traits::kModified && work.keys.sequence >= 0 ? modifiers[0].kept_scale : 1.f, 32 * key_warp,
        sharer);
    block_barrier();
    const RowTile& keys = work.keys;
    write_gradient<Traits>(
        smem,
        head_rows<Element*>(params.dk, params.dk_stride, keys.batch, keys.first_row, keys.head),
        params.dk_stride.row, n_begin, keys.rows, params.head_dim);
    write_gradient<Traits>(
        smem + Traits::kV,
        head_rows<Element*>(params.dv, params.dv_stride, keys.batch, keys.first_row, keys.head),
        params.dv_stride.row, n_begin, keys.rows, params.head_dim_v);
  }
}

// ---- launch -----------------------------------------------------------------------------------

// What the row kernels know of the main kernel's tiles.
template <typename Traits>
struct BwdRowTraits {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kHeadDim = Traits::kDqColumns, kHeadDimV = Traits::kHeadDim;
  static constexpr bool kDqVector = kVectorAtomics;
};

// The three kernels, one after the other; 0 tiles of keys: the row kernels alone. Returns
// cudaGetLastError's answer; the device is the current one.
template <typename Traits>
cudaError_t launch_backward(const BwdRowsParams& rows, const BwdParams& params, int64_t grid,
                            cudaStream_t stream) {
  cudaError_t error = launch_prepare<BwdRowTraits<Traits>>(rows, stream);
  if (error == cudaSuccess && grid > 0) {
    auto* kernel = &bwd_kernel<Traits>;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Traits::kSmemBytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(grid), Traits::kThreads, Traits::kSmemBytes, stream>>>(params);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? launch_finish<BwdRowTraits<Traits>>(rows, stream) : error;
}

}  // namespace flash_ext::device
