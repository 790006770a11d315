// The pieces of the backward's main kernel: how it cuts its work among warps, its shared memory,
// and its products on fragments.
#pragma once

#include <cuda_runtime.h>

#include "device/bwd_cut.h"
#include "device/bwd_params.h"
#include "device/ptx.cuh"
#include "device/visible.cuh"

namespace flash_ext::device {

// A matrix of 16-bit values in shared memory: rows of 16-byte chunks, permuted within a row so that
// the eight rows of an ldmatrix (and of a fragment's store) lie in eight different bank groups.
template <int kColumns>
struct Swizzled {
  static constexpr int kRowBytes = 2 * kColumns, kChunks = kColumns / 8;
  static constexpr int kGroup = kChunks % 8 == 0 ? 8 : 4;  // chunks that trade places
  static_assert(kChunks % kGroup == 0, "rows are whole groups of 4 or 8 chunks");

  __device__ __forceinline__ static uint32_t offset(int row, int chunk) {
    const int key = kGroup == 8 ? row & 7 : row >> 1 & 3;  // two rows of 4 chunks fill the banks
    return row * kRowBytes + ((chunk ^ key) << 4);
  }
  // The address `chunks` further in a row. The caller's own chunk has none of the bits of `chunks`.
  __device__ __forceinline__ static uint32_t right(uint32_t address, int chunks) {
    return (address ^ (chunks % kGroup << 4)) + chunks / kGroup * (kGroup * 16);
  }
  __device__ __forceinline__ static constexpr uint32_t down(int rows) { return rows * kRowBytes; }
};

// Whether an atomic adds four neighbours at once.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kVectorAtomics = true;
#else
constexpr bool kVectorAtomics = false;
#endif

// Generation: what a backend has of its own, mma and Loads (see bwd.cuh of fa1 and fa2).
template <typename Element_, typename Cut, typename Generation>
struct BwdTraits : Cut {
  using Element = Element_;
  using Loads = typename Generation::template Loads<BwdTraits>;
  using Rows = Swizzled<Cut::kHeadDim>;   // Q, K, V, dO
  using Scores = Swizzled<Cut::kBlockM>;  // P^T and dS^T: a row is a key

  // c += a b, 16 x 8 x 16.
  static __device__ __forceinline__ void mma(float* c, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    Generation::template mma<Element>(c, a, b0, b1);
  }
};

// ---- products ---------------------------------------------------------------------------------

// 32 rows of an A operand in shared memory. address: this lane's for ldmatrix, of row lane % 16 and
// chunk lane / 16.
template <typename Traits>
struct SmemRows {
  static constexpr int kUnroll = Traits::kHeadDim / 16;  // steps of 16 columns

  uint32_t address;

  // The fragments of 16 columns.
  __device__ __forceinline__ void load(uint32_t (&a)[2][4], int d) const {
    using Rows = typename Traits::Rows;
#pragma unroll
    for (int m = 0; m < 2; ++m) ldmatrix_x4(a[m], Rows::right(address, 2 * d) + Rows::down(16 * m));
  }
};

// acc (32 keys x kStepM queries) = A B^T over the head dim: S^T = K Q^T, dP^T = V dO^T. a, b: this
// lane's ldmatrix addresses, a of row lane % 16 and chunk lane / 16; b such that the two registers
// of a B fragment are neighbours, which the MMA wants: of row lane % 8 + lane / 16 * 8 and chunk
// lane / 8 % 2, in steps of 8 queries of row lane % 8 and chunk lane / 8.
template <typename Traits, typename Operand>
__device__ __forceinline__ void multiply_scores(float (&acc)[2][Traits::kStepM / 2],
                                                const Operand& a, uint32_t b) {
  using Rows = typename Traits::Rows;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < Traits::kStepM / 2; ++i) acc[m][i] = 0.f;
  }
  uint32_t fb[4];
#pragma unroll(Operand::kUnroll)
  for (int d = 0; d < Traits::kHeadDim / 16; ++d) {
    uint32_t fa[2][4];
    a.load(fa, d);
    if constexpr (Traits::kStepM == 8) {
      if (d % 2 == 0) ldmatrix_x4(fb, Rows::right(b, 2 * d));
#pragma unroll
      for (int m = 0; m < 2; ++m) Traits::mma(&acc[m][0], fa[m], fb[d % 2 * 2], fb[d % 2 * 2 + 1]);
    } else {
#pragma unroll
      for (int n = 0; n < Traits::kStepM / 16; ++n) {
        ldmatrix_x4(fb, Rows::right(b, 2 * d) + Rows::down(16 * n));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          Traits::mma(&acc[m][8 * n], fa[m], fb[0], fb[1]);
          Traits::mma(&acc[m][8 * n + 4], fa[m], fb[2], fb[3]);
        }
      }
    }
  }
}

// The A fragments of 16 queries, of P^T or dS^T as `probabilities` leaves them.
template <int kCount>
__device__ __forceinline__ void take_fragments(uint32_t (&a)[2][4], const uint32_t (&x)[2][kCount],
                                               int j) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[m][i] = x[m][4 * j + i];
  }
}

// The A fragments of 32 rows and 16 columns of a matrix in shared memory.
template <typename Matrix>
__device__ __forceinline__ void load_fragments(uint32_t (&a)[2][4], uint32_t address) {
  ldmatrix_x4(a[0], address);
  ldmatrix_x4(a[1], address + Matrix::down(16));
}

// acc (16 kCount rows x this warp's columns) += A B, one step of 16. a: its fragments; b: this
// lane's ldmatrix address in the 16 rows of B, of row lane % 16 and chunk lane / 16 of the warp's
// first 16 columns; the others lie kApart chunks apart.
template <typename Traits, int kApart, int kCount, int kSize>
__device__ __forceinline__ void add_product(float (&acc)[kCount][kSize],
                                            const uint32_t (&a)[kCount][4], uint32_t b) {
#pragma unroll
  for (int d = 0; d < kSize / 8; ++d) {
    uint32_t f[4];
    ldmatrix_x4_trans(f, Traits::Rows::right(b, kApart * d));
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
      Traits::mma(&acc[m][8 * d], a[m], f[0], f[1]);
      Traits::mma(&acc[m][8 * d + 4], a[m], f[2], f[3]);
    }
  }
}

// ---- scores -----------------------------------------------------------------------------------

// Scores of keys that a query does not see become -inf, in S^T: rows are keys. key: this lane's
// first; query: of its first column.
template <int kCount>
__device__ __forceinline__ void apply_mask_transposed(float (&s)[2][kCount], const Visible& visible,
                                                      int key, int query) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int begin = visible.begin(query + 2 * i + c) - key,
                end = visible.end(query + 2 * i + c) - key;
#pragma unroll
      for (int r = 0; r < 4; ++r) {  // keys 8 r
        if (8 * r < begin || 8 * r >= end) s[r / 2][i + 2 * (r % 2) + c] = -INFINITY;
      }
    }
  }
}

// A warp's 32 keys x kStepM queries, rounded and packed as they lie in registers, to shared memory
// from row `row` and chunk `chunk` on.
template <typename Scores, int kCount>
__device__ __forceinline__ void store_scores(uint32_t smem, int row, int chunk,
                                             const uint32_t (&x)[2][kCount]) {
  static_assert(kCount % 4 == 0 || kCount == 2, "16 queries, or 8");
  const int lane = threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kCount % 4 == 0) {  // the four registers of an A fragment, which are neighbours
    const uint32_t to = smem + Scores::offset(row + lane % 16, chunk + lane / 16);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const uint32_t fragment[4] = {x[m][i], x[m][i + 1], x[m][i + 2], x[m][i + 3]};
        stmatrix_x4(Scores::right(to, i / 2) + Scores::down(16 * m), fragment);
      }
    }
  } else {
    const uint32_t fragments[4] = {x[0][0], x[0][1], x[1][0], x[1][1]};
    stmatrix_x4(smem + Scores::offset(row + lane, chunk), fragments);
  }
#else
  const uint32_t to = smem + Scores::offset(row + lane / 4, chunk) + 4 * (lane % 4);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      st_shared(Scores::right(to, i / 2) + Scores::down(16 * m + 8 * (i % 2)), x[m][i]);
  }
#endif
}

}  // namespace flash_ext::device
