// The backward's half of the table of fa3.
#pragma once

#include "core/backend.h"

namespace flash_ext::fa3 {

// Of a problem that no check of the card and of common_why_not refuses.
Status backward_why_not(const Problem& problem);
Status plan_backward(const Problem& problem, Plan* plan);
Status run_backward(const Problem& problem, const BwdTensors& tensors, const Call& call);

}  // namespace flash_ext::fa3
