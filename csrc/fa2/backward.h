// The host side of the backward, for the table in backend.cpp.
#pragma once

#include "core/backend.h"

namespace flash_ext::fa2 {

// The card is one that fa2 was built for, and common_why_not has nothing against the problem.
Status backward_why_not(const Problem& p);
Status plan_backward(const Problem& p, Plan* plan);
Status backward(const Problem& p, const BwdTensors& tensors, const Call& call);

}  // namespace flash_ext::fa2
