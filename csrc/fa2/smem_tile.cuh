// Tiles of Q, K, V and O in shared memory: how their rows lie, and how they get there.
#pragma once

#include "device/ptx.cuh"

namespace flash_ext::fa2 {

using namespace device;

// Rows of 16-byte chunks, permuted within groups of 8 (4 where a row is no multiple of 128 bytes),
// so that ldmatrix reads the same chunk of eight rows from eight different bank groups.
template <typename Traits>
struct Swizzle {
  static constexpr int kGroup = Traits::kChunks % 8 == 0 ? 8 : 4;

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    const int key = kGroup == 8 ? row % 8 : row / 2 % 4;
    return row * Traits::kRowBytes + (chunk / kGroup * kGroup + (chunk % kGroup ^ key)) * 16;
  }
  // The address `chunk` chunks on (even) from one in chunks 0 or 1: one XOR and an immediate.
  static __device__ __forceinline__ uint32_t step(uint32_t address, int chunk) {
    return (address ^ (chunk % kGroup * 16)) + chunk / kGroup * kGroup * 16;
  }
};

// The rows of one sequence and head of a matrix, in global memory.
struct Rows {
  const char* first;
  int64_t stride;  // bytes
  int end, dim;    // rows at or past end and columns at or past dim arrive as zeros, unread
};

// Copies kRows rows from first_row on. Eight threads (four) take a row: each row costs a thread a
// 64-bit addition. A block that is there whole, as nearly all are, needs no comparisons.
template <typename Traits, int kRows>
__device__ __forceinline__ void load_rows(uint32_t smem, Rows rows, int first_row) {
  constexpr int kAcross = Swizzle<Traits>::kGroup, kRowsPerPass = Traits::kThreads / kAcross;
  static_assert(kRowsPerPass % 8 == 0, "the swizzle of a thread is the same in every pass");
  static_assert(kRows % kRowsPerPass == 0, "whole passes");
  const uint32_t row = threadIdx.x / kAcross, chunk = threadIdx.x % kAcross, from = first_row + row;
  const char* source = rows.first + chunk * 16u + uint64_t{from} * rows.stride;
  smem += Swizzle<Traits>::offset(row, chunk);
  auto copy = [&](auto keep) {
#pragma unroll
    for (int r = 0; r < kRows; r += kRowsPerPass) {
#pragma unroll
      for (int c = 0; c < Traits::kChunks; c += kAcross)
        cp_async_16(smem + r * Traits::kRowBytes + c * 16, source + c * 16, keep(r, c));
      source += kRowsPerPass * rows.stride;
    }
  };
  if (first_row + kRows <= rows.end && rows.dim == Traits::kHeadDim) {
    copy([](int, int) { return true; });
  } else {
    const int end = rows.end - from, dim = rows.dim / 8 - chunk;
    copy([&](int r, int c) { return c < dim && r < end; });
  }
}

}  // namespace flash_ext::fa2
