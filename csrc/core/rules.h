// The rules that every argument check is made of. Each throws an Error that names the argument.
#pragma once

#include <string>

#include "core/error.h"
#include "core/tensor_view.h"

namespace flash_ext {

[[noreturn]] void value_error(const std::string& sentence);
[[noreturn]] void type_error(const std::string& sentence);

// dims: the expected shape in words, "(batch, seqlen_k, nheads_k, head_dim)".
void check_shape(const char* name, const char* dims, const TensorView& t, int ndim,
                 const int64_t* want);
void check_device(const char* name, const TensorView& t, const TensorView& q);
// The dtype and device of q.
void check_like_q(const char* name, const TensorView& t, const TensorView& q);
// What usable_in_place says, as an error.
void check_last_stride(const char* name, const TensorView& t);
void check_contiguous(const char* name, const TensorView& t);
// A small tensor that kernels read through a plain pointer.
void check_vector(const char* name, const char* dims, const TensorView& t, const TensorView& q,
                  DType dtype, const char* dtype_name, int ndim, const int64_t* want);
int32_t checked_int32(const char* name, int64_t value);
std::string number_text(double value);

// cu_seqlens and seqused on the CPU, where their values can be read for free.
void check_cu_seqlens(const char* name, const TensorView& t, int64_t total);
void check_seqused(const char* name, const TensorView& t, const TensorView& cu_seqlens,
                   int64_t seqlen);

}  // namespace flash_ext
