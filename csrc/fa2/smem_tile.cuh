// How rows of Q, K and V get to shared memory.
#pragma once

#include "device/matrix_rows.cuh"
#include "device/ptx.cuh"

namespace flash_ext::fa2 {

using namespace device;

// Copies kRows rows from first_row on. Eight threads (four) take a row: each row costs a thread a
// 64-bit addition. A block that is there whole, as nearly all are, needs no comparisons.
template <typename Traits, int kRows>
__device__ __forceinline__ void load_rows(uint32_t smem, MatrixRows rows, int first_row) {
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
