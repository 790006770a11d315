// The online softmax of mma.sync kernels, over accumulator tiles of 16 rows: a lane holds row g
// (c[4 j], c[4 j + 1]) and row g + 8 (c[4 j + 2], c[4 j + 3]); the four lanes of a quad share them.
#pragma once

#include <cmath>

#include "device/lanes.cuh"
#include "device/ptx.cuh"

namespace flash_ext::device {

// Costs few instructions a score. Probabilities are relative to a reference that a row's maximum
// may come near but not pass: a maximum takes it kHeadroom powers of two above itself, so that it,
// and O, seldom change. Q K^T starts from minus the reference, and whether a score has passed it is
// then a question to its sign.
template <typename Lanes>
struct LazySoftmax {
  static constexpr float kHeadroom = 8.f;
  static constexpr float kUnset = 1e-37f;  // no key was seen yet; as an accumulator it counts as 0

  float start[4];  // minus the references of rows g and g + 8, as an accumulator: twice each
  float sum[2];    // this lane's part

  __device__ __forceinline__ LazySoftmax() : sum{0.f, 0.f} {
#pragma unroll
    for (int i = 0; i < 4; ++i) start[i] = kUnset;
  }

  // Lets the compiler forget that the four registers are two pairs of equal ones: it would build
  // them anew for each MMA.
  __device__ __forceinline__ void keep_apart() {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(start[i]));
  }

  // For scores that did not start from it.
  template <int kCount>
  __device__ __forceinline__ void subtract(float (&s)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] += start[i % 4];
  }

  // Whether one of this lane's scores has passed its reference: all are negative otherwise.
  template <int kCount>
  static __device__ __forceinline__ bool passes(const float (&s)[kCount]) {
    uint32_t signs = ~0u;
#pragma unroll
    for (int i = 0; i < kCount; ++i) signs &= __float_as_uint(s[i]);
    return static_cast<int>(signs) >= 0;
  }

  // The largest scores of this lane's two rows.
  template <int kCount>
  static __device__ __forceinline__ void maxima(const float (&s)[kCount], float (&most)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row = -INFINITY;
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) row = fmaxf(row, fmaxf(s[i], s[i + 1]));
      row = fmaxf(row, __shfl_xor_sync(0xffffffffu, row, Lanes::kNextPair));
      most[half] = fmaxf(row, __shfl_xor_sync(0xffffffffu, row, Lanes::kNextTwoPairs));
    }
  }

  // Raises the references of rows whose maximum has passed them or that have none; scores and the
  // sum, here, and O must follow. Whether all rows of this lane have one now.
  template <int kCount>
  __device__ __forceinline__ bool raise(float (&s)[kCount], const float (&most)[2],
                                        float scale_log2, float slack, float (&rescale)[2]) {
    bool all_set = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool unset = start[2 * half] == kUnset;
      const float up = most[half] > (unset ? -INFINITY : 0.f) ? most[half] + slack : 0.f;
      rescale[half] = unset ? 1.f : exp2_approx(-up * scale_log2);
      sum[half] *= rescale[half];
      start[2 * half] = start[2 * half + 1] = start[2 * half] - up;
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) s[i] -= up, s[i + 1] -= up;
      all_set &= start[2 * half] != kUnset;
    }
    return all_set;
  }

  // The scores of 16 keys become probabilities; their sum is kept.
  __device__ __forceinline__ void exponentiate(float* s, float scale_log2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      s[i] = exp2_approx(fmaf(s[i], scale_log2, kHeadroom));
      sum[i / 2 % 2] += s[i];
    }
  }

  // Sums of whole rows, once at the end.
  __device__ __forceinline__ void reduce() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], Lanes::kNextPair);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], Lanes::kNextTwoPairs);
    }
  }

  // A whole row, after reduce. A sink is a score without a value, -inf when there is none: it comes
  // in here, as a reference so far from the scores would cost them their last digits.
  struct Row {
    float lse;     // natural logarithm of the sum of exponentials; -inf when there were none
    float weight;  // what O must be multiplied by
  };
  __device__ __forceinline__ Row finish(int half, float scale, float slack, float sink) const {
    const float shift = start[2 * half] == kUnset ? -INFINITY : -(start[2 * half] + slack) * scale;
    const float most = fmaxf(shift, sink);
    if (most == -INFINITY) return {-INFINITY, 0.f};
    const float rescale = expf(shift - most);
    const float total = sum[half] * rescale + expf(sink - most);
    return {most + logf(total), rescale / total};
  }
};

}  // namespace flash_ext::device
