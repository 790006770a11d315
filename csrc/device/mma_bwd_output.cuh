// How dQ, dK and dV leave the backward's main kernel.
#pragma once

#include "device/bwd_rows.h"
#include "device/mma_bwd_tile.cuh"

namespace flash_ext::device {

// ---- dQ ---------------------------------------------------------------------------------------

// Adds this lane's four values of an accumulator tile where dq_index has them.
__device__ __forceinline__ void add_fragment(float* to, const float* values) {
  if constexpr (kVectorAtomics) {
    red_add_floats(to, values[0], values[1], values[2], values[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) atomicAdd(to + 32 * i, values[i]);
  }
}

// Adds a tile's dQ, this warp's part, to its sum in global memory.
template <typename Traits>
__device__ __forceinline__ void add_dq(
    float* sum, const float (&dq)[Traits::kDqRowBlocks][8 * Traits::kDqColumnBlocks], int warp_m,
    int warp_d) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Traits::kDqRowBlocks; ++m) {
#pragma unroll
    for (int i = 0; i < 2 * Traits::kDqColumnBlocks; ++i) {
      const int row_block = warp_m * Traits::kDqRowBlocks + m;
      const int j = 2 * (warp_d + Traits::kDqWarpsD * (i / 2)) + i % 2;
      float* to = sum + dq_index<Traits::kBlockM, kVectorAtomics>(j / 8, row_block, j % 8, lane, 0);
      add_fragment(to, &dq[m][4 * i]);
    }
  }
}

// ---- the end of a tile ------------------------------------------------------------------------

// A warp's part of dK or dV, times scale, to shared memory.
template <typename Traits>
__device__ __forceinline__ void stage_gradient(uint32_t smem,
                                               const float (&acc)[2][8 * Traits::kColumnBlocks],
                                               float scale, int row, int sharer) {
  using Rows = typename Traits::Rows;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 4 * Traits::kColumnBlocks; ++i) {
      const int chunk = 2 * (sharer + Traits::kSharers * (i / 4)) + i % 4 / 2;
      st_shared(smem + Rows::offset(row + 16 * m + 8 * (i % 2) + lane / 4, chunk) + 4 * (lane % 4),
                pack<typename Traits::Element>(acc[m][2 * i] * scale, acc[m][2 * i + 1] * scale));
    }
  }
}

// The block's dK or dV from shared memory to its rows before length.
template <typename Traits>
__device__ __forceinline__ void write_gradient(uint32_t smem, typename Traits::Element* base,
                                               int64_t row_stride, int first_row, int length,
                                               int dim) {
  using Rows = typename Traits::Rows;
  constexpr int kPass = Traits::kThreads / Rows::kGroup;
  const int row = threadIdx.x / Rows::kGroup, chunk = threadIdx.x % Rows::kGroup;
  smem += Rows::offset(row, chunk);
#pragma unroll
  for (int r = 0; r < Traits::kBlockN; r += kPass) {
    const int j = first_row + row + r;
#pragma unroll
    for (int c = 0; c < Rows::kChunks; c += Rows::kGroup) {
      if (j >= length || (chunk + c) * 8 >= dim) continue;
      const uint4 value = ld_shared_16(Rows::right(smem, c) + Rows::down(r));
      *reinterpret_cast<uint4*>(base + j * row_stride + (chunk + c) * 8) = value;
    }
  }
}

}  // namespace flash_ext::device
