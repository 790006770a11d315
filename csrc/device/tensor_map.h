// Tensor maps for tma.cuh, made on the host through the driver's own encoder (no -lcuda).
//
// A map sees a tensor as (columns, rows, ends, wrap, heads). The dimension `rows` has kMapRows
// rows, `ends` has the stride of a row too, and kMapRows steps along `wrap` go back kMapRows rows
// (its stride is 2^34 minus a row, and 2^30 * 2^34 is nothing in 64 bits). A tile asks for row
// (kMapRows - length + row) with end (start + length) and wrap kMapRows: the address comes out as
// row (start + row), and the hardware itself stops at the sequence's last row. So loads past a
// sequence give zeros, never a neighbour, and stores past it are dropped, whether packed or padded.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/problem.h"

namespace flash_ext::device {

constexpr int kMapRows = 1 << 30;

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                     const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                     const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Null when the driver is too old to have it.
inline EncodeTensorMap tensor_map_encoder() {
  static const EncodeTensorMap encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                     &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    return reinterpret_cast<EncodeTensorMap>(found == cudaDriverEntryPointSuccess ? function
                                                                                  : nullptr);
  }();
  return encoder;
}

// A tensor's map, and where its batches start: at rows, or at heads, whichever stride divides
// theirs.
struct TensorMap {
  CUtensorMap map;
  int batch_rows, batch_heads;
};

// Sets batch_rows or batch_heads; false when no map can step from batch to batch.
inline bool place_batches(const Strides& stride, int64_t rows, int heads, int batch,
                          TensorMap* map) {
  map->batch_rows = map->batch_heads = 0;
  if (batch <= 1 || stride.batch == 0) return true;
  if (rows > 1 && stride.row > 0 && stride.batch % stride.row == 0) {
    map->batch_rows = static_cast<int>(stride.batch / stride.row);
  } else if (heads > 1 && stride.head > 0 && stride.batch % stride.head == 0) {
    map->batch_heads = static_cast<int>(stride.batch / stride.head);
  } else if (rows <= 1) {
    map->batch_rows = 1;  // one row a batch: the batch stride is the row stride
  } else if (heads <= 1) {
    map->batch_heads = 1;
  } else {
    return false;
  }
  return true;
}

// Whether a map can describe the tensor. rows: of one batch when padded, else all.
inline bool can_map(const Strides& stride, int64_t rows, int heads, int batch) {
  TensorMap map{};
  if ((rows > 1 && stride.row == 0) || (heads > 1 && stride.head == 0)) return false;
  if (!place_batches(stride, rows, heads, batch, &map)) return false;
  const int64_t last = std::max(0, batch - 1);
  return rows + last * map.batch_rows < INT32_MAX && heads + last * map.batch_heads < INT32_MAX;
}

// A box is box_rows rows of 64 columns, 128-byte swizzled. rows: of one batch when padded, else
// all. Returns CUDA_SUCCESS or the driver's error.
inline CUresult make_tensor_map(TensorMap* map, bool bfloat16, const void* base,
                                const Strides& stride, int64_t rows, int columns, int heads,
                                int batch, int box_rows) {
  constexpr uint64_t kBytes = 2;
  if (!place_batches(stride, rows, heads, batch, map)) return CUDA_ERROR_INVALID_VALUE;
  // Strides of dimensions of size 1 are never used, but must be multiples of 16.
  const uint64_t row = (rows > 1 ? stride.row : map->batch_rows == 1 ? stride.batch : 8) * kBytes;
  const uint64_t head = (heads > 1               ? stride.head
                         : map->batch_heads == 1 ? stride.batch
                                                 : 8) *
                        kBytes;
  const int64_t ends = rows + int64_t{batch - 1} * map->batch_rows + 1;
  const cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(columns), kMapRows, static_cast<cuuint64_t>(ends), kMapRows + 1,
      static_cast<cuuint64_t>(heads + int64_t{batch - 1} * map->batch_heads)};
  const cuuint64_t strides[] = {row, row, (uint64_t{1} << 34) - row, head};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows), 1, 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const auto type = bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return tensor_map_encoder()(&map->map, type, 5, const_cast<void*>(base), sizes, strides, box,
                              steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace flash_ext::device
