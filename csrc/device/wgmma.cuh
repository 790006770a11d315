// Warp-group MMA: descriptors of 128-byte swizzled shared memory, and one call for each operand
// form.
//
// Tiles lie as TMA writes them: columns in slabs of 64 (128 bytes), a slab is rows of 128 bytes
// whose 16-byte chunks are permuted by the row modulo 8. The accumulator of m64nN: lane l of warp w
// holds rows 16 w + l / 4 and + 8, columns 8 j + 2 (l % 4) + {0, 1}, as c[4 j + {0, 1}] and c[4 j +
// {2, 3}].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cute/arch/mma_sm90_gmma_ext.hpp"

namespace flash_ext::device {

using cute::SM90::GMMA::Major;

constexpr int kSlabColumns = 64;
constexpr int kSlabRowBytes = 128;

// A matrix whose reduction runs along its rows' columns (Q, K): eight rows are 1024 bytes apart.
__device__ __forceinline__ uint64_t descriptor_k_major(uint32_t smem) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kStride = uint64_t{1024 >> 4} << 32,
                     kUnused = uint64_t{1} << 16;
  return kSwizzle128 | kStride | kUnused | ((smem & 0x3FFFF) >> 4);
}

// A matrix whose reduction runs along its rows (V): eight rows are 1024 bytes apart, slabs
// slab_bytes.
__device__ __forceinline__ uint64_t descriptor_mn_major(uint32_t smem, uint32_t slab_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kStride = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kStride | (uint64_t{slab_bytes >> 4} << 16) | ((smem & 0x3FFFF) >> 4);
}

// The descriptor of what lies `bytes` further on: one addition, where building it anew takes four.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + (bytes >> 4);
  return (descriptor & 0xFFFFFFFF00000000) | low;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to registers that an asynchronous MMA owns.
template <int kCount>
__device__ __forceinline__ void wgmma_own(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// The atoms of one element type and width: A and B from shared memory, both K-major (Q K^T) both
// MN-major (dS K from dS^T and K), or A MN-major (dO^T P from dO and P^T); and A from registers
// with B MN-major (P V).
template <typename Element, int kN>
struct WgmmaAtoms;

#define FLASH_EXT_WGMMA_ATOMS(N)                                                             \
  template <>                                                                                \
  struct WgmmaAtoms<__half, N> {                                                             \
    using Shared = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_SS<Major::K, Major::K>;       \
    using SharedMn = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_SS<Major::MN, Major::MN>;   \
    using SharedMnK = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_SS<Major::MN, Major::K>;   \
    using Registers = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_RS<Major::K, Major::MN>;   \
  };                                                                                         \
  template <>                                                                                \
  struct WgmmaAtoms<__nv_bfloat16, N> {                                                      \
    using Shared = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<Major::K, Major::K>;     \
    using SharedMn = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<Major::MN, Major::MN>; \
    using SharedMnK = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<Major::MN, Major::K>; \
    using Registers = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<Major::K, Major::MN>; \
  };
FLASH_EXT_WGMMA_ATOMS(32)
FLASH_EXT_WGMMA_ATOMS(40)
FLASH_EXT_WGMMA_ATOMS(48)
FLASH_EXT_WGMMA_ATOMS(64)
FLASH_EXT_WGMMA_ATOMS(80)
FLASH_EXT_WGMMA_ATOMS(96)
FLASH_EXT_WGMMA_ATOMS(160)
FLASH_EXT_WGMMA_ATOMS(112)
FLASH_EXT_WGMMA_ATOMS(128)
FLASH_EXT_WGMMA_ATOMS(176)
FLASH_EXT_WGMMA_ATOMS(192)
FLASH_EXT_WGMMA_ATOMS(256)
#undef FLASH_EXT_WGMMA_ATOMS

namespace detail {
using cute::SM90::GMMA::ScaleOut;

template <typename Atom, int kCount, size_t... kI>
__device__ __forceinline__ void shared_mma(float (&c)[kCount], uint64_t a, uint64_t b,
                                           ScaleOut scale, std::index_sequence<kI...>) {
  Atom::fma(a, b, c[kI]..., scale);
}
template <typename Atom, int kCount, size_t... kI>
__device__ __forceinline__ void register_mma(float (&c)[kCount], const uint32_t (&a)[4], uint64_t b,
                                             ScaleOut scale, std::index_sequence<kI...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, c[kI]..., scale);
}
}  // namespace detail

// c = a b, or c += a b, for a 64 x (2 kCount) tile of one warp group.
template <typename Element, int kCount>
__device__ __forceinline__ void wgmma_shared(float (&c)[kCount], uint64_t a, uint64_t b,
                                             bool accumulate) {
  detail::shared_mma<typename WgmmaAtoms<Element, 2 * kCount>::Shared>(
      c, a, b, accumulate ? detail::ScaleOut::One : detail::ScaleOut::Zero,
      std::make_index_sequence<kCount>{});
}

template <typename Element, int kCount>
__device__ __forceinline__ void wgmma_shared_mn(float (&c)[kCount], uint64_t a, uint64_t b,
                                                bool accumulate) {
  detail::shared_mma<typename WgmmaAtoms<Element, 2 * kCount>::SharedMn>(
      c, a, b, accumulate ? detail::ScaleOut::One : detail::ScaleOut::Zero,
      std::make_index_sequence<kCount>{});
}

// c += a b
template <typename Element, int kCount>
__device__ __forceinline__ void wgmma_shared_mn_k(float (&c)[kCount], uint64_t a, uint64_t b) {
  detail::shared_mma<typename WgmmaAtoms<Element, 2 * kCount>::SharedMnK>(
      c, a, b, detail::ScaleOut::One, std::make_index_sequence<kCount>{});
}

template <typename Element, int kCount>
__device__ __forceinline__ void wgmma_registers(float (&c)[kCount], const uint32_t (&a)[4],
                                                uint64_t b, bool accumulate) {
  detail::register_mma<typename WgmmaAtoms<Element, 2 * kCount>::Registers>(
      c, a, b, accumulate ? detail::ScaleOut::One : detail::ScaleOut::Zero,
      std::make_index_sequence<kCount>{});
}

}  // namespace flash_ext::device
