// mma.sync m16n8k16 with float32 accumulation, and how its fragments lie.
//
// Lane l, with g = l / 4 and t = 2 * (l % 4), holds
//   A (16x16)  a[0]: row g,     columns t, t+1     a[1]: row g + 8, the same columns
//              a[2]: row g,     columns t+8, t+9   a[3]: row g + 8, the same columns
//   B (16x8)   b[0]: rows t, t+1, column g         b[1]: rows t+8, t+9, column g
//   C (16x8)   c[0], c[1]: row g, columns t, t+1   c[2], c[3]: row g + 8, the same columns
// so two neighbouring C tiles, rounded, are one A tile: P needs no shuffle between the two
// products. m16n8k8 (7.5 has no other) takes a[0], a[1] and b[0] of these: two of them, one after
// the other, are an m16n8k16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cute/arch/mma_sm75.hpp"
#include "cute/arch/mma_sm80.hpp"

namespace flash_ext::device {

template <typename Element>
struct MmaAtom;

template <>
struct MmaAtom<__half> : cute::SM80_16x8x16_F32F16F16F32_TN {};

template <>
struct MmaAtom<__nv_bfloat16> : cute::SM80_16x8x16_F32BF16BF16F32_TN {};

// d = a * b + c
template <typename Element>
__device__ __forceinline__ void mma_16x8x16(float* d, const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1, const float* c) {
  MmaAtom<Element>::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                        c[3]);
}

// c += a * b
template <typename Element>
__device__ __forceinline__ void mma_16x8x16(float* c, const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  mma_16x8x16<Element>(c, a, b0, b1, c);
}

// d = a * b + c in float16, for 8 of k.
__device__ __forceinline__ void mma_16x8x8(float* d, uint32_t a0, uint32_t a1, uint32_t b,
                                           const float* c) {
  cute::SM75_16x8x8_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a0, a1, b, c[0], c[1], c[2], c[3]);
}

}  // namespace flash_ext::device
