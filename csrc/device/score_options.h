// What changes scores beyond the mask, as the host tells a kernel: softcap, ALiBi and dropout.
// Kernels have two forms, plain and modified; within the modified one all three are run-time data.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace flash_ext::device {

// The template axis, as instance tables name it.
constexpr bool kPlain = false, kModified = true;

struct ScoreOptions {
  float softcap;               // 0: off
  const float* alibi_slopes;   // (nheads) or (batch, nheads) or null
  int alibi_batch_stride;      // nheads or 0
  const int64_t* rng_state;    // (2): seed, offset; null without dropout
  uint32_t dropout_threshold;  // a score is dropped iff its 16 random bits are below it; 0: off
};

inline bool is_modified(const Problem& p) {
  return p.softcap > 0 || p.has_alibi || p.dropout_threshold;
}

// Tensors: FwdTensors or BwdTensors.
template <typename Tensors>
ScoreOptions score_options(const Problem& p, const Tensors& t) {
  return {static_cast<float>(p.softcap), t.alibi_slopes, p.has_alibi == 2 ? p.nheads : 0,
          p.dropout_threshold ? t.rng_state : nullptr, static_cast<uint32_t>(p.dropout_threshold)};
}

}  // namespace flash_ext::device
