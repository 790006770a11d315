// FlashAttention-2 forward on mma.sync: one CTA computes one block of kBlockM queries of one head.
//
// Schedule. The warps split the queries (split-Q: no warp ever needs another's scores). Keys come
// in blocks of kBlockN from the last visible block to the first, through a ring of kStages buffers
// filled by cp.async. One barrier a block: behind it the block that was waited for is there for all
// warps, and the buffer of the block before it is free for the next load, which then has the whole
// block's work to arrive. With one stage, where two do not fit, V loads during Q K^T and the next K
// during P V, for two barriers a block. A warp takes kStepN keys at a time: S = Q K^T stays in
// registers, becomes P in place, and P, rounded, is the A operand of O += P V.
//
// An mma.sync and the arithmetic between two of them take turns at the register file, so what
// counts is the number of instructions a score costs (csrc/fa2/README.md): four and a half here.
#pragma once

#include <cuda_runtime.h>

#include "device/lazy_softmax.cuh"
#include "device/mask.cuh"
#include "device/mma.cuh"
#include "device/modify.cuh"
#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "device/warp_rows.cuh"
#include "fa2/launch.h"
#include "fa2/smem_tile.cuh"

namespace flash_ext::fa2 {

using namespace device;

template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kStages_,
          bool kModified_>
struct FwdTraits {
  using Element = Element_;
  using Lanes = MmaLanes;
  static constexpr int kHeadDim = kHeadDim_;  // the bucket: head_dim and head_dim_v may be less
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kStages = kStages_;
  static constexpr bool kModified = kModified_;
  static constexpr int kWarpRows = kHeadDim > 128 ? 16 : 32;  // O of 32 rows must fit registers
  static constexpr int kWarps = kBlockM / kWarpRows, kThreads = 32 * kWarps;
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kChunks = kRowBytes / 16;  // of a row: what cp.async moves
  static constexpr int kMTiles = kWarpRows / 16;
  // Where registers for a third CTA cost nothing: measured, it is worth 10 % at head_dim 64.
  static constexpr int kBlocksPerSM = kHeadDim == 64 && !kModified ? 3 : 1;
  static constexpr int kDTiles = kHeadDim / 8;
  // Keys of one step: their scores need registers beside O.
  static constexpr int kStepN = kBlockN < 64 || (kWarpRows == 32 && kHeadDim > 64) ? 32 : 64;
  // Unrolled steps are 3 % faster at head_dim 128; modified scores have no registers for it.
  static constexpr int kUnroll = kModified ? 1 : kBlockN / kStepN;
  static constexpr int kNTiles = kStepN / 8;
  static constexpr int kPending = kStages < 2 ? 0 : kStages - 2;  // groups that are not waited for
  static constexpr int kQBytes = kBlockM * kRowBytes;   // O leaves through the same buffer
  static constexpr int kKVBytes = kBlockN * kRowBytes;  // of K, and of V
  static constexpr int kSmemBytes = kQBytes + kStages * 2 * kKVBytes;
  static_assert(kBlockM % kWarpRows == 0, "a warp owns whole rows");
  static_assert(kBlockN % kStepN == 0, "whole steps");
  static_assert(kHeadDim % 32 == 0, "the swizzle permutes 4 or 8 chunks");
  static_assert(kStages >= 2 || kBlockN == kStepN, "V is waited for once a block");
};

// ---- the two products -------------------------------------------------------------------------

// S = Q K^T - reference; of modified scores Q K^T alone. q, k: this lane's ldmatrix addresses of
// the warp's rows and of the first key.
template <typename Traits>
__device__ __forceinline__ void multiply_qk(Scores<Traits>& s, WarpRows<Traits>& rows, uint32_t q,
                                            uint32_t k) {
  using Element = typename Traits::Element;
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) rows.softmax[m].keep_apart();
#pragma unroll
  for (int d = 0; d < Traits::kChunks; d += 2) {
    uint32_t a[Traits::kMTiles][4];
#pragma unroll
    for (int m = 0; m < Traits::kMTiles; ++m)
      ldmatrix_x4(a[m], Swizzle<Traits>::step(q, d) + m * 16 * Traits::kRowBytes);
#pragma unroll
    for (int n = 0; n < Traits::kNTiles; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, Swizzle<Traits>::step(k, d) + n * 8 * Traits::kRowBytes);
#pragma unroll
      for (int m = 0; m < Traits::kMTiles; ++m) {
        const float zero[4] = {}, *start = Traits::kModified ? zero : rows.softmax[m].start;
        float *even = &s[m][4 * n], *odd = even + 4;
        mma_16x8x16<Element>(even, a[m], b[0], b[1], d == 0 ? start : even);
        mma_16x8x16<Element>(odd, a[m], b[2], b[3], d == 0 ? start : odd);
      }
    }
  }
}

// O += P V for 16 keys. p: their probabilities as A fragments; v: this lane's ldmatrix address.
template <typename Traits>
__device__ __forceinline__ void multiply_pv(WarpRows<Traits>& rows,
                                            const uint32_t (&p)[Traits::kMTiles][4], uint32_t v) {
  using Element = typename Traits::Element;
#pragma unroll
  for (int d = 0; d < Traits::kDTiles; d += 2) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, Swizzle<Traits>::step(v, d));
#pragma unroll
    for (int m = 0; m < Traits::kMTiles; ++m) {
      mma_16x8x16<Element>(&rows.o[m][4 * d], p[m], b[0], b[1]);
      mma_16x8x16<Element>(&rows.o[m][4 * d + 4], p[m], b[2], b[3]);
    }
  }
}

// ---- one step ---------------------------------------------------------------------------------

// P = exp(S), O += P V, 16 keys at a time. v: this lane's ldmatrix address of the first key.
template <typename Traits>
__device__ __forceinline__ void add_values(Scores<Traits>& s, WarpRows<Traits>& rows,
                                           const Work& work, const Modifier& modifier, int n_begin,
                                           float scale_log2, uint32_t v) {
#pragma unroll
  for (int k = 0; k < Traits::kStepN / 16; ++k) {
    uint32_t p[Traits::kMTiles][4];
    exponentiate<Traits>(s, rows, work, modifier, n_begin, k, scale_log2, p);
    multiply_pv<Traits>(rows, p, v + k * 16 * Traits::kRowBytes);
  }
}

// ---- one tile of work -------------------------------------------------------------------------

// Writes O, divided by the sum, and lse; rows past used_rows get 0 and -inf.
template <typename Traits>
__device__ __forceinline__ void write_tile(const FwdParams& params, const Work& work,
                                           WarpRows<Traits>& rows, float kept_scale,
                                           uint32_t smem_o) {
  using Element = typename Traits::Element;
  const uint32_t thread = fresh_thread_index(), warp = thread / 32, lane = thread % 32;
  const int tile_row = work.m_block * Traits::kBlockM;
  const int first_row = warp * Traits::kWarpRows;
  float* lse = params.lse + work.lse_offset;
  const float sink = params.sinks ? params.sinks[work.head] : -INFINITY;
  __syncwarp();  // all lanes have read the warp's rows of Q, which lie where O goes
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) {
    LazySoftmax<MmaLanes>& softmax = rows.softmax[m];
    softmax.reduce();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane / 4, i = tile_row + row;
      const bool used = i < work.used_rows;
      const auto finished = softmax.finish(half, params.score_scale, params.score_slack, sink);
      const float weight = finished.weight * kept_scale;
      const bool seen = used && weight > 0.f;
      if (lane % 4 == 0 && i < work.rows) lse[i] = used ? finished.lse : -INFINITY;
#pragma unroll
      for (int d = 0; d < Traits::kDTiles; ++d) {
        const float* o = &rows.o[m][4 * d + 2 * half];
        const uint32_t pair = pack<Element>(o[0] * weight, o[1] * weight);
        st_shared(smem_o + Swizzle<Traits>::offset(row, d) + 4 * (lane % 4), seen ? pair : 0u);
      }
    }
  }
  __syncwarp();  // a warp reads back only its own rows
  auto* out = static_cast<Element*>(params.out) + work.head * params.out_stride.head;
  out += work.q_row * params.out_stride.row + work.batch_q * params.out_stride.batch;
  constexpr int kAcross = Swizzle<Traits>::kGroup;
#pragma unroll
  for (int r = lane / kAcross; r < Traits::kWarpRows; r += 32 / kAcross) {
    const int row = first_row + r, i = tile_row + row;
#pragma unroll
    for (int c = lane % kAcross; c < Traits::kChunks; c += kAcross) {
      if (i >= work.rows || c * 8 >= params.head_dim_v) continue;
      const uint4 value = ld_shared_16(smem_o + Swizzle<Traits>::offset(row, c));
      *reinterpret_cast<uint4*>(out + i * params.out_stride.row + c * 8) = value;
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSM)
    fwd_kernel(const __grid_constant__ FwdParams params) {
  using Element = typename Traits::Element;
  extern __shared__ __align__(1024) char smem[];
  const uint32_t smem_q = smem_address(smem), smem_kv = smem_q + Traits::kQBytes;
  // What a tile is lies in shared memory: in registers it would live through the whole loop, which
  // has none to spare.
  __shared__ Work work;
  __shared__ Modifier modifier;
  __shared__ MatrixRows q, k, v;

  for (uint32_t tile = blockIdx.x; tile < params.scheduler.num_tiles; tile += gridDim.x) {
    block_barrier();  // the tile before has left Q's buffer, the last stage and its work
    if (threadIdx.x == 0) {
      find_work<Traits::kBlockM, Traits::kBlockN>(params, tile, work);
      if constexpr (Traits::kModified) {
        if (work.sequence >= 0) modifier = make_modifier(params, work);
      }
      const int kv_head = work.head / params.heads_per_kv,
                batch_k = params.cu_seqlens_k ? 0 : work.sequence;
      q = matrix_rows<Element>(params.q, params.q_stride, work.batch_q, work.q_row, work.head,
                               work.used_rows, params.head_dim);
      k = matrix_rows<Element>(params.k, params.k_stride, batch_k, work.k_row, kv_head,
                               work.visible.seqlen_k, params.head_dim);
      v = matrix_rows<Element>(params.v, params.v_stride, batch_k, work.k_row, kv_head,
                               work.visible.seqlen_k, params.head_dim_v);
    }
    block_barrier();
    if (work.m_block * Traits::kBlockM >= work.rows) continue;

    // Block n goes to stage (work.range.max - 1 - n) % kStages; whether it has K, V or both.
    auto load_block = [&](int n, int stage, bool with_k, bool with_v) {
      if (n >= work.range.min) {
        const uint32_t to = smem_kv + stage * 2 * Traits::kKVBytes;
        const int first = n * Traits::kBlockN;
        if (with_k) load_rows<Traits, Traits::kBlockN>(to, k, first);
        if (with_v) load_rows<Traits, Traits::kBlockN>(to + Traits::kKVBytes, v, first);
      }
      cp_async_commit();  // a group also when it is empty: the waits count groups
    };
    const int n_last = work.range.max - 1;
    if (work.range.min < work.range.max)
      load_rows<Traits, Traits::kBlockM>(smem_q, q, work.m_block * Traits::kBlockM);
    if constexpr (Traits::kStages == 1) load_block(n_last, 0, true, false);
#pragma unroll
    for (int stage = 0; stage < Traits::kStages - 1; ++stage)
      load_block(n_last - stage, stage, true, true);

    WarpRows<Traits> rows = {};
    // This lane's ldmatrix addresses; Swizzle::step moves columns on, an immediate moves rows. Four
    // 8 x 8 matrices: of Q and V rows then columns, of K columns then rows, as the fragments need.
    const uint32_t thread = fresh_thread_index(), lane = thread % 32;
    const int q_row = thread / 32 * Traits::kWarpRows + lane % 16;
    const uint32_t q_lane = smem_q + Swizzle<Traits>::offset(q_row, lane / 16),
                   k_lane = Swizzle<Traits>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2),
                   v_lane = Traits::kKVBytes + Swizzle<Traits>::offset(lane % 16, lane / 16);
    int stage = 0;
    for (int n = n_last; n >= work.range.min; --n) {
      cp_async_wait<Traits::kPending>();  // this thread's part of block n is there
      block_barrier();  // everybody's is, and nobody reads the buffer of block n + 1 any more
      if constexpr (Traits::kStages == 1) {
        load_block(n, 0, false, true);
      } else {
        load_block(n - (Traits::kStages - 1), stage ? stage - 1 : Traits::kStages - 1, true, true);
      }
#pragma unroll(Traits::kUnroll)
      for (int step = 0; step < Traits::kBlockN; step += Traits::kStepN) {
        const int n_begin = n * Traits::kBlockN + step;
        const uint32_t first_key =
            smem_kv + stage * 2 * Traits::kKVBytes + step * Traits::kRowBytes;
        View seen = View::kWhole;
        if (n < work.range.full_min || n >= work.range.full_max) seen = view<Traits>(work, n_begin);
        Scores<Traits> s;
        if (seen != View::kNone) {
          multiply_qk<Traits>(s, rows, q_lane, first_key + k_lane);
          if constexpr (Traits::kModified) modify<Traits>(s, rows, work, modifier, n_begin);
          if (seen == View::kPart) mask<Traits>(s, work, n_begin);
          keep_below_reference<Traits>(s, rows, params.score_scale_log2, params.score_slack);
        }
        if constexpr (Traits::kStages == 1) {
          cp_async_wait<0>();  // this thread's part of V
          block_barrier();     // everybody's is there, and nobody reads K any more
          load_block(n - 1, 0, true, false);
        }
        if (seen != View::kNone) {
          add_values<Traits>(s, rows, work, modifier, n_begin, params.score_scale_log2,
                             first_key + v_lane);
        }
      }
      stage = stage == Traits::kStages - 1 ? 0 : stage + 1;
    }
    write_tile<Traits>(params, work, rows, Traits::kModified ? modifier.kept_scale : 1.f, smem_q);
  }
}

// ---- launch -----------------------------------------------------------------------------------

// Returns cudaGetLastError's answer; the device is the current one.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kStages, bool kModified>
cudaError_t launch_fwd(const FwdParams& params, int64_t grid, cudaStream_t stream) {
  using Traits = FwdTraits<Element, kHeadDim, kBlockM, kBlockN, kStages, kModified>;
  auto* kernel = &fwd_kernel<Traits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(grid), Traits::kThreads, Traits::kSmemBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_ext::fa2

#define INSTANCE(header, element, head_dim, block_m, block_n, stages, scores)                \
  namespace flash_ext::fa2 {                                                                 \
  template cudaError_t launch_##header<element, head_dim, block_m, block_n, stages, scores>( \
      const FwdParams&, int64_t, cudaStream_t);                                              \
  }
