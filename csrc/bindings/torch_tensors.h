// torch tensors as core sees them, and the copies that make them readable.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "core/tensor_view.h"

namespace flash_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

TensorView view_of(const Tensor& tensor);
TensorView view_of(const std::optional<Tensor>& tensor);

// The tensor itself when kernels can read it where it lies, else one copy.
Tensor readable(const Tensor& tensor);

// GPU kernels move rows in chunks of 8 elements: another head_dim gets zero columns, once, in a
// copy.
int32_t padded_columns(int64_t columns);
bool needs_padding(const Problem& problem, const TensorView& q);
Tensor pad_columns(const Tensor& tensor);
// The first columns of a padded tensor, contiguous.
Tensor drop_columns(const Tensor& tensor, int64_t columns);

// Uninitialised memory on the device of `like`.
Tensor empty_beside(const Tensor& like, const int64_t* sizes, int ndim,
                    std::optional<ScalarType> dtype);
// The dtype of lse and sinks.
ScalarType accumulator_type(const Tensor& q);

}  // namespace flash_ext
