// FlashAttention-2 forward on mma.sync: one CTA computes one block of kBlockM queries of one head.
//
// Schedule. The warps split the queries (split-Q), 32 for each, or 32 for two where O of so many
// does not fit one warp's registers. Keys come in blocks of kBlockN from the last visible block to
// the first (fwd_load.cuh), and a warp takes kStepN of them at a time: S = Q K^T stays in
// registers, becomes P in place, and P, rounded, is the A operand of O += P V. Two warps that share
// 32 queries make S and P of half of the keys each, trade P, and sum half of the columns of O each
// (fwd_share.cuh): sixteen queries for each would need no trade, but read K and V twice as often.
//
// An mma.sync and the arithmetic between two of them take turns at the register file, so what
// counts is the number of instructions a score costs (csrc/fa2/README.md): four and a half here.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "device/mask.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/warp_rows.cuh"
#include "fa2/fwd_cut.h"
#include "fa2/fwd_load.cuh"
#include "fa2/fwd_share.cuh"
#include "fa2/launch.h"
#include "fa2/smem_tile.cuh"

namespace flash_ext::fa2 {

using namespace device;

template <typename Element_, typename Cut, bool kModified_>
struct FwdTraits : Cut {
  using Element = Element_;
  using Lanes = MmaLanes;
  using Cut::kHeadDim, Cut::kBlockN, Cut::kSharers, Cut::kStages;
  static constexpr bool kModified = kModified_;
  static constexpr int kChunks = Cut::kRowBytes / 16;  // of a row: what cp.async moves
  // Where registers for a third CTA cost nothing: measured, it is worth 10 % at head_dim 64.
  static constexpr int kBlocksPerSM = kHeadDim == 64 && !kModified ? 3 : 1;
  // Keys of one step: their scores need registers beside O. Sharers take a block in one step.
  static constexpr int kAlone = kBlockN < 64 || kHeadDim > 64 ? 32 : 64;
  static constexpr int kStepN = kSharers > 1 ? kBlockN : kAlone;
  static constexpr int kWarpN = kStepN / kSharers;  // of them, those whose scores a warp makes
  // Unrolled steps are 3 % faster at head_dim 128; modified scores have no registers for it.
  static constexpr int kUnroll = kModified ? 1 : kBlockN / kStepN;
  static constexpr int kNTiles = kWarpN / 8;
  static constexpr int kDTiles = kHeadDim / 8 / kSharers;  // of O: pairs of them, every kSharers-th
  using Sharers = std::conditional_t<kSharers == 1, Alone, Pair<FwdTraits>>;
  using Loads = std::conditional_t<kStages == 1, AlternatingLoads<FwdTraits>, RingLoads<FwdTraits>>;
  static_assert(kBlockN % kStepN == 0 && kWarpN % 16 == 0, "whole steps");
  static_assert(kHeadDim % 32 == 0, "the swizzle permutes 4 or 8 chunks");
  static_assert(kStages >= 2 || kBlockN == kStepN, "V is waited for once a block");
  static_assert(kSharers == 1 || kStages == 1, "P has no barrier but that of V");
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
__device__ __forceinline__ void multiply_pv(float (&o)[Traits::kMTiles][4 * Traits::kDTiles],
                                            const uint32_t (&p)[Traits::kMTiles][4], uint32_t v) {
  using Element = typename Traits::Element;
#pragma unroll
  for (int d = 0; d < Traits::kDTiles; d += 2) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, Swizzle<Traits>::step(v, Traits::kSharers * d));
#pragma unroll
    for (int m = 0; m < Traits::kMTiles; ++m) {
      mma_16x8x16<Element>(&o[m][4 * d], p[m], b[0], b[1]);
      mma_16x8x16<Element>(&o[m][4 * d + 4], p[m], b[2], b[3]);
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
    multiply_pv<Traits>(rows.o, p, v + k * 16 * Traits::kRowBytes);
  }
}

// The same in two parts where two warps share the rows: P of a warp's own keys, which it also gives
// to the other,
template <typename Traits>
using Probabilities = uint32_t[Traits::kWarpN / 16][Traits::kMTiles][4];

template <typename Traits>
__device__ __forceinline__ void make_own_p(Probabilities<Traits>& p, Scores<Traits>& s,
                                           WarpRows<Traits>& rows, const Work& work,
                                           const Modifier& modifier, int n_begin, float scale_log2,
                                           const Pair<Traits>& pair) {
  const uint32_t to = pair.p_address(Place<Traits>().sharer);
#pragma unroll
  for (int k = 0; k < Traits::kWarpN / 16; ++k) {
    exponentiate<Traits>(s, rows, work, modifier, n_begin, k, scale_log2, p[k]);
#pragma unroll
    for (int m = 0; m < Traits::kMTiles; ++m) st_shared_16(pair.fragment(to, k, m), p[k][m]);
  }
}

// and, behind the barrier that V waits for, O += P V of all keys, its own first.
template <typename Traits>
__device__ __forceinline__ void add_shared_values(WarpRows<Traits>& rows,
                                                  const Probabilities<Traits>& own,
                                                  const Pair<Traits>& pair, uint32_t v) {
  constexpr int kWarpKeys = Traits::kWarpN * Traits::kRowBytes;
  const int sharer = Place<Traits>().sharer;
  v += sharer * kWarpKeys;
#pragma unroll
  for (int k = 0; k < Traits::kWarpN / 16; ++k)
    multiply_pv<Traits>(rows.o, own[k], v + k * 16 * Traits::kRowBytes);
  v += sharer ? -kWarpKeys : kWarpKeys;
  const uint32_t from = pair.p_address(1 - sharer);
#pragma unroll
  for (int k = 0; k < Traits::kWarpN / 16; ++k) {
    uint32_t p[Traits::kMTiles][4];
#pragma unroll
    for (int m = 0; m < Traits::kMTiles; ++m) ld_shared_16(p[m], pair.fragment(from, k, m));
    multiply_pv<Traits>(rows.o, p, v + k * 16 * Traits::kRowBytes);
  }
}

// ---- one tile of work -------------------------------------------------------------------------

// Writes O, divided by the sum, and lse; rows past used_rows get 0 and -inf. smem: where O of the
// tile goes.
template <typename Traits>
__device__ __forceinline__ void write_tile(const FwdParams& params, const Work& work,
                                           WarpRows<Traits>& rows,
                                           const typename Traits::Sharers& sharers,
                                           float kept_scale, uint32_t smem) {
  using Element = typename Traits::Element;
  const Place<Traits> place;
  const int tile_row = work.m_block * Traits::kBlockM, lane = place.lane;
  float* lse = params.lse + work.lse_offset;
  const float sink = params.sinks ? params.sinks[work.head] : -INFINITY;
  sharers.barrier();  // who reads these rows of Q has read them: O goes where they lie
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) {
    LazySoftmax<MmaLanes>& softmax = rows.softmax[m];
    softmax.reduce();
    sharers.combine(m, softmax.sum, [](float a, float b) { return a + b; });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.first_row() + 16 * m + 8 * half + lane / 4, i = tile_row + row;
      const bool used = i < work.used_rows;
      const auto finished = softmax.finish(half, params.score_scale, params.score_slack, sink);
      const float weight = finished.weight * kept_scale;
      const bool seen = used && weight > 0.f;
      if (lane % 4 == 0 && i < work.rows) lse[i] = used ? finished.lse : -INFINITY;
#pragma unroll
      for (int d = 0; d < Traits::kDTiles; ++d) {
        const float* o = &rows.o[m][4 * d + 2 * half];
        const uint32_t pair = pack<Element>(o[0] * weight, o[1] * weight);
        const int chunk = Traits::kSharers * (d - d % 2) + 2 * place.sharer + d % 2;
        st_shared(smem + Swizzle<Traits>::offset(row, chunk) + 4 * (lane % 4), seen ? pair : 0u);
      }
    }
  }
  sharers.barrier();  // O of the rows is there
  auto* out = static_cast<Element*>(params.out) + work.head * params.out_stride.head;
  out += work.q_row * params.out_stride.row + work.batch_q * params.out_stride.batch;
  constexpr int kAcross = Swizzle<Traits>::kGroup, kRows = Traits::kWarpRows / Traits::kSharers;
#pragma unroll
  for (int r = lane / kAcross; r < kRows; r += 32 / kAcross) {
    const int row = place.first_row() + place.sharer * kRows + r, i = tile_row + row;
#pragma unroll
    for (int c = lane % kAcross; c < Traits::kChunks; c += kAcross) {
      if (i >= work.rows || c * 8 >= params.head_dim_v) continue;
      const uint4 value = ld_shared_16(smem + Swizzle<Traits>::offset(row, c));
      *reinterpret_cast<uint4*>(out + i * params.out_stride.row + c * 8) = value;
    }
  }
}

// What a tile is. It lies in shared memory: in registers it would live through the whole loop,
// which has none to spare.
struct Tile {
  Work work;
  Modifier modifier;
  MatrixRows q, k, v;
};

template <typename Traits>
__device__ __forceinline__ void find_tile(const FwdParams& params, uint32_t number, Tile& tile) {
  using Element = typename Traits::Element;
  Work& work = tile.work;
  find_work<Traits::kBlockM, Traits::kBlockN>(params, number, work);
  if constexpr (Traits::kModified) {
    if (work.sequence >= 0) tile.modifier = make_modifier(params, work);
  }
  const int kv_head = work.head / params.heads_per_kv,
            batch_k = params.cu_seqlens_k ? 0 : work.sequence;
  tile.q = matrix_rows<Element>(params.q, params.q_stride, work.batch_q, work.q_row, work.head,
                                work.used_rows, params.head_dim);
  tile.k = matrix_rows<Element>(params.k, params.k_stride, batch_k, work.k_row, kv_head,
                                work.visible.seqlen_k, params.head_dim);
  tile.v = matrix_rows<Element>(params.v, params.v_stride, batch_k, work.k_row, kv_head,
                                work.visible.seqlen_k, params.head_dim_v);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSM)
    fwd_kernel(const __grid_constant__ FwdParams params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const uint32_t smem = smem_address(smem_bytes);
  __shared__ Tile tile;
  const Work& work = tile.work;

  for (uint32_t i = blockIdx.x; i < params.scheduler.num_tiles; i += gridDim.x) {
    block_barrier();  // the tile before has left Q's buffer, the last stage and its facts
    if (threadIdx.x == 0) find_tile<Traits>(params, i, tile);
    block_barrier();
    if (work.m_block * Traits::kBlockM >= work.rows) continue;

    if (work.range.min < work.range.max)
      load_rows<Traits, Traits::kBlockM>(smem, tile.q, work.m_block * Traits::kBlockM);
    typename Traits::Loads loads{{work.range, tile.k, tile.v, smem + Traits::kKV}};
    loads.start();
    const typename Traits::Sharers sharers{smem};

    WarpRows<Traits> rows = {};
    // This lane's ldmatrix addresses; Swizzle::step moves columns on, an immediate moves rows. Four
    // 8 x 8 matrices: of Q and V rows then columns, of K columns then rows, as the fragments need.
    const Place<Traits> place;
    const int lane = place.lane, first_key = place.sharer * Traits::kWarpN;
    const uint32_t q_lane =
        smem + Swizzle<Traits>::offset(place.first_row() + lane % 16, lane / 16);
    const uint32_t k_lane =
        Swizzle<Traits>::offset(first_key + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t v_lane =
        Traits::kKVBytes + Swizzle<Traits>::offset(lane % 16, 2 * place.sharer + lane / 16);
    for (int n = work.range.max - 1; n >= work.range.min; --n) {
      const uint32_t keys = loads.keys(n);
#pragma unroll(Traits::kUnroll)
      for (int j = 0; j < Traits::kBlockN; j += Traits::kStepN) {
        const int n_begin = n * Traits::kBlockN + j;
        const uint32_t step_keys = keys + j * Traits::kRowBytes;
        View seen = View::kWhole;
        if (n < work.range.full_min || n >= work.range.full_max) seen = view<Traits>(work, n_begin);
        Scores<Traits> s;
        Probabilities<Traits> p;
        if (seen != View::kNone) {
          multiply_qk<Traits>(s, rows, q_lane, step_keys + k_lane);
          const int n_own = n_begin + first_key;
          if constexpr (Traits::kModified) modify<Traits>(s, rows, work, tile.modifier, n_own);
          if (seen == View::kPart) mask<Traits>(s, work, n_own);
          keep_below_reference<Traits>(s, rows, params.score_scale_log2, params.score_slack,
                                       sharers);
          if constexpr (Traits::kSharers > 1) {
            make_own_p<Traits>(p, s, rows, work, tile.modifier, n_own, params.score_scale_log2,
                               sharers);
          }
        }
        loads.values(n);
        if (seen != View::kNone) {
          if constexpr (Traits::kSharers > 1) {
            add_shared_values<Traits>(rows, p, sharers, step_keys + v_lane);
          } else {
            add_values<Traits>(s, rows, work, tile.modifier, n_begin, params.score_scale_log2,
                               step_keys + v_lane);
          }
        }
      }
      loads.next(n);
    }
    write_tile<Traits>(params, work, rows, sharers,
                       Traits::kModified ? tile.modifier.kept_scale : 1.f, smem);
  }
}

// ---- launch -----------------------------------------------------------------------------------

// Returns cudaGetLastError's answer; the device is the current one.
template <typename Traits>
cudaError_t launch(void (*kernel)(FwdParams), const FwdParams& params, int64_t grid,
                   cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(grid), Traits::kThreads, Traits::kSmemBytes, stream>>>(params);
  return cudaGetLastError();
}

template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kStages, bool kModified>
cudaError_t launch_fwd(const FwdParams& params, int64_t grid, cudaStream_t stream) {
  using Traits = FwdTraits<Element, FwdCut<kHeadDim, kBlockM, kBlockN, kStages>, kModified>;
  return launch<Traits>(&fwd_kernel<Traits>, params, grid, stream);
}

}  // namespace flash_ext::fa2

#define INSTANCE(header, element, head_dim, block_m, block_n, stages, scores)                \
  namespace flash_ext::fa2 {                                                                 \
  template cudaError_t launch_##header<element, head_dim, block_m, block_n, stages, scores>( \
      const FwdParams&, int64_t, cudaStream_t);                                              \
  }
