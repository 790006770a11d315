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

// The state of this lane's two rows.
struct Softmax {
  float max[2];  // of raw scores, at most kMaxGrowth below the true one; the same in a quad
  float sum[2];  // this lane's part, relative to max

  // A sink is a score without a value: one more exp(sink) in the sum.
  __device__ __forceinline__ void start(bool has_sink, float sink_score) {
    const bool counts = has_sink && sink_score > -INFINITY;
    max[0] = max[1] = counts ? sink_score : -INFINITY;
    sum[0] = sum[1] = counts && threadIdx.x % 4 == 0 ? 1.f : 0.f;
  }

  // Scores become probabilities relative to the running maximum. O must be multiplied by rescale.
  template <int kCount>
  __device__ __forceinline__ void step(float (&s)[kCount], float scale_log2, float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_max = max[half];
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) row_max = fmaxf(row_max, fmaxf(s[i], s[i + 1]));
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
      if ((row_max - max[half]) * scale_log2 <= kMaxGrowth) row_max = max[half];
      // A row that has seen no key keeps the maximum -inf: any finite shift makes its P zero.
      // The products are rounded, and upwards: P and O are then relative to one and the same shift
      // (fused, a maximum that stays would rescale by a little more or less than 1 at every block),
      // and no P is above 2^kMaxGrowth, however large the scores.
      const float shift = row_max == -INFINITY ? 0.f : __fmul_ru(row_max, scale_log2);
      rescale[half] = exp2_approx(__fmul_ru(max[half], scale_log2) - shift);
      max[half] = row_max;
      float row_sum = sum[half] * rescale[half];
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) {
        s[i] = exp2_approx(s[i] * scale_log2 - shift);
        s[i + 1] = exp2_approx(s[i + 1] * scale_log2 - shift);
        row_sum += s[i] + s[i + 1];
      }
      sum[half] = row_sum;
    }
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
