// Online softmax over accumulator tiles of 16 rows, as mma.sync and WGMMA lay them out: a lane
// holds row g (c[4 j], c[4 j + 1]) and row g + 8 (c[4 j + 2], c[4 j + 3]); the four lanes of a quad
// share them.
#pragma once

#include <cmath>

#include "device/ptx.cuh"

namespace flash_ext::device {

// A maximum that grows by less than this, in powers of two, stays: P may reach 2^8, and O need not
// be rescaled. P is as exact as before, and float16 holds it.
constexpr float kMaxGrowth = 8.f;

// The state of this lane's two rows. Of each block, or of each part of one, scores [kFrom, kTo) of
// a lane: raise, which may be left out when no score has outgrown its maximum; then exponentiate.
struct Softmax {
  static constexpr float kUnset = -3.402823466e38f;  // no key was seen yet: the smallest float

  float max[2];  // of raw scores, at most kMaxGrowth below the true one; the same in a quad
  float sum[2];  // this lane's part, relative to max

  // A sink is a score without a value: one more exp(sink) in the sum. -infinity: none.
  __device__ __forceinline__ void start(float sink_score) {
    const bool counts = sink_score > -INFINITY;
    max[0] = max[1] = counts ? sink_score : kUnset;
    sum[0] = sum[1] = counts && threadIdx.x % 4 == 0 ? 1.f : 0.f;
  }

  // Whether a score of this lane may be above its row's maximum by more than `slack`, which is
  // kMaxGrowth as a raw score. As integers, of which one instruction compares three: the order of
  // negative floats is reversed then, but they stay below a limit that is not negative itself.
  template <int kFrom, int kTo, int kCount>
  __device__ __forceinline__ bool outgrown(const float (&s)[kCount], float slack) const {
    int limit[2], most[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      limit[half] = most[half] = __float_as_int(__fadd_rd(max[half], slack));
#pragma unroll
      for (int i = kFrom + 2 * half; i < kTo; i += 4)
        most[half] = __vimax3_s32(most[half], __float_as_int(s[i]), __float_as_int(s[i + 1]));
    }
    return most[0] > limit[0] || most[1] > limit[1] || (limit[0] | limit[1]) < 0;
  }

  // Maxima follow the scores. O must be multiplied by rescale, and P of earlier parts.
  template <int kFrom, int kTo, int kCount>
  __device__ __forceinline__ void raise(const float (&s)[kCount], float scale_log2,
                                        float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_max = max[half];
#pragma unroll
      for (int i = kFrom + 2 * half; i < kTo; i += 4)
        row_max = fmaxf(row_max, fmaxf(s[i], s[i + 1]));
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
      if ((row_max - max[half]) * scale_log2 <= kMaxGrowth) row_max = max[half];
      rescale[half] = exp2_approx(shift(max[half], scale_log2) - shift(row_max, scale_log2));
      max[half] = row_max;
      sum[half] *= rescale[half];
    }
  }

  // Scores become probabilities relative to the maxima, and join the sums.
  template <int kFrom, int kTo, int kCount>
  __device__ __forceinline__ void exponentiate(float (&s)[kCount], float scale_log2) {
#pragma unroll
    for (int i = kFrom; i < kTo; i += 2) {
      const int half = i / 2 % 2;
      s[i] = exp2_approx(s[i] * scale_log2 - shift(max[half], scale_log2));
      s[i + 1] = exp2_approx(s[i + 1] * scale_log2 - shift(max[half], scale_log2));
      sum[half] += s[i] + s[i + 1];
    }
  }

  // What a maximum is as a power of two. The product is rounded, and upwards: P and O are then
  // relative to one and the same shift (fused, a maximum that stays would rescale by a little more
  // or less than 1 at every block), and no P is above 2^kMaxGrowth, however large the scores.
  static __device__ __forceinline__ float shift(float max, float scale_log2) {
    return __fmul_ru(max, scale_log2);
  }

  // Sums of whole rows, once at the end.
  __device__ __forceinline__ void reduce() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    }
  }

  // Natural logarithm of the sum of exponentials of a row that was seen, after reduce.
  __device__ __forceinline__ float lse(int half, float scale) const {
    return logf(sum[half]) + max[half] * scale;
  }
};

template <int kCount>
__device__ __forceinline__ void rescale_rows(float (&o)[kCount], const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= rescale[i / 2 % 2];
}

}  // namespace flash_ext::device
