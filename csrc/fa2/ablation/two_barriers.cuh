// Two barriers a block of keys: a buffer is loaded anew once all warps have said that they left it,
// which costs a second barrier; the shipped ring finds that out at the barrier of the next block.
#pragma once

#include "fa2/fwd.cuh"

namespace flash_ext::fa2 {

template <typename Traits>
struct TwoBarrierLoads : RingLoads<Traits> {
  using RingLoads<Traits>::blocks, RingLoads<Traits>::stage;

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < Traits::kStages; ++i)
      blocks.template load<Traits>(blocks.range.max - 1 - i, i, true, true);
  }
  __device__ __forceinline__ uint32_t keys(int) {
    cp_async_wait<Traits::kStages - 1>();
    block_barrier();  // block n is there
    return blocks.smem + stage * 2 * Traits::kKVBytes;
  }
  __device__ __forceinline__ void next(int n) {
    block_barrier();  // all have left it
    blocks.template load<Traits>(n - Traits::kStages, stage, true, true);
    RingLoads<Traits>::next(n);
  }
};

template <typename Shipped>
struct TwoBarriers : Shipped {
  using Loads = TwoBarrierLoads<TwoBarriers>;
};

}  // namespace flash_ext::fa2
