// The two passes, as the backend table sees them.
#pragma once

#include "core/backend.h"
#include "cpu/simd.h"

namespace flash_ext::cpu {

Status plan_forward(const Problem& problem, Plan* plan);
Status plan_backward(const Problem& problem, Plan* plan);
Status forward(const Problem& problem, const FwdTensors& tensors, const Call& call);
Status backward(const Problem& problem, const BwdTensors& tensors, const Call& call);

inline Status no_such_tile(const Problem& problem) {
  return make_status(Code::kInvalid, "the CPU backend has no tile %d", problem.tile);
}

// run(T{}) for the element type T of the problem.
template <class Run>
Status with_element_type(const Problem& problem, Run&& run) {
  switch (static_cast<DType>(problem.dtype)) {
    case DType::kFloat16:
      return run(Half{});
    case DType::kBFloat16:
      return run(BFloat16{});
    case DType::kFloat32:
      return run(float{});
    case DType::kFloat64:
      return run(double{});
    default:
      return make_status(Code::kUnsupported, "the CPU backend has no kernel for this dtype");
  }
}

}  // namespace flash_ext::cpu
