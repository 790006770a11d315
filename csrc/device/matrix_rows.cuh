// The rows of one head that an mma.sync forward works on: which they are in global memory, and how
// they lie in shared memory.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/problem.h"

namespace flash_ext::device {

// The rows of one sequence and head of a matrix, in global memory.
struct MatrixRows {
  const char* first;
  int64_t stride;  // bytes
  int end, dim;    // rows at or past end and columns at or past dim arrive as zeros, unread
};

// Rows [0, end) of a sequence, of one head.
template <typename Element>
__device__ __forceinline__ MatrixRows matrix_rows(const void* tensor, const Strides& stride,
                                                  int batch, int64_t row, int head, int end,
                                                  int dim) {
  const auto* first = static_cast<const Element*>(tensor) + batch * stride.batch +
                      row * stride.row + head * stride.head;
  return {reinterpret_cast<const char*>(first), stride.row * int64_t{sizeof(Element)}, end, dim};
}

// Rows of 16-byte chunks, permuted within groups of 8 (4 where a row is no multiple of 128 bytes),
// so that ldmatrix reads the same chunk of eight rows from eight different bank groups.
template <typename Traits>
struct Swizzle {
  static constexpr int kGroup = Traits::kChunks % 8 == 0 ? 8 : 4;

  FLASH_EXT_HOST_DEVICE static uint32_t offset(int row, int chunk) {
    const int key = kGroup == 8 ? row % 8 : row / 2 % 4;
    return row * Traits::kRowBytes + (chunk / kGroup * kGroup + (chunk % kGroup ^ key)) * 16;
  }
  // The address `chunk` chunks on (even) from one in chunks 0 or 1: one XOR and an immediate.
  FLASH_EXT_HOST_DEVICE static uint32_t step(uint32_t address, int chunk) {
    return (address ^ (chunk % kGroup * 16)) + chunk / kGroup * kGroup * 16;
  }
};

}  // namespace flash_ext::device
