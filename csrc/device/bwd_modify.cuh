// The backward's modified scores, on a tile of S and dP as modify.cuh has it, or of S^T and dP^T.
//
//   dP = kept dP / (1 - p), 0 where P was dropped    dV takes the dropped P, scaled at the end
//   dS = P (dP - delta) (1 - tanh^2)                 P from the scores that the softmax saw
#pragma once

#include "device/modify.cuh"

namespace flash_ext::device {

// Where a warp's tile lies: its first query and key, and the mask's offset.
struct TilePlace {
  int query, key, offset;
};

// s, a product of Q and K, becomes the score that the softmax saw; dp becomes what is left of dS =
// P dp. delta(j): of the queries of elements 4 j to 4 j + 3. Returns a bit for every element:
// whether its probability was kept.
template <bool kTransposed, typename Lanes = MmaLanes, int kCount, typename Delta>
__device__ __forceinline__ uint64_t modify_gradients(float (&s)[kCount], float (&dp)[kCount],
                                                     const Modifier& m, TilePlace at, Delta delta) {
  static_assert(kCount <= 64, "a bit for every element");
  uint64_t kept = ~uint64_t{0};
  if (m.drop_below) {
    const float kept_scale = m.kept_scale;
#pragma unroll
    for (int block = 0; block < kCount / 8; ++block) {
      const PhiloxWords words = dropout_words<kTransposed, Lanes>(
          m, at.query + (kTransposed ? 16 * block : 0), at.key + (kTransposed ? 0 : 16 * block));
#pragma unroll
      for (int i = 8 * block; i < 8 * block + 8; ++i) {
        const bool drop = is_dropped(words, i % 8, m);
        if (drop) kept &= ~(uint64_t{1} << i);
        dp[i] = drop ? 0.f : dp[i] * kept_scale;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 d = delta(i / 4);
    dp[i] -= d.x, dp[i + 1] -= d.y, dp[i + 2] -= d.z, dp[i + 3] -= d.w;
  }
  cap_scores(s, m);
  if (m.cap > 0.f) {
    const float inverse_cap = 1.f / m.cap;
#pragma unroll
    for (int i = 0; i < kCount; ++i) dp[i] *= cap_derivative(s[i], inverse_cap);
  }
  const int lane = threadIdx.x % 32, row = Lanes::row(lane), column = 2 * Lanes::column_pair(lane);
  const int distance = at.query + at.offset - at.key;
  add_alibi(s, m, kTransposed ? row - column - distance : row - column + distance);
  return kept;
}

// Probabilities whose bit is not set become 0.
template <int kCount>
__device__ __forceinline__ void drop(float (&p)[kCount], uint64_t kept) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!(kept >> i & 1)) p[i] *= 0.f;
  }
}

}  // namespace flash_ext::device
