// The producer warp group of the forward: one thread finds this CTA's tiles, another loads them.
#pragma once

#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "fa3/fwd_params.h"
#include "fa3/fwd_traits.cuh"

namespace flash_ext::fa3 {

__device__ __forceinline__ uint32_t next_tile(const FwdParams& params, uint32_t tile) {
  return params.next_tile ? gridDim.x + atomicAdd(params.next_tile, 1u) : tile + gridDim.x;
}

// The next tile that has rows, or head = -1 at the end.
template <typename Traits>
__device__ __forceinline__ void next_work(const FwdParams& params, uint32_t& tile, TileWork& work) {
  for (; tile < params.scheduler.num_tiles; tile = next_tile(params, tile)) {
    find_work<Traits::kBlockM, Traits::kBlockN>(params, tile, work);
    if (work.m_block * Traits::kBlockM >= work.rows) continue;  // packed: a slot without rows
    const int kv_head = work.head / params.heads_per_kv, length = work.visible.seqlen_k,
              batch = params.cu_seqlens_k ? 0 : max(work.sequence, 0);
    work.q_at = tma_at(params.q, work.batch_q, work.q_row, work.used_rows,
                       work.m_block * Traits::kBlockM, work.head);
    work.k_at = tma_at(params.k, batch, work.k_row, length, 0, kv_head);
    work.v_at = tma_at(params.v, batch, work.k_row, length, 0, kv_head);
    const Strides& stride = params.out_stride;
    work.out_offset =
        work.batch_q * stride.batch + work.q_row * stride.row + work.head * stride.head;
    work.sink = params.sinks ? params.sinks[work.head] / params.score_scale : -INFINITY;
    if (work.range.min >= work.range.max) work.range = {0, 1, 0, 0};  // one block, passed over
#pragma unroll 1
    for (int group = 0; group < Traits::kConsumers; ++group) {
      const int begin = work.m_block * Traits::kBlockM + 64 * group,
                end = min(begin + 64, work.used_rows);
      BlockRange range{};
      if (begin < end) range = block_range<Traits::kBlockN>(work.visible, begin, end);
      if (range.min >= range.max) range.min = range.max = work.range.min;
      work.groups[group] = range;
      work.first_keys[group] = work.visible.end(end - 1) - (range.max - 1) * Traits::kBlockN;
    }
    if constexpr (Traits::kModified) {
      if (work.sequence >= 0) work.modifier = make_modifier(params, work);
    }
    return;
  }
  work.head = -1;
}

// One thread finds tiles, so that the search and the counter's latency delay no load.
template <typename Traits>
__device__ __forceinline__ void schedule(const FwdParams& params, Barriers<Traits>& barriers) {
  uint32_t tile = blockIdx.x;
  for (uint32_t count = 0;; ++count) {
    TileSlot& slot = barriers.tiles[count % kTilesAhead];
    mbarrier_wait(smem_address(&slot.empty), (count / kTilesAhead & 1) ^ 1);
    next_work<Traits>(params, tile, slot.work);
    mbarrier_arrive(smem_address(&slot.full));
    if (slot.work.head < 0) return;
    // Claimed no earlier than needed: who is done first takes the next tile.
    mbarrier_wait(smem_address(&barriers.almost_loaded), count & 1);
    tile = next_tile(params, tile);
  }
}

// Another thread loads.
template <typename Traits>
struct Producer {
  static constexpr int kSlabQ = Traits::kBlockM * kSlabRowBytes,
                       kSlabKV = Traits::kBlockN * kSlabRowBytes;
  using Ring = RingPosition<Traits::kStages>;

  const FwdParams& params;
  const Smem<Traits>& smem;
  Barriers<Traits>& barriers;
  uint32_t block = 0;

  __device__ __forceinline__ TileWork& work(uint32_t count) const {
    return barriers.tiles[count % kTilesAhead].work;
  }

  __device__ __forceinline__ void load_q(uint32_t count) {
    const RingPosition<Traits::kQStages> ring(count);
    mbarrier_wait(smem_address(&barriers.q_empty[ring.stage]), ring.phase ^ 1);
    const uint32_t full = smem_address(&barriers.q_full[ring.stage]);
    mbarrier_arrive_expect(full, Traits::kQBytes);
    for (int slab = 0; slab < Traits::kSlabs; ++slab) {
      tma_load(smem.q + ring.stage * Traits::kQBytes + slab * kSlabQ, params.q, full,
               work(count).q_at, slab * kSlabColumns, kEvictFirst);
    }
  }

  // Block n of K or of V, once the consumers are done with what was in its buffer.
  template <int kSlabs>
  __device__ __forceinline__ void load(const TensorMap& map, TmaCoordinates at, int n,
                                       uint64_t (&full)[Traits::kStages],
                                       uint64_t (&empty)[Traits::kStages], uint32_t to) {
    const Ring ring(block);
    mbarrier_wait(smem_address(&empty[ring.stage]), ring.phase ^ 1);
    mbarrier_arrive_expect(smem_address(&full[ring.stage]), kSlabs * kSlabKV);
    at.row += n * Traits::kBlockN;
    to += ring.stage * kSlabs * kSlabKV;
    for (int slab = 0; slab < kSlabs; ++slab) {
      tma_load(to + slab * kSlabKV, map, smem_address(&full[ring.stage]), at, slab * kSlabColumns,
               kEvictLast);
    }
  }

  __device__ __forceinline__ void load_block(uint32_t count, int n) {
    load<Traits::kSlabs>(params.k, work(count).k_at, n, barriers.k_full, barriers.k_empty, smem.k);
    // A single Q buffer: K's is free while the tile before still needs Q.
    if (Traits::kQStages == 1 && n == work(count).range.max - 1) load_q(count);
    load<Traits::kSlabsV>(params.v, work(count).v_at, n, barriers.v_full, barriers.v_empty, smem.v);
    ++block;
  }

  __device__ __forceinline__ void run() {
    for (uint32_t count = 0;; ++count) {
      TileSlot& slot = barriers.tiles[count % kTilesAhead];
      mbarrier_wait(smem_address(&slot.full), count / kTilesAhead & 1);
      if (work(count).head < 0) return;
      if (Traits::kQStages > 1) load_q(count);
      for (int n = work(count).range.max - 1; n >= work(count).range.min; --n) {
        if (n == min(work(count).range.max - 1, work(count).range.min + 1))
          mbarrier_arrive(smem_address(&barriers.almost_loaded));
        load_block(count, n);
      }
      mbarrier_arrive(smem_address(&slot.empty));
    }
  }
};

}  // namespace flash_ext::fa3
