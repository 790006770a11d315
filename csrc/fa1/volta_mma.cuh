// The two products of a Volta forward, on mma.sync m8n8k4. How their operands lie: volta_lanes.cuh.
#pragma once

#include "device/ptx.cuh"
#include "device/warp_rows.cuh"
#include "fa1/volta_lanes.cuh"

namespace flash_ext::fa1 {

using namespace device;

// d = a * b + c; a: 4 of a row, b: 4 of a column.
__device__ __forceinline__ void mma_884_columns(float* d, uint32_t a0, uint32_t a1, uint32_t b0,
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
__device__ __forceinline__ void mma_884_rows(float* d, uint32_t a0, uint32_t a1, uint32_t b0,
                                             uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

// S = Q K^T - reference; of modified scores Q K^T alone. q, k: this lane's addresses of the warp's
// rows (a_row) and of the keys (b_column). A lane reads 8 of a row at once, for two instructions.
template <typename Traits>
__device__ __forceinline__ void multiply_qk(Scores<Traits>& s, WarpRows<Traits>& rows, uint32_t q,
                                            uint32_t k) {
#pragma unroll
  for (int d = 0; d < Traits::kChunks; ++d) {
    uint4 a[Traits::kMTiles];
#pragma unroll
    for (int m = 0; m < Traits::kMTiles; ++m)
      a[m] = ld_shared_16(Swizzle<Traits>::step(q, d) + m * 16 * Traits::kRowBytes);
#pragma unroll
    for (int n = 0; n < Traits::kNTiles; n += 2) {
      const uint4 b = ld_shared_16(Swizzle<Traits>::step(k, d) + n * 8 * Traits::kRowBytes);
#pragma unroll
      for (int m = 0; m < Traits::kMTiles; ++m) {
        const float* x = rows.softmax[m].start;
        const float zero[8] = {}, start[8] = {x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3]};
        float* c = &s[m][4 * n];
        mma_884_columns(c, a[m].x, a[m].y, b.x, b.y, d > 0 ? c : Traits::kModified ? zero : start);
        mma_884_columns(c, a[m].z, a[m].w, b.z, b.w, c);
      }
    }
  }
}

// What a lane's neighbours need of its 16 rows and 16 keys of P: A fragments of four steps of 4
// keys each. p: as an m16n8k16 A fragment. Keys 2 t, 2 t + 1 of row g are here, the other two of a
// step in the lane that has row g + 8 to be this lane's A row; the keys of the other 8 columns in
// the lane of the other quad-pair, which has the same rows. Step 2 k + x: keys 8 k + 4 y to 8 k + 4
// y + 3, where y is this lane's half of the columns when x = 0, and the other half when x = 1.
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

// O += P V for 16 keys. p: their probabilities as m16n8k16 A fragments; v: this lane's address of
// the first key of its half of the columns (b_row, b_chunk), other: of the other half (b_row ^ 4).
// A chunk's 8 columns are columns of two tiles: see output_chunk.
template <typename Traits>
__device__ __forceinline__ void multiply_pv(WarpRows<Traits>& rows,
                                            const uint32_t (&p)[Traits::kMTiles][4], uint32_t v,
                                            uint32_t other) {
  uint32_t a[Traits::kMTiles][4][2];
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) relay(p[m], a[m]);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint32_t from = (step % 2 ? other : v) + step / 2 * 8 * Traits::kRowBytes;
#pragma unroll
    for (int d = 0; d < Traits::kChunks; d += 4) {
      const uint4 b = ld_shared_16(Swizzle<Traits>::step(from, d));
#pragma unroll
      for (int m = 0; m < Traits::kMTiles; ++m) {
        float* o = &rows.o[m][8 * (d / 2)];
        mma_884_rows(o, a[m][step][0], a[m][step][1], b.x, b.y);
        mma_884_rows(o + 8, a[m][step][0], a[m][step][1], b.z, b.w);
      }
    }
  }
}

// 8 columns of one of this lane's rows of O, rounded, from chunks d to d + 3 of the row: o[8 x +
// {0, 1, 4, 5}], x = 0, 1, times weight. Lanes of a row have four chunks together: this one gets
// chunk output_chunk.
__device__ __forceinline__ int output_chunk() {
  return threadIdx.x / 4 % 2 + threadIdx.x / 2 % 2 * 2;
}
__device__ __forceinline__ void gather_output(const float* o, float weight, uint32_t (&words)[4]) {
  const bool second = threadIdx.x & VoltaLanes::kNextPair;
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const float* tile = o + 8 * x;
    const uint32_t first_half = pack<__half>(tile[0] * weight, tile[1] * weight),
                   second_half = pack<__half>(tile[4] * weight, tile[5] * weight);
    const uint32_t got =
        __shfl_xor_sync(0xffffffffu, second ? first_half : second_half, VoltaLanes::kNextPair);
    words[2 * x] = second ? got : first_half;
    words[2 * x + 1] = second ? second_half : got;
  }
}

}  // namespace flash_ext::fa1
