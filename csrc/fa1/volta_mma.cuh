// Products on Volta's mma.sync m8n8k4. How their operands lie: volta_lanes.cuh.
#pragma once

#include "device/ptx.cuh"
#include "fa1/volta_lanes.cuh"

namespace flash_ext::fa1 {

using namespace device;

// d = a * b + c; a: 4 of a row, b: 4 of a column.
__device__ __forceinline__ void mma_884(float* d, uint32_t a0, uint32_t a1, uint32_t b0,
                                        uint32_t b1, const float* c) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11}, {%12, %13, %14, %15, %16, %17, %18, %19};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]),
        "=f"(d[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]), "f"(c[4]),
        "f"(c[5]), "f"(c[6]), "f"(c[7]));
}

// d += a * b; b: 4 of a row.
__device__ __forceinline__ void mma_884_b_rows(float* d, uint32_t a0, uint32_t a1, uint32_t b0,
                                               uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

// d += a * b; a: 4 of a column, b: 4 of a row.
__device__ __forceinline__ void mma_884_a_columns(float* d, const uint2& a, const uint2& b) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.col.row.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y));
}

// acc = A B^T + start over the head dim. a, b: this lane's VoltaAddress a and b of the first rows.
// A lane reads 8 of a row at once, for two instructions. start: of 16 rows, rows g and g + 8 as an
// accumulator has them.
template <typename Traits, int kTiles, int kCount>
__device__ __forceinline__ void multiply(float (&acc)[kTiles][kCount], uint32_t a, uint32_t b,
                                         const float (&start)[kTiles][4]) {
#pragma unroll
  for (int d = 0; d < Traits::kChunks; ++d) {
    uint4 fa[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
      fa[m] = ld_shared_16(Swizzle<Traits>::step(a, d) + m * 16 * Traits::kRowBytes);
#pragma unroll
    for (int n = 0; n < kCount / 8; ++n) {
      const uint4 fb = ld_shared_16(Swizzle<Traits>::step(b, d) + n * 16 * Traits::kRowBytes);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const float* x = start[m];
        const float first[8] = {x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3]};
        float* c = &acc[m][8 * n];
        mma_884(c, fa[m].x, fa[m].y, fb.x, fb.y, d == 0 ? first : c);
        mma_884(c, fa[m].z, fa[m].w, fb.z, fb.w, c);
      }
    }
  }
}

// A fragments of four steps of 4 columns each, of 16 rows and 16 columns that lie as an m16n8k16 A
// fragment. Columns 2 t, 2 t + 1 of row g are here, the other two of a step in the lane that has
// row g + 8 to be this lane's A row; the columns of the other half of 8 in the lane of the other
// quad-pair with the same rows. Step 2 k + x: columns 8 k + 4 y to 8 k + 4 y + 3, where y is this
// lane's half when x = 0, and the other half when x = 1.
__device__ __forceinline__ void relay(const uint32_t (&p)[4], uint32_t (&a)[4][2]) {
  const bool second = threadIdx.x & VoltaLanes::kNextPair;  // its A row is g + 8
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t low = p[2 * k], high = p[2 * k + 1];
    const uint32_t got = __shfl_xor_sync(0xffffffffu, second ? low : high, VoltaLanes::kNextPair);
    a[2 * k][0] = second ? got : low;
    a[2 * k][1] = second ? high : got;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      a[2 * k + 1][i] = __shfl_xor_sync(0xffffffffu, a[2 * k][i], VoltaLanes::kNextTwoPairs);
  }
}

// acc += A B for 16 rows of B. a: as relay makes it; b, other: this lane's VoltaAddress b_rows of
// the first row. Of B's columns every 4 of kApart chunks of 8; acc[m][16 k] to acc[m][16 k + 15]
// are columns of the k-th four chunks, as gather_row has them.
template <typename Traits, int kApart, int kTiles, int kCount>
__device__ __forceinline__ void add_product(float (&acc)[kTiles][kCount],
                                            const uint32_t (&a)[kTiles][4][2], uint32_t b,
                                            uint32_t other) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint32_t from = (step % 2 ? other : b) + step / 2 * 8 * Traits::kRowBytes;
#pragma unroll
    for (int k = 0; k < kCount / 16; ++k) {
      const uint4 fb = ld_shared_16(Swizzle<Traits>::step(from, kApart * k));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float* c = &acc[m][16 * k];
        mma_884_b_rows(c, a[m][step][0], a[m][step][1], fb.x, fb.y);
        mma_884_b_rows(c + 8, a[m][step][0], a[m][step][1], fb.z, fb.w);
      }
    }
  }
}

// 8 columns of one of this lane's rows of a product that add_product made, rounded: of the four
// chunks at acc the one with number gathered_chunk. The lanes of a row have all four. acc: of the
// lane's first row, or 2 further.
__device__ __forceinline__ int gathered_chunk() {
  return threadIdx.x / 4 % 2 + threadIdx.x / 2 % 2 * 2;
}
__device__ __forceinline__ void gather_row(const float* acc, float weight, uint32_t (&words)[4]) {
  const bool second = threadIdx.x & VoltaLanes::kNextPair;
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const float* tile = acc + 8 * x;
    const uint32_t first_half = pack<__half>(tile[0] * weight, tile[1] * weight),
                   second_half = pack<__half>(tile[4] * weight, tile[5] * weight);
    const uint32_t got =
        __shfl_xor_sync(0xffffffffu, second ? first_half : second_half, VoltaLanes::kNextPair);
    words[2 * x] = second ? got : first_half;
    words[2 * x + 1] = second ? second_half : got;
  }
}

// kRows rows from first_row on to shared memory as RowsOfA has them, by the whole block.
template <typename Traits, int kRows>
__device__ __forceinline__ void load_rows_of_a(uint32_t smem, const MatrixRows& rows,
                                               int first_row) {
  constexpr int kAcross = RowsOfA<Traits>::kGroup, kPass = Traits::kThreads / kAcross;
  static_assert(kRows % kPass == 0, "whole passes");
  const uint32_t thread = fresh_thread_index(), chunk = thread % kAcross;
#pragma unroll
  for (int r = thread / kAcross; r < kRows; r += kPass) {
    const int i = first_row + r;
    const char* source = rows.first + chunk * 16u + int64_t{i} * rows.stride;
#pragma unroll
    for (int c = 0; c < Traits::kChunks; c += kAcross) {
      uint4 value = make_uint4(0, 0, 0, 0);
      if (i < rows.end && static_cast<int>(c + chunk) < rows.dim / 8)
        value = ld_global_16(source + c * 16);
      st_shared_16(smem + RowsOfA<Traits>::offset(r, c + chunk), value);
    }
  }
}

}  // namespace flash_ext::fa1
