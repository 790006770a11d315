// A tensor as a door hands it to core: no ownership, no torch, no Python.
#pragma once

#include <cstdint>
#include <string>

#include "core/problem.h"

namespace flash_ext {

constexpr int kMaxDims = 8;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kOther;
  std::string dtype_name;  // as the user knows it, for messages: "int64"
  DeviceType device_type = DeviceType::kCpu;
  int device_index = 0;
  std::string device_name = "cpu";  // for messages: "cuda:1", "meta"
  bool has_data = true;             // false for meta tensors: values and addresses are not checked
  int ndim = -1;                    // -1: the argument was not given
  int64_t sizes[kMaxDims] = {};     // the first kMaxDims of them
  int64_t strides[kMaxDims] = {};   // in elements

  bool given() const { return ndim >= 0; }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < ndim && i < kMaxDims; ++i) count *= sizes[i];
    return count;
  }
};

inline int64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    default:
      return 0;
  }
}

// The dtype of lse, sinks and every accumulator.
inline DType accumulator_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

inline std::string list_text(const int64_t* values, int count) {
  std::string text = "(";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + (count == 1 ? ",)" : ")");
}

inline std::string shape_text(const TensorView& t) {
  return list_text(t.sizes, t.ndim < kMaxDims ? t.ndim : kMaxDims);
}

// True when kernels can read (or write) the tensor where it lies: last dimension contiguous, and on
// a GPU a 16-byte aligned address and strides. Strides of dimensions of size 1 do not count.
inline bool usable_in_place(const TensorView& t) {
  if (t.ndim < 1 || t.ndim > kMaxDims || t.numel() == 0) return true;
  if (t.sizes[t.ndim - 1] != 1 && t.strides[t.ndim - 1] != 1) return false;
  if (t.device_type != DeviceType::kCuda) return true;
  const int64_t bytes = element_bytes(t.dtype);
  // Rows that are no whole number of 16 bytes are padded, or refused by head_dim, before any
  // kernel.
  if (t.sizes[t.ndim - 1] * bytes % 16 != 0) return true;
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  for (int i = 0; i + 1 < t.ndim; ++i) {
    if (t.sizes[i] != 1 && t.strides[i] * bytes % 16 != 0) return false;
  }
  return true;
}

}  // namespace flash_ext
