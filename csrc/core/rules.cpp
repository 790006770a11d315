#include "core/rules.h"

#include <limits>

namespace flash_ext {

[[noreturn]] void value_error(const std::string& sentence) {
  throw Error(ErrorKind::kValue, sentence);
}

[[noreturn]] void type_error(const std::string& sentence) {
  throw Error(ErrorKind::kType, sentence);
}

std::string number_text(double value) {
  char text[32];
  snprintf(text, sizeof(text), "%g", value);
  return text;
}

void check_shape(const char* name, const char* dims, const TensorView& t, int ndim,
                 const int64_t* want) {
  bool same = t.ndim == ndim;
  for (int i = 0; same && i < ndim; ++i) same = t.sizes[i] == want[i];
  if (same) return;
  value_error(std::string(name) + " must have shape " + dims + " = " + list_text(want, ndim) +
              ", got " + shape_text(t));
}

void check_dtype(const char* name, const TensorView& t, DType want, const char* want_name) {
  if (t.dtype == want) return;
  type_error(std::string(name) + " must be " + want_name + ", got " + t.dtype_name);
}

void check_device(const char* name, const TensorView& t, const TensorView& q) {
  if (t.device_type == q.device_type && t.device_index == q.device_index) return;
  value_error(std::string(name) + " must be on the device of q, " + q.device_name + ", got " +
              t.device_name);
}

void check_like_q(const char* name, const TensorView& t, const TensorView& q) {
  if (t.dtype != q.dtype) {
    type_error(std::string(name) + " must have the dtype of q, " + q.dtype_name + ", got " +
               t.dtype_name);
  }
  check_device(name, t, q);
}

void check_last_stride(const char* name, const TensorView& t) {
  if (usable_in_place(t)) return;
  const char* rule = t.device_type == DeviceType::kCuda
                         ? " must have a contiguous last dimension, a 16-byte aligned address and "
                           "strides that are multiples of 16 bytes"
                         : " must have a contiguous last dimension (stride 1)";
  value_error(std::string(name) + rule + ", got strides " + list_text(t.strides, t.ndim));
}

void check_contiguous(const char* name, const TensorView& t) {
  int64_t expected = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.sizes[i] != 1 && t.strides[i] != expected && t.numel() != 0) {
      value_error(std::string(name) + " must be contiguous, got strides " +
                  list_text(t.strides, t.ndim));
    }
    expected *= t.sizes[i];
  }
}

void check_vector(const char* name, const char* dims, const TensorView& t, const TensorView& q,
                  DType dtype, const char* dtype_name, int ndim, const int64_t* want) {
  check_dtype(name, t, dtype, dtype_name);
  check_device(name, t, q);
  check_shape(name, dims, t, ndim, want);
  check_contiguous(name, t);
}

int32_t checked_int32(const char* name, int64_t value) {
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  if (value > kMaxInt32)
    value_error(std::string(name) + " must be below 2^31, got " + std::to_string(value));
  return static_cast<int32_t>(value);
}

void check_cu_seqlens(const char* name, const TensorView& t, int64_t total) {
  const auto* cu = static_cast<const int32_t*>(t.data);
  const int64_t batch = t.sizes[0] - 1;
  int64_t before = 0;
  for (int64_t i = 0; i <= batch; ++i) {
    if (cu[i] < before) {
      value_error(std::string(name) + " must start at 0 or above and never decrease, got " +
                  std::to_string(cu[i]) + " after " + std::to_string(before) + " at index " +
                  std::to_string(i));
    }
    before = cu[i];
  }
  if (before > total) {
    value_error(std::string(name) + " must end at or below the number of rows, " +
                std::to_string(total) + ", got " + std::to_string(before));
  }
}

void check_seqused(const char* name, const TensorView& t, const TensorView& cu_seqlens,
                   int64_t seqlen) {
  const auto* used = static_cast<const int32_t*>(t.data);
  const auto* cu = static_cast<const int32_t*>(cu_seqlens.data);
  for (int64_t i = 0; i < t.sizes[0]; ++i) {
    const int64_t length = cu_seqlens.given() ? cu[i + 1] - cu[i] : seqlen;
    if (used[i] < 0 || used[i] > length) {
      value_error(std::string(name) + " must be between 0 and the length of its sequence, " +
                  std::to_string(length) + ", got " + std::to_string(used[i]) + " at index " +
                  std::to_string(i));
    }
  }
}

}  // namespace flash_ext
