// Makes the parameters of an mma.sync forward; what the device sees of them is in fwd_params.h.
#pragma once

#include "device/fwd_params.h"
#include "device/host.h"

namespace flash_ext::device {

inline FwdParams make_fwd_params(const Problem& p, const FwdTensors& t, int block_m) {
  FwdParams params{};
  fill_params(p, t, block_m, params);
  params.q = t.q, params.k = t.k, params.v = t.v, params.out = t.out;
  params.q_stride = p.q, params.k_stride = p.k, params.v_stride = p.v, params.out_stride = p.out;
  params.score_slack = 8 / params.score_scale_log2;
  params.head_dim = p.head_dim, params.head_dim_v = p.head_dim_v;
  return params;
}

}  // namespace flash_ext::device
