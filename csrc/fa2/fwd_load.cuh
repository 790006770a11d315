// How blocks of keys come to shared memory, from the last visible one to the first.
#pragma once

#include "device/mask.cuh"
#include "fa2/smem_tile.cuh"

namespace flash_ext::fa2 {

// Where the keys of a tile of work are, and where they go.
struct KeyBlocks {
  const BlockRange& range;  // in shared memory
  const MatrixRows &k, &v;
  uint32_t smem;  // the first buffer: K, then V

  // A group is committed also when there is no block n: the waits count groups.
  template <typename Traits>
  __device__ __forceinline__ void load(int n, int stage, bool with_k, bool with_v) const {
    if (n >= range.min) {
      const uint32_t to = smem + stage * 2 * Traits::kKVBytes;
      const int first = n * Traits::kBlockN;
      if (with_k) load_rows<Traits, Traits::kBlockN>(to, k, first);
      if (with_v) load_rows<Traits, Traits::kBlockN>(to + Traits::kKVBytes, v, first);
    }
    cp_async_commit();
  }
};

// A ring of kStages buffers, two at least. One barrier a block: behind it the block that was waited
// for is there for all warps, and the buffer of the block before it is free for the next load,
// which then has the whole block's work to arrive.
template <typename Traits>
struct RingLoads {
  KeyBlocks blocks;
  int stage = 0;

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < Traits::kStages - 1; ++i)
      blocks.load<Traits>(blocks.range.max - 1 - i, i, true, true);
  }
  // Behind it K of block n is there, at the address returned.
  __device__ __forceinline__ uint32_t keys(int n) {
    cp_async_wait<Traits::kStages - 2>();  // this thread's part of block n
    block_barrier();  // everybody's is, and nobody reads the buffer of block n + 1 any more
    blocks.load<Traits>(n - (Traits::kStages - 1), stage ? stage - 1 : Traits::kStages - 1, true,
                        true);
    return blocks.smem + stage * 2 * Traits::kKVBytes;
  }
  // Behind it V is there.
  __device__ __forceinline__ void values(int) {}
  // On to the next block.
  __device__ __forceinline__ void next(int) {
    stage = stage == Traits::kStages - 1 ? 0 : stage + 1;
  }
};

// One buffer of K and one of V, where two do not fit, or so that two CTAs share an SM: V loads
// during Q K^T and the next K during P V, for two barriers a block.
template <typename Traits>
struct AlternatingLoads {
  KeyBlocks blocks;

  __device__ __forceinline__ void start() {
    blocks.load<Traits>(blocks.range.max - 1, 0, true, false);
  }
  __device__ __forceinline__ uint32_t keys(int n) {
    cp_async_wait<0>();  // this thread's part of K
    block_barrier();     // everybody's is there, and nobody reads V any more
    blocks.load<Traits>(n, 0, false, true);
    return blocks.smem;
  }
  __device__ __forceinline__ void values(int n) {
    cp_async_wait<0>();  // this thread's part of V
    block_barrier();     // everybody's is there, and nobody reads K any more
    blocks.load<Traits>(n - 1, 0, true, false);
  }
  __device__ __forceinline__ void next(int) {}
};

}  // namespace flash_ext::fa2
