// The forward for Turing (7.5), on mma.sync m16n8k8: one CTA computes one block of kBlockM queries
// of one head.
//
// Schedule. The warps split the queries, and a warp keeps its rows of Q in registers as fragments
// from the first block of keys to the last: shared memory, of which an SM has 64 KB, is for K and V
// alone, and nearly half of the ldmatrix of S = Q K^T fall away. Keys come in blocks of kBlockN
// from the last visible one to the first. There is no cp.async: a thread asks for its part of K of
// the next block before S of this one, and puts it where K was behind it, when everybody has left
// that; and so with V, around P V. So a load has half a block's work to arrive, and costs the
// registers that it waits in. One buffer of each and two barriers a block: two buffers would halve
// the keys of a block, and cost as many barriers.
//
// S stays in registers, becomes P in place, and P, rounded, is the A operand of O += P V. Q comes
// from and O goes to global memory 16 bytes a lane, traded within a quad: neither needs shared
// memory, and no warp waits for another at the end of a tile.
#pragma once

#include <cuda_runtime.h>

#include "device/mma.cuh"
#include "device/warp_rows.cuh"
#include "fa1/fwd_cut.h"
#include "fa1/launch.h"
#include "fa1/staged_block.cuh"

namespace flash_ext::fa1 {

using namespace device;

template <typename Cut>
struct FwdTraits : Cut {
  using Element = __half;
  using Lanes = MmaLanes;
  static constexpr int kSharers = 1;  // no other warp has its rows
};

// A warp's rows of Q as A fragments: of every 16 rows and 8 columns, row g and row g + 8.
template <typename Traits>
using Queries = uint32_t[Traits::kMTiles][Traits::kHeldChunks][2];

// How the columns that are not held lie in shared memory.
template <typename Traits>
struct SpareColumns {
  static constexpr int kChunks = Traits::kChunks - Traits::kHeldChunks, kRowBytes = 16 * kChunks;
};

// row: this lane's first; spare: the columns that are not held. Four lanes load 64 bytes of a row
// and trade them.
template <typename Traits>
__device__ __forceinline__ void load_queries(Queries<Traits>& q, uint32_t spare,
                                             const MatrixRows& rows, int row) {
  const int part = fresh_thread_index() % 4;
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t i = row + 16 * m + 8 * half;
      const char* source = rows.first + part * 16 + uint64_t{i} * rows.stride;
      const int dim = static_cast<int>(i) < rows.end ? rows.dim / 8 : 0;
#pragma unroll
      for (int c = 0; c < Traits::kChunks; c += 4) {
        uint4 chunk = make_uint4(0, 0, 0, 0);
        if (c + part < dim) chunk = ld_global_16(source + c * 16);
        if constexpr (Traits::kHeldChunks < Traits::kChunks) {
          if (c >= Traits::kHeldChunks) {
            st_shared_16(spare + Swizzle<SpareColumns<Traits>>::offset(
                                     i % Traits::kBlockM, c + part - Traits::kHeldChunks),
                         chunk);
            continue;
          }
        }
        uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        transpose_quad(words);
#pragma unroll
        for (int j = 0; j < 4; ++j) q[m][c + j][half] = words[j];
      }
    }
  }
  __syncwarp();  // a warp reads only its own rows
}

// The fragments of chunks d and d + 1 of the warp's rows.
template <typename Traits>
__device__ __forceinline__ void take_queries(uint32_t (&a)[Traits::kMTiles][4],
                                             const Queries<Traits>& q, uint32_t spare, int d) {
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) {
    if (d < Traits::kHeldChunks) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m][i] = q[m][d + i / 2][i % 2];
    } else if constexpr (Traits::kHeldChunks < Traits::kChunks) {
      using Spare = Swizzle<SpareColumns<Traits>>;
      const uint32_t thread = fresh_thread_index(), lane = thread % 32;
      const int row = thread / 32 * Traits::kWarpRows + 16 * m + lane % 16;
      ldmatrix_x4(a[m],
                  Spare::step(spare + Spare::offset(row, lane / 16), d - Traits::kHeldChunks));
    }
  }
}

// ---- the two products -------------------------------------------------------------------------

// Where this lane's row of an ldmatrix lies in a block of K and of V; Swizzle::step moves columns
// on, an immediate moves rows. Four 8 x 8 matrices: of V rows then columns, of K columns then rows,
// as the fragments need. Computed at each block: no register holds them through the loop.
template <typename Traits>
__device__ __forceinline__ uint32_t k_lane() {
  const uint32_t lane = fresh_thread_index() % 32;
  return Swizzle<Traits>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <typename Traits>
__device__ __forceinline__ uint32_t v_lane() {
  const uint32_t lane = fresh_thread_index() % 32;
  return Swizzle<Traits>::offset(lane % 16, lane / 16);
}

// S = Q K^T - reference; of modified scores Q K^T alone. k: this lane's ldmatrix address of the
// first key.
template <typename Traits>
__device__ __forceinline__ void multiply_qk(Scores<Traits>& s, const Queries<Traits>& q,
                                            uint32_t spare, WarpRows<Traits>& rows, uint32_t k) {
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) rows.softmax[m].keep_apart();
#pragma unroll
  for (int d = 0; d < Traits::kChunks; d += 2) {
    uint32_t a[Traits::kMTiles][4];
    take_queries<Traits>(a, q, spare, d);
#pragma unroll
    for (int n = 0; n < Traits::kNTiles; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, Swizzle<Traits>::step(k, d) + n * 8 * Traits::kRowBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < Traits::kMTiles; ++m) {
          const float zero[4] = {}, *start = Traits::kModified ? zero : rows.softmax[m].start;
          float *even = &s[m][4 * n], *odd = even + 4;
          mma_16x8x8(even, a[m][2 * i], a[m][2 * i + 1], b[i], d + i == 0 ? start : even);
          mma_16x8x8(odd, a[m][2 * i], a[m][2 * i + 1], b[2 + i], d + i == 0 ? start : odd);
        }
      }
    }
  }
}

// O += P V for 16 keys. p: their probabilities as A fragments; v: this lane's ldmatrix address.
template <typename Traits>
__device__ __forceinline__ void multiply_pv(WarpRows<Traits>& rows,
                                            const uint32_t (&p)[Traits::kMTiles][4], uint32_t v) {
#pragma unroll
  for (int d = 0; d < Traits::kDTiles; d += 2) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, Swizzle<Traits>::step(v, d));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int m = 0; m < Traits::kMTiles; ++m) {
        float *even = &rows.o[m][4 * d], *odd = even + 4;
        mma_16x8x8(even, p[m][2 * i], p[m][2 * i + 1], b[i], even);
        mma_16x8x8(odd, p[m][2 * i], p[m][2 * i + 1], b[2 + i], odd);
      }
    }
  }
}

// ---- one block of keys ------------------------------------------------------------------------

// S, ready for exponentials. k: this lane's ldmatrix address of the block's first key.
template <typename Traits>
__device__ __forceinline__ void make_scores(Scores<Traits>& s, const FwdParams& params,
                                            const Work& work, const Modifier& modifier,
                                            const Queries<Traits>& q, uint32_t spare,
                                            WarpRows<Traits>& rows, View seen, int n_begin,
                                            uint32_t k) {
  multiply_qk<Traits>(s, q, spare, rows, k);
  if constexpr (Traits::kModified) modify<Traits>(s, rows, work, modifier, n_begin);
  if (seen == View::kPart) mask<Traits>(s, work, n_begin);
  keep_below_reference<Traits>(s, rows, params.score_scale_log2, params.score_slack);
}

// ---- one tile of work -------------------------------------------------------------------------

// Writes O, divided by the sum, and lse; rows past used_rows get 0 and -inf.
template <typename Traits>
__device__ __forceinline__ void write_tile(const FwdParams& params, const Work& work,
                                           WarpRows<Traits>& rows, float kept_scale) {
  const int part = fresh_thread_index() % 4, first_row = lane_row<Traits>(work);
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
      if (part == 0 && i < work.rows) lse[i] = used ? finished.lse : -INFINITY;
#pragma unroll
      for (int d = 0; d < Traits::kDTiles; d += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* o = &rows.o[m][4 * (d + j) + 2 * half];
          words[j] = seen ? pack<__half>(o[0] * weight, o[1] * weight) : 0u;
        }
        transpose_quad(words);
        const int column = (d + part) * 8;
        if (i >= work.rows || column >= params.head_dim_v) continue;
        st_global_16(out + i * params.out_stride.row + column, words);
      }
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSM)
    fwd_kernel(const __grid_constant__ FwdParams params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const uint32_t smem_k = smem_address(smem_bytes), smem_v = smem_k + Traits::kKVBytes,
                 spare = smem_v + Traits::kKVBytes;
  // What a tile is lies in shared memory: in registers it would live through the whole loop.
  __shared__ Work work;
  __shared__ Modifier modifier;
  __shared__ MatrixRows q_rows, k_rows, v_rows;

  for (uint32_t tile = blockIdx.x; tile < params.scheduler.num_tiles; tile += gridDim.x) {
    block_barrier();  // the tile before has left K and V and its work
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

    Queries<Traits> q;
    StagedRows<Traits> ahead;
    const int n_last = work.range.max - 1;
    if (work.range.min < work.range.max) {
      ahead.load(k_rows, n_last * Traits::kBlockN);
      load_queries<Traits>(q, spare, q_rows, lane_row<Traits>(work));
      ahead.store(smem_k);
      ahead.load(v_rows, n_last * Traits::kBlockN);
    }
    WarpRows<Traits> rows = {};
    for (int n = n_last; n >= work.range.min; --n) {
      const int n_begin = n * Traits::kBlockN;
      const bool more = n > work.range.min;
      block_barrier();  // K is there, and nobody reads V of the block before any more
      ahead.store(smem_v);
      if (more) ahead.load(k_rows, n_begin - Traits::kBlockN);
      View seen = View::kWhole;
      if (n < work.range.full_min || n >= work.range.full_max) seen = view<Traits>(work, n_begin);
      Scores<Traits> s;
      if (seen != View::kNone) {
        make_scores<Traits>(s, params, work, modifier, q, spare, rows, seen, n_begin,
                            smem_k + k_lane<Traits>());
      }
      block_barrier();  // V is there, and nobody reads K any more
      if (more) {
        ahead.store(smem_k);
        ahead.load(v_rows, n_begin - Traits::kBlockN);
      }
      if (seen == View::kNone) continue;
      const uint32_t v = smem_v + v_lane<Traits>();
#pragma unroll
      for (int i = 0; i < Traits::kStepN / 16; ++i) {
        uint32_t p[Traits::kMTiles][4];
        exponentiate<Traits>(s, rows, work, modifier, n_begin, i, params.score_scale_log2, p);
        multiply_pv<Traits>(rows, p, v + i * 16 * Traits::kRowBytes);
      }
    }
    write_tile<Traits>(params, work, rows, Traits::kModified ? modifier.kept_scale : 1.f);
  }
}

// ---- launch -----------------------------------------------------------------------------------

// Returns cudaGetLastError's answer; the device is the current one.
template <int kHeadDim, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_fwd(const FwdParams& params, int64_t grid, cudaStream_t stream) {
  using Traits = FwdTraits<FwdCut<kHeadDim, kBlockM, kBlockN, kModified>>;
  auto* kernel = &fwd_kernel<Traits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(grid), Traits::kThreads, Traits::kSmemBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_ext::fa1

#define INSTANCE(header, ...)                                                                 \
  namespace flash_ext::fa1 {                                                                  \
  template cudaError_t launch_##header<__VA_ARGS__>(const FwdParams&, int64_t, cudaStream_t); \
  }
