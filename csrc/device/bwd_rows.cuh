// The row kernels of a backward, around its main kernel: see bwd_rows.h. Memory-bound: they read O
// and dO once, and dQ's sums once.
//
// Traits: Element, kBlockM, kHeadDim and kHeadDimV (the buckets), kDqVector (see dq_index). A main
// kernel has Traits of its own, so each instance has row kernels of its own too.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "device/bwd_rows_params.h"
#include "device/ptx.cuh"

namespace flash_ext::device {

constexpr int kRowThreads = 256;
constexpr int kLanesPerRow = 8;  // each takes 8 columns of every 64

template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

template <typename Element>
__device__ __forceinline__ float dot_8(const uint4& x, const uint4& y, float sum) {
  const uint32_t xs[] = {x.x, x.y, x.z, x.w}, ys[] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = unpack<Element>(xs[i]), b = unpack<Element>(ys[i]);
    sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
  }
  return sum;
}

// Element (row, 0) of a tile's sequence and head.
__device__ __forceinline__ int64_t row_offset(const Strides& stride, const RowTile& tile, int row) {
  return tile.batch * stride.batch + (tile.first_row + row) * stride.row + tile.head * stride.head;
}

// rowsum(dO O) of one row, in all of its lanes.
template <typename Traits>
__device__ __forceinline__ float dot_rows(const BwdRowsParams& params, const RowTile& tile, int row,
                                          bool used) {
  using Element = typename Traits::Element;
  const Element* out =
      static_cast<const Element*>(params.out) + row_offset(params.out_stride, tile, row);
  const Element* dout =
      static_cast<const Element*>(params.dout) + row_offset(params.dout_stride, tile, row);
  float sum = 0.f;
#pragma unroll
  for (int slab = 0; slab < Traits::kHeadDimV; slab += 64) {
    const int column = slab + threadIdx.x % kLanesPerRow * 8;
    if (!used || column >= params.head_dim_v) continue;
    const uint4 d = *reinterpret_cast<const uint4*>(dout + column);
    sum = dot_8<Element>(*reinterpret_cast<const uint4*>(out + column), d, sum);
    if (params.dout_copy) {
      Element* copy =
          static_cast<Element*>(params.dout_copy) + row_offset(params.copy_stride, tile, row);
      *reinterpret_cast<uint4*>(copy + column) = d;
    }
  }
#pragma unroll
  for (int mask = 1; mask < kLanesPerRow; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  return sum;
}

// The sum over a block's threads, in thread 0; always in the same order.
template <typename T>
__device__ __forceinline__ T block_sum(T value) {
  __shared__ T warps[kRowThreads / 32];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  if (threadIdx.x == 0) {
    for (const T& part : warps) value += part;
  }
  return value;
}

template <typename Traits>
__global__ void __launch_bounds__(kRowThreads)
    prepare_kernel(const __grid_constant__ BwdRowsParams params) {
  constexpr int kBlockM = Traits::kBlockM, kSums = kBlockM * Traits::kHeadDim / 4;
  const int64_t stride = int64_t{gridDim.x} * kRowThreads;
  for (int64_t i = int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < params.num_counters;
       i += stride) {
    params.counters[i] = 0;
  }
  if (blockIdx.x >= params.tiles.num_tiles) return;
  const RowTile tile = find_row_tile<kBlockM>(params.q, params.tiles, blockIdx.x);

  float4* sums = reinterpret_cast<float4*>(params.dq_sum) + tile.slot * kSums;
  for (int i = threadIdx.x; !params.turns && i < kSums; i += kRowThreads) {
    sums[i] = make_float4(0, 0, 0, 0);
  }

  const float sink = params.sinks ? params.sinks[tile.head] : 0.f;
  const int64_t lse_row =
      params.q.packed.cu_seqlens
          ? tile.head * params.q.packed.total + tile.first_row
          : (int64_t{tile.batch} * params.q.heads + tile.head) * params.q.seqlen;
  float d_sink = 0.f;
#pragma unroll 1  // unrolled, two values go through local memory on 8.0
  for (int r = threadIdx.x / kLanesPerRow; r < kBlockM; r += kRowThreads / kLanesPerRow) {
    const int row = tile.block * kBlockM + r;
    const bool used = row < tile.used;
    float delta = dot_rows<Traits>(params, tile, row, used);
    if (threadIdx.x % kLanesPerRow) continue;
    const float lse = used ? params.lse[lse_row + row] : -INFINITY;
    const bool counts = lse > -INFINITY;  // else no key was seen: P = 0
    if (counts && params.d_lse) delta -= params.d_lse[lse_row + row];
    if (!counts) delta = 0.f;
    params.lse_log2[tile.slot * kBlockM + r] = counts ? lse * 1.4426950408889634f : INFINITY;
    params.delta[tile.slot * kBlockM + r] = delta;
    if (counts && params.sinks) d_sink += expf(sink - lse) * delta;
  }
  if (!params.d_sink_parts) return;
  d_sink = block_sum(d_sink);
  if (threadIdx.x == 0) params.d_sink_parts[tile.slot] = d_sink;
}

// dQ's sums, scaled and rounded; zeros in rows that do not count.
template <typename Traits>
__global__ void __launch_bounds__(kRowThreads)
    finish_kernel(const __grid_constant__ BwdRowsParams params) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kRowBlocks = kBlockM / 16;
  constexpr int kUnits = kRowBlocks * Traits::kHeadDim / 64;  // 16 rows, 64 columns: a warp's
  const RowTile tile = find_row_tile<kBlockM>(params.q, params.tiles, blockIdx.x);
  if (tile.block * kBlockM >= tile.rows) return;
  const float* sums = params.dq_sum + tile.slot * kBlockM * Traits::kHeadDim;
  const int used = params.turns && params.turns[tile.slot] == 0 ? 0 : tile.used;
  const int lane = threadIdx.x % 32;
  for (int unit = threadIdx.x / 32; unit < kUnits; unit += kRowThreads / 32) {
    const int slab = unit / kRowBlocks, row_block = unit % kRowBlocks;
    uint32_t words[2][2][4];  // of a row: columns 8 j + 2 (lane % 4) for j < 4, and for the others
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = params.softmax_scale *
               sums[dq_index<kBlockM, Traits::kDqVector>(slab, row_block, j, lane, i)];
      }
      words[0][j / 4][j % 4] = pack<Element>(v[0], v[1]);
      words[1][j / 4][j % 4] = pack<Element>(v[2], v[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.block * kBlockM + row_block * 16 + lane / 4 + 8 * half;
      Element* dq = static_cast<Element*>(params.dq) + row_offset(params.dq_stride, tile, row);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t (&w)[4] = words[half][part];
        transpose_quad(w);
        const int column = slab * 64 + (4 * part + lane % 4) * 8;
        if (row >= tile.rows || column >= params.head_dim) continue;
        *reinterpret_cast<uint4*>(dq + column) =
            row < used ? make_uint4(w[0], w[1], w[2], w[3]) : make_uint4(0, 0, 0, 0);
      }
    }
  }
}

// d_sink[head] from its tiles' parts, in their order.
template <typename Traits>
__global__ void __launch_bounds__(kRowThreads)
    d_sink_kernel(const __grid_constant__ BwdRowsParams params) {
  const int head = blockIdx.x, slots = params.tiles.m_slots;
  const int64_t count = params.tiles.num_tiles / params.q.heads;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kRowThreads) {
    sum += params.d_sink_parts[(i / slots * params.q.heads + head) * slots + i % slots];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) params.d_sink[head] = static_cast<float>(-sum);
}

#ifndef __CUDACC_RTC__

template <typename Traits>
cudaError_t launch_prepare(const BwdRowsParams& params, cudaStream_t stream) {
  const int64_t tiles = params.tiles.num_tiles;
  if (tiles == 0 && params.num_counters == 0) return cudaSuccess;
  prepare_kernel<Traits><<<tiles ? tiles : 1, kRowThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

// Behind the main kernel.
template <typename Traits>
cudaError_t launch_finish(const BwdRowsParams& params, cudaStream_t stream) {
  const int64_t tiles = params.tiles.num_tiles;
  if (tiles > 0) finish_kernel<Traits><<<tiles, kRowThreads, 0, stream>>>(params);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || !params.sinks || params.q.heads == 0) return error;
  d_sink_kernel<Traits><<<params.q.heads, kRowThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

#endif

}  // namespace flash_ext::device
