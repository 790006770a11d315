// Tiles of keys that several CTAs share, so that none stands idle where tiles are few, or at the
// end where they are many. Each part walks over a share of the blocks of queries. All but the last
// leave their dK and dV in the workspace; the last adds them to its own, in the order of the parts.
// Items are taken in this order too, so it waits only for parts that have begun.
#pragma once

#include "device/mbarrier.cuh"
#include "fa3/bwd_traits.cuh"

namespace flash_ext::fa3 {

// Which part of which tile an item is.
__device__ __forceinline__ uint32_t find_part(const SplitTiles& split, uint32_t item,
                                              BwdWork& work) {
  work.part = -1, work.leaves = false;
  if (item < split.whole) return item;
  const uint32_t tile = (item - split.whole) / split.parts;
  work.part = item - split.whole - tile * split.parts;
  work.slot = tile * (split.parts - 1);
  return split.whole + tile;
}

// The part's share of the tile's blocks of queries, last ones first. What is more than the host
// thought, which only has a hint of packed lengths, is the last part's.
__device__ __forceinline__ void take_part(const SplitTiles& split, BwdWork& work) {
  if (work.part < 0) return;
  BlockRange& range = work.range;
  range.max -= work.part * split.blocks;
  const int min = work.part == split.parts - 1 ? range.min : range.max - split.blocks;
  work.leaves = min > range.min;
  if (work.leaves) range.min = min;
}

// Where this thread keeps what it holds of dK and dV of part `part`: every kThreads-th vector.
template <typename Traits>
struct PartSums {
  static constexpr int kThreads = 128 * Traits::kConsumers;
  float4* at;

  __device__ __forceinline__ PartSums(const BwdParams& params, const BwdWork& work, int part)
      : at(reinterpret_cast<float4*>(params.split.sums) +
           int64_t{work.slot + part} * Traits::kPartVectors + fresh_thread_index() - 128) {}

  template <int kCount>
  __device__ __forceinline__ void put(const float (&c)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4, at += kThreads)
      *at = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
  }
  template <int kCount>
  __device__ __forceinline__ void add_to(float (&c)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4, at += kThreads) {
      const float4 v = *at;
      c[i] += v.x, c[i + 1] += v.y, c[i + 2] += v.z, c[i + 3] += v.w;
    }
  }
  template <int kRows, int kCount>
  __device__ __forceinline__ void put(const float (&c)[kRows][kCount]) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) put(c[row]);
  }
  template <int kRows, int kCount>
  __device__ __forceinline__ void add_to(float (&c)[kRows][kCount]) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) add_to(c[row]);
  }
};

// Of a consumer's warp that has computed its part: whether the gradients are whole now, and this
// thread's to write.
template <typename Traits, typename Dk, typename Dv>
__device__ __forceinline__ bool join_parts(const BwdParams& params, const BwdWork& work, Dk& dk,
                                           Dv& dv) {
  if (work.leaves) {
    PartSums<Traits> sums(params, work, work.part);
    sums.put(dk), sums.put(dv);
    __syncwarp();
    if (fresh_thread_index() % 32 == 0) pass_turn(params.split.ready + work.slot + work.part);
    return false;
  }
  for (int part = 0; part < work.part; ++part) {
    wait_for_turn(params.split.ready + work.slot + part, 4 * Traits::kConsumers);
    PartSums<Traits> sums(params, work, part);
    sums.add_to(dk), sums.add_to(dv);
  }
  return true;
}

}  // namespace flash_ext::fa3
