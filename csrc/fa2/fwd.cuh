// FlashAttention-2 forward on mma.sync: one CTA computes one block of kBlockM queries of one head.
//
// Schedule. Four warps split the queries (split-Q: no warp ever needs another's scores), 32 rows
// each, so that every fragment of K and V read from shared memory feeds two MMAs. Keys come in
// blocks of kBlockN from the last visible block to the first, through a ring of kStages buffers
// filled by cp.async. One barrier a block: behind it the block that was waited for is there for all
// warps, and the buffer of the block before it is free for the next load, which then has the whole
// block's work to arrive. S = Q K^T stays in registers, becomes P in place, and P, rounded, is the
// A operand of O += P V. Blocks that all rows see whole skip the mask behind one uniform branch: a
// second copy of the loop costs registers that head_dim 128 does not have (csrc/fa2/README.md).
#pragma once

#include <cuda_runtime.h>

#include "device/mask.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "fa2/launch.h"

namespace flash_ext::fa2 {

using namespace device;

template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kStages_>
struct FwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // the bucket: head_dim and head_dim_v may be less
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kStages = kStages_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kChunks =
      kRowBytes / 16;  // of a row: what cp.async moves and the swizzle permutes
  static constexpr int kWarpRows = kBlockM / kWarps;
  static constexpr int kMTiles = kWarpRows / 16;
  static constexpr int kNTiles = kBlockN / 8;
  static constexpr int kDTiles = kHeadDim / 8;
  static constexpr int kQBytes = kBlockM * kRowBytes;   // O leaves through the same buffer
  static constexpr int kKVBytes = kBlockN * kRowBytes;  // of K, and of V
  static constexpr int kSmemBytes = kQBytes + kStages * 2 * kKVBytes;
  static_assert(kBlockM % (16 * kWarps) == 0, "a warp owns whole MMA tiles of 16 rows");
  static_assert(kBlockN % 16 == 0, "P V takes 16 keys a step");
  static_assert(kHeadDim == 64 || kHeadDim == 128, "the swizzle permutes 8 or 16 chunks of a row");
  static_assert(kStages >= 2, "the next block loads while this one is worked on");
};

// ---- shared memory ----------------------------------------------------------------------------

// Rows of kChunks 16-byte chunks, chunk c of row r at place c ^ (r % 8): ldmatrix then reads eight
// rows from eight different bank groups.
template <typename Traits>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return row * Traits::kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// Rows [first_row, first_row + kRows) of a matrix; rows at or past row_end and chunks past dim
// arrive as zeros and are not read.
template <typename Traits, int kRows>
__device__ __forceinline__ void load_rows(uint32_t smem, const typename Traits::Element* base,
                                          int64_t row_stride, int first_row, int row_end, int dim) {
  constexpr int kRowsPerPass = Traits::kThreads / Traits::kChunks;
  static_assert(kRowsPerPass % 8 == 0, "the swizzle of a thread is the same in every pass");
  const int row = threadIdx.x / Traits::kChunks, chunk = threadIdx.x % Traits::kChunks;
  const auto* source = base + (first_row + row) * row_stride + chunk * 8;
  const bool chunk_used = chunk * 8 < dim;
  smem += swizzled<Traits>(row, chunk);
#pragma unroll
  for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
    const int r = pass * kRowsPerPass;
    cp_async_16(smem + r * Traits::kRowBytes, source, chunk_used && first_row + row + r < row_end);
    source += kRowsPerPass * row_stride;
  }
}

// ---- the two products -------------------------------------------------------------------------

// S = Q K^T. q: this lane's ldmatrix address of the warp's rows; k: of the block.
template <typename Traits>
__device__ __forceinline__ void multiply_qk(float (&s)[Traits::kMTiles][4 * Traits::kNTiles],
                                            uint32_t q, uint32_t k) {
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4 * Traits::kNTiles; ++i) s[m][i] = 0.f;
  }
#pragma unroll
  for (int d = 0; d < Traits::kHeadDim / 16; ++d) {
    uint32_t a[Traits::kMTiles][4];
#pragma unroll
    for (int m = 0; m < Traits::kMTiles; ++m)
      ldmatrix_x4(a[m], (q ^ (d << 5)) + m * 16 * Traits::kRowBytes);
#pragma unroll
    for (int n = 0; n < Traits::kNTiles; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, (k ^ (d << 5)) + n * 8 * Traits::kRowBytes);
#pragma unroll
      for (int m = 0; m < Traits::kMTiles; ++m) {
        mma_16x8x16<typename Traits::Element>(&s[m][4 * n], a[m], b[0], b[2]);
        mma_16x8x16<typename Traits::Element>(&s[m][4 * n + 4], a[m], b[1], b[3]);
      }
    }
  }
}

// O += P V. v: this lane's ldmatrix address of the block.
template <typename Traits>
__device__ __forceinline__ void multiply_pv(float (&o)[Traits::kMTiles][4 * Traits::kDTiles],
                                            const float (&p)[Traits::kMTiles][4 * Traits::kNTiles],
                                            uint32_t v) {
  using Element = typename Traits::Element;
#pragma unroll
  for (int n = 0; n < Traits::kNTiles; n += 2) {
    uint32_t a[Traits::kMTiles][4];
#pragma unroll
    for (int m = 0; m < Traits::kMTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[m][i] = pack<Element>(p[m][4 * n + 2 * i], p[m][4 * n + 2 * i + 1]);
    }
#pragma unroll
    for (int d = 0; d < Traits::kDTiles; d += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, (v ^ (d << 4)) + n * 8 * Traits::kRowBytes);
#pragma unroll
      for (int m = 0; m < Traits::kMTiles; ++m) {
        mma_16x8x16<Element>(&o[m][4 * d], a[m], b[0], b[1]);
        mma_16x8x16<Element>(&o[m][4 * d + 4], a[m], b[2], b[3]);
      }
    }
  }
}

// The first row of a sequence, of one head.
template <typename Element>
__device__ __forceinline__ const Element* matrix(const void* tensor, const Strides& stride,
                                                 int batch, int64_t row, int head) {
  return static_cast<const Element*>(tensor) + batch * stride.batch + row * stride.row +
         head * stride.head;
}

// ---- one tile of work -------------------------------------------------------------------------

// Writes O = acc / sum and lse = ln(sum) + max * scale; rows past used_rows get 0 and -inf.
template <typename Traits>
__device__ __forceinline__ void write_tile(const FwdParams& params, const Work& work,
                                           Softmax (&softmax)[Traits::kMTiles],
                                           float (&o)[Traits::kMTiles][4 * Traits::kDTiles],
                                           uint32_t smem_o) {
  using Element = typename Traits::Element;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile_row = work.m_block * Traits::kBlockM;
  const int warp_row = warp * Traits::kWarpRows;
  float* lse = params.lse + work.lse_offset;
  __syncwarp();  // all lanes have read the warp's rows of Q, which lie where O goes
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) {
    softmax[m].reduce();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * m + 8 * half + lane / 4, i = tile_row + row;
      const float sum = softmax[m].sum[half];
      const bool seen = i < work.used_rows && sum > 0.f;
      const float inverse = seen ? 1.f / sum : 0.f;
      if (lane % 4 == 0 && i < work.rows) {
        lse[i] = seen ? softmax[m].lse(half, params.softmax_scale) : -INFINITY;
      }
#pragma unroll
      for (int d = 0; d < Traits::kDTiles; ++d) {
        const float low = seen ? o[m][4 * d + 2 * half] * inverse : 0.f;
        const float high = seen ? o[m][4 * d + 2 * half + 1] * inverse : 0.f;
        st_shared(smem_o + swizzled<Traits>(row, d) + 4 * (lane % 4), pack<Element>(low, high));
      }
    }
  }
  __syncwarp();  // a warp reads back only its own rows
  auto* out = static_cast<Element*>(params.out) + work.head * params.out_stride.head;
  out += work.q_row * params.out_stride.row + work.batch_q * params.out_stride.batch;
  const int chunk = lane % Traits::kChunks;
#pragma unroll
  for (int r = lane / Traits::kChunks; r < Traits::kWarpRows; r += 32 / Traits::kChunks) {
    const int row = warp_row + r, i = tile_row + row;
    if (i >= work.rows || chunk * 8 >= params.head_dim_v) continue;
    const uint4 value = ld_shared_16(smem_o + swizzled<Traits>(row, chunk));
    *reinterpret_cast<uint4*>(out + i * params.out_stride.row + chunk * 8) = value;
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    fwd_kernel(const __grid_constant__ FwdParams params) {
  using Element = typename Traits::Element;
  extern __shared__ __align__(1024) char smem[];
  const uint32_t smem_q = smem_address(smem), smem_kv = smem_q + Traits::kQBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // This lane's ldmatrix addresses: XOR with d * 32 moves 16 columns on, an immediate moves rows.
  const uint32_t q_lane =
      smem_q + swizzled<Traits>(warp * Traits::kWarpRows + lane % 16, lane / 16);
  const uint32_t kv_lane = smem_kv + swizzled<Traits>(lane % 16, lane / 16);
  // What a tile is lies in shared memory: in registers it would live through the whole loop, which
  // has none to spare.
  __shared__ Work work;
  __shared__ const Element *k, *v;  // of the sequence and head

  for (uint32_t tile = blockIdx.x; tile < params.scheduler.num_tiles; tile += gridDim.x) {
    block_barrier();  // the tile before has left Q's buffer, the last stage and its work
    if (threadIdx.x == 0) {
      find_work<Traits::kBlockM, Traits::kBlockN>(params, tile, work);
      const int kv_head = work.head / params.heads_per_kv,
                batch_k = params.cu_seqlens_k ? 0 : work.sequence;
      k = matrix<Element>(params.k, params.k_stride, batch_k, work.k_row, kv_head);
      v = matrix<Element>(params.v, params.v_stride, batch_k, work.k_row, kv_head);
    }
    block_barrier();
    if (work.m_block * Traits::kBlockM >= work.rows) continue;

    const auto* q = matrix<Element>(params.q, params.q_stride, work.batch_q, work.q_row, work.head);
    // Block n goes to stage (work.range.max - 1 - n) % kStages. One committed group a block, also
    // when it is empty, so that the waits count blocks.
    auto load_block = [&](int n, int stage) {
      if (n >= work.range.min) {
        const uint32_t to = smem_kv + stage * 2 * Traits::kKVBytes;
        const int first = n * Traits::kBlockN, end = work.visible.seqlen_k;
        load_rows<Traits, Traits::kBlockN>(to, k, params.k_stride.row, first, end, params.head_dim);
        load_rows<Traits, Traits::kBlockN>(to + Traits::kKVBytes, v, params.v_stride.row, first,
                                           end, params.head_dim_v);
      }
      cp_async_commit();
    };

    if (work.range.min < work.range.max) {
      load_rows<Traits, Traits::kBlockM>(smem_q, q, params.q_stride.row,
                                         work.m_block * Traits::kBlockM, work.used_rows,
                                         params.head_dim);
    }
#pragma unroll
    for (int stage = 0; stage < Traits::kStages - 1; ++stage)
      load_block(work.range.max - 1 - stage, stage);

    float o[Traits::kMTiles][4 * Traits::kDTiles] = {};
    Softmax softmax[Traits::kMTiles];
    const float sink = params.sinks ? params.sinks[work.head] / params.softmax_scale : 0.f;
#pragma unroll
    for (int m = 0; m < Traits::kMTiles; ++m) softmax[m].start(params.sinks != nullptr, sink);

    int stage = 0;
    for (int n = work.range.max - 1; n >= work.range.min; --n) {
      cp_async_wait<Traits::kStages - 2>();  // this thread's part of block n is there
      block_barrier();  // everybody's is, and nobody reads the buffer of block n + 1 any more
      const int free_stage = stage == 0 ? Traits::kStages - 1 : stage - 1;
      float s[Traits::kMTiles][4 * Traits::kNTiles];
      const uint32_t k_lane = kv_lane + stage * 2 * Traits::kKVBytes;
      multiply_qk<Traits>(s, q_lane, k_lane);
      load_block(n - (Traits::kStages - 1), free_stage);
      const bool masked = n < work.range.full_min || n >= work.range.full_max;
      if (masked) {
#pragma unroll
        for (int m = 0; m < Traits::kMTiles; ++m) {
          apply_mask(s[m], work.visible,
                     work.m_block * Traits::kBlockM + warp * Traits::kWarpRows + 16 * m + lane / 4,
                     n * Traits::kBlockN);
        }
      }
#pragma unroll
      for (int m = 0; m < Traits::kMTiles; ++m) {
        float rescale[2];
        softmax[m].step(s[m], params.softmax_scale_log2, rescale);
        rescale_rows(o[m], rescale);
      }
      multiply_pv<Traits>(o, s, k_lane + Traits::kKVBytes);
      stage = stage == Traits::kStages - 1 ? 0 : stage + 1;
    }
    write_tile<Traits>(params, work, softmax, o, smem_q);
  }
}

// ---- launch -----------------------------------------------------------------------------------

// Returns cudaGetLastError's answer; the device is the current one.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kStages>
cudaError_t launch_fwd(const FwdParams& params, int64_t grid, cudaStream_t stream) {
  using Traits = FwdTraits<Element, kHeadDim, kBlockM, kBlockN, kStages>;
  auto* kernel = &fwd_kernel<Traits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(grid), Traits::kThreads, Traits::kSmemBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_ext::fa2

#define INSTANCE(header, element, head_dim, block_m, block_n, stages)               \
  template cudaError_t                                                              \
      flash_ext::fa2::launch_##header<element, head_dim, block_m, block_n, stages>( \
          const FwdParams&, int64_t, cudaStream_t);
