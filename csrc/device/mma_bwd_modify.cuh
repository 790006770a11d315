// The backward's modified scores, on a step of S^T and dP^T as bwd.cuh has it.
#pragma once

#include "device/mma_bwd_tile.cuh"
#include "device/mma_bwd_work.cuh"
#include "device/modify.cuh"

namespace flash_ext::device {

// The modifier of the group's query head `head`.
__device__ __forceinline__ Modifier head_modifier(const BwdParams& params, const BwdWork& work,
                                                  int head) {
  Work queries{};
  queries.sequence = work.keys.sequence;
  queries.head = work.keys.head * params.heads_per_kv + head;
  return make_modifier(params, queries);
}

// s, the product of K and Q, becomes the score that the softmax saw, scaled; dp becomes what is
// left of dS = P dp: (dropped dP - delta) times softcap's derivative. Returns a bit for every
// element, in the order of s: whether its probability was kept. delta: this lane's first value in
// shared memory; key, query: of the warp's first ones.
template <typename Traits>
__device__ __forceinline__ uint32_t modify_step(float (&s)[2][Traits::kStepM / 2],
                                                float (&dp)[2][Traits::kStepM / 2], uint32_t delta,
                                                const Modifier& modifier, int offset, int key,
                                                int query) {
  const int lane = threadIdx.x % 32;
  const float inverse_cap = modifier.cap > 0.f ? 1.f / modifier.cap : 0.f;
  uint32_t kept = ~0u;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    cap_scores(s[m], modifier);
    PhiloxWords words{};
#pragma unroll
    for (int n = 0; n < Traits::kStepM / 8; ++n) {
      const float2 d = ld_shared_floats(delta + 32 * n);
      // The dropout's blocks are 16 queries wide; words 2 and 3 are those of the second half.
      if (n % 2 == 0 && modifier.drop_below)
        words = dropout_words<true>(modifier, query + 8 * n, key + 16 * m);
      if (Traits::kStepM == 8 ? query & 8 : n % 2)
        words.word[0] = words.word[2], words.word[1] = words.word[3];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * n + e;
        const bool drop = is_dropped(words, e, modifier);
        if (drop) kept &= ~(1u << (m * Traits::kStepM / 2 + i));
        const float through = drop ? 0.f : dp[m][i] * modifier.kept_scale;
        dp[m][i] = (through - (e % 2 ? d.y : d.x)) * cap_derivative(s[m][i], inverse_cap);
      }
    }
    add_alibi(s[m], modifier, key + 16 * m + lane / 4 - query - 2 * (lane % 4) - offset);
  }
  return kept;
}

}  // namespace flash_ext::device
