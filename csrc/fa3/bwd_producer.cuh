// The producer's warp group of a backward: one thread loads, others add dQ.
#pragma once

#include "device/bwd_rows.cuh"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "fa3/bwd_parts.cuh"

namespace flash_ext::fa3 {

// Fills in work, which lies in shared memory: the one thread that does it has few registers.
template <typename Traits>
__device__ __forceinline__ void find_bwd_work(const BwdParams& params, uint32_t item,
                                              BwdWork& work) {
  const uint32_t tile = find_part(params.split, item, work);
  asm volatile("" ::: "memory");  // what is known is stored: the search needs the registers
  work.keys = find_row_tile<Traits::kBlockN>(params.keys, params.scheduler, tile);
  work.keys.slot = 0;  // for nobody
  work.range = {};
  const int sequence = work.keys.sequence;
  if (sequence < 0) return;
  const Rows& q = params.rows.q;
  const int used_k = work.keys.used, used_q = used_of(q, sequence);
  work.q_row = first_row_of(q, sequence);
  work.batch_q = q.packed.cu_seqlens ? 0 : sequence;
  work.used_q = used_q;
  const int offset = params.top_left ? 0 : used_k - used_q;
  // i sees j iff j - offset - right <= i <= j - offset + left: the rule of Visible, mirrored.
  work.seen_by = {{used_q, -offset, params.window_right, params.window_left}, used_k};
  const int n_begin = work.keys.block * Traits::kBlockN,
            n_end = min(n_begin + Traits::kBlockN, used_k);
  if (n_begin >= n_end) return;
  if constexpr (Traits::kModified) {
    Work queries{};
    queries.sequence = sequence, queries.head = work.keys.head * params.heads_per_kv;
    work.modifier = make_modifier(params, queries);
  }
  work.range = block_range<Traits::kBlockM>(work.seen_by.queries, n_begin, n_end);
  // Keys past the end need the mask at every block.
  if (n_end - n_begin < Traits::kBlockN) work.range.full_max = work.range.full_min;
  take_part(params.split, work);
}

// Whether there is something to do: not for parts that a short tile does not have.
template <typename Traits>
__device__ __forceinline__ bool has_rows(const BwdWork& work) {
  return work.keys.block * Traits::kBlockN < work.keys.rows &&
         (work.part <= 0 || work.range.min < work.range.max);
}

// Where the block of queries m of a head of the group lies among all tiles of queries.
template <typename Traits>
__device__ __forceinline__ int64_t q_slot(const BwdParams& params, const BwdWork& work, int m,
                                          int member) {
  return m + first_slot_of<Traits::kBlockM>(params.rows.q, params.rows.tiles, work.keys.sequence,
                                            work.keys.head * params.heads_per_kv + member);
}

// Calls first(m, member), then next(m, member), for every block of queries that sees the keys, of
// which there is one at least, last first, and every head of their group. The heads inside: CTAs of
// neighbouring keys, which see different numbers of blocks, then go through the same ones at the
// same time, so that none waits long for another's addition to dQ and all find Q and dO in the L2.
template <typename First, typename Next>
__device__ __forceinline__ void for_each_q_block(const BwdParams& params, const BwdWork& work,
                                                 First&& first, Next&& next) {
  const int min = work.range.min;  // read once: such loads queue behind the consumers' products
  int m = work.range.max - 1, member = 0;
  first(m, member);
  for (;;) {
    if (++member == params.heads_per_kv) --m, member = 0;
    if (m < min) break;
    next(m, member);
  }
}

// The same for those who treat all alike; there may be none.
template <typename F>
__device__ __forceinline__ void for_each_q_block(const BwdParams& params, const BwdWork& work,
                                                 F&& f) {
  for (int m = work.range.max - 1; m >= work.range.min; --m) {
    for (int member = 0; member < params.heads_per_kv; ++member) f(m, member);
  }
}

template <typename Traits, typename Smem>
__device__ __forceinline__ void load_tiles(const BwdParams& params, const Smem& smem,
                                           BwdBarriers<Traits>& barriers) {
  constexpr int kSlabM = Traits::kBlockM * kSlabRowBytes, kSlabN = Traits::kBlockN * kSlabRowBytes;
  constexpr int kSlabs = slab_columns(Traits::kHeadDim) / kSlabColumns,
                kSlabsV = slab_columns(Traits::kHeadDimV) / kSlabColumns;
  uint32_t blocks = 0, tiles_loaded = 0;  // where the rings stand
  for (uint32_t taken = 0;; ++taken) {
    const uint32_t item = atomicAdd(params.next_item, 1u);
    mbarrier_wait(smem_address(&barriers.tile_empty[taken % 2]), taken / 2 % 2 ^ 1);
    BwdWork& work = barriers.works[taken % 2];
    work.keys.head = -1;
    if (item < params.split.num_items) find_bwd_work<Traits>(params, item, work);
    mbarrier_arrive(smem_address(&barriers.tile_full[taken % 2]));
    if (work.keys.head < 0) return;
    if (!has_rows<Traits>(work)) continue;  // for the others too

    auto load_q = [&](int m, int member) {
      const uint32_t stage = blocks % Traits::kStages;
      mbarrier_wait(smem_address(&barriers.q_empty[stage]), blocks / Traits::kStages % 2 ^ 1);
      const uint32_t full = smem_address(&barriers.q_full[stage]);
      mbarrier_arrive_expect(full, Traits::kQBytes + Traits::kRowBytes);
      const auto at = tma_at(params.q, work.batch_q, work.q_row, work.used_q, m * Traits::kBlockM,
                             work.keys.head * params.heads_per_kv + member);
      for (int slab = 0; slab < kSlabs; ++slab) {
        tma_load(smem.q + stage * Traits::kQBytes + slab * kSlabM, params.q, full, at,
                 slab * kSlabColumns, kEvictLast);
      }
      const int64_t slot = q_slot<Traits>(params, work, m, member);
      bulk_load(smem.lse + stage * Traits::kRowBytes, params.rows.lse_log2 + slot * Traits::kBlockM,
                Traits::kRowBytes, full);
    };
    auto load_dout = [&](int m, int member) {
      const uint32_t stage = blocks % Traits::kDoStages;
      mbarrier_wait(smem_address(&barriers.do_empty[stage]), blocks / Traits::kDoStages % 2 ^ 1);
      const uint32_t full = smem_address(&barriers.do_full[stage]);
      mbarrier_arrive_expect(full, Traits::kDoBytes + Traits::kRowBytes);
      const auto at = tma_at(params.dout, work.batch_q, work.q_row, work.used_q,
                             m * Traits::kBlockM, work.keys.head * params.heads_per_kv + member);
      for (int slab = 0; slab < kSlabsV; ++slab) {
        tma_load(smem.dout + stage * Traits::kDoBytes + slab * kSlabM, params.dout, full, at,
                 slab * kSlabColumns, kEvictLast);
      }
      const int64_t slot = q_slot<Traits>(params, work, m, member);
      bulk_load(smem.delta + stage * Traits::kRowBytes, params.rows.delta + slot * Traits::kBlockM,
                Traits::kRowBytes, full);
    };

    const BlockRange& range = work.range;
    const bool seen = range.min < range.max;
    if (seen) load_q(range.max - 1, 0);
    // Nobody reads K and V any more; above 128 columns, dK and dV have left.
    mbarrier_wait(smem_address(&barriers.v_empty), tiles_loaded % 2 ^ 1);
    mbarrier_wait(smem_address(&barriers.k_empty), tiles_loaded++ % 2 ^ 1);
    const uint32_t k_full = smem_address(&barriers.k_full), v_full = smem_address(&barriers.v_full);
    if (!seen) {  // handed over as they are: consumers that did not wait might be two tiles ahead
      mbarrier_arrive(k_full);
      mbarrier_arrive(v_full);
      continue;
    }
    const int batch_k = params.keys.packed.cu_seqlens ? 0 : work.keys.sequence;
    const int n_begin = work.keys.block * Traits::kBlockN;
    mbarrier_arrive_expect(k_full, Traits::kKBytes);
    const auto k_at =
        tma_at(params.k, batch_k, work.keys.first_row, work.keys.used, n_begin, work.keys.head);
    for (int slab = 0; slab < kSlabs; ++slab) {
      tma_load(smem.k + slab * kSlabN, params.k, k_full, k_at, slab * kSlabColumns, kEvictFirst);
    }
    mbarrier_arrive_expect(v_full, Traits::kVBytes);
    const auto v_at =
        tma_at(params.v, batch_k, work.keys.first_row, work.keys.used, n_begin, work.keys.head);
    for (int slab = 0; slab < kSlabsV; ++slab) {
      tma_load(smem.v + slab * kSlabN, params.v, v_full, v_at, slab * kSlabColumns, kEvictFirst);
    }
    for_each_q_block(params, work, [&](int m, int member) {
      if (member > 0 || m < range.max - 1) load_q(m, member);
      load_dout(m, member);
      ++blocks;
    });
  }
}

// How many blocks of keys before this one a block of queries sees.
template <typename Traits>
__device__ __forceinline__ int blocks_before(const BwdWork& work, int m) {
  const int m_end = min((m + 1) * Traits::kBlockM, work.used_q);
  return work.keys.block -
         block_range<Traits::kBlockN>(work.seen_by.visible(), m * Traits::kBlockM, m_end).min;
}

// Calls f(work) for every block of keys that load_tiles finds and that has rows.
template <typename Traits, typename F>
__device__ __forceinline__ void for_each_tile(BwdBarriers<Traits>& barriers, F&& f) {
  for (uint32_t tile = 0;; ++tile) {
    mbarrier_wait(smem_address(&barriers.tile_full[tile % 2]), tile / 2 % 2);
    const BwdWork& work = barriers.works[tile % 2];
    if (work.keys.head < 0) return;
    if (has_rows<Traits>(work)) f(work);
    mbarrier_arrive(smem_address(&barriers.tile_empty[tile % 2]));
  }
}

// Adds what the consumers leave in one stage of shared memory to the sums of dQ: a thread a stage,
// so that an addition may take longer than a step. The first block of keys that sees a block of
// queries stores, so nobody has to clear the sums; the others wait for it, or, when deterministic,
// for all before them. CTAs take blocks of keys in this order too, so nobody waits for a block that
// has not begun.
template <typename Traits>
__device__ __forceinline__ void add_dq(const BwdParams& params, const BwdSmem<Traits>& smem,
                                       BwdBarriers<Traits>& barriers, uint32_t stage) {
  uint32_t blocks = 0;
  for_each_tile(barriers, [&](const BwdWork& work) {
    for_each_q_block(params, work, [&](int m, int member) {
      if (blocks++ % Traits::kDqStages != stage) return;
      const int64_t slot = q_slot<Traits>(params, work, m, member);
      float* sums = params.rows.dq_sum + slot * (Traits::kDqBytes / 4);
      uint32_t* turn = params.turns + slot;
      const int before = blocks_before<Traits>(work, m);
      if (before > 0) wait_for_turn(turn, params.deterministic ? before : 1);
      mbarrier_wait(smem_address(&barriers.dq_full[stage]), (blocks - 1) / Traits::kDqStages % 2);
      async_proxy_fence();  // of what the consumers wrote: theirs would wait for their products
      const uint32_t dq = smem.dq + stage * Traits::kDqBytes;
      before > 0 ? bulk_add(sums, dq, Traits::kDqBytes) : bulk_store(sums, dq, Traits::kDqBytes);
      tma_store_commit();
      tma_store_wait_read();
      mbarrier_arrive(smem_address(&barriers.dq_empty[stage]));
      if (before == 0 || params.deterministic) {
        tma_store_wait();
        pass_turn(turn);
      }
    });
  });
  tma_store_wait();  // before shared memory goes
}

// When the consumers add dQ themselves: tells them when it is their turn for a slab. All blocks of
// keys before have added; that their own addition before is over is end_turns' to say.
template <typename Traits>
__device__ __forceinline__ void watch_turns(const BwdParams& params, BwdBarriers<Traits>& barriers,
                                            int slab) {
  const uint32_t come = smem_address(&barriers.turn_come[slab]);
  uint32_t blocks = 0;
  for_each_tile(barriers, [&](const BwdWork& work) {
    if (!params.turns) return;
    for_each_q_block(params, work, [&](int m, int member) {
      const int64_t slot = q_slot<Traits>(params, work, m, member);
      wait_for_turn(params.turns + Traits::kSlabs * slot + slab, blocks_before<Traits>(work, m));
      if (blocks > 0) mbarrier_wait(come, (blocks - 1) % 2);
      mbarrier_arrive(come);
      ++blocks;
    });
  });
}

// Tells other CTAs when this one's turn is over: another thread, for that takes as long as half of
// a step, and the next turn may have come already.
template <typename Traits>
__device__ __forceinline__ void end_turns(const BwdParams& params, BwdBarriers<Traits>& barriers) {
  uint32_t blocks = 0;
  for (int slab = 0; slab < Traits::kSlabs; ++slab)
    mbarrier_arrive(smem_address(&barriers.turn_come[slab]));
  for_each_tile(barriers, [&](const BwdWork& work) {
    if (!params.turns) return;
    for_each_q_block(params, work, [&](int m, int member) {
      const int64_t slot = q_slot<Traits>(params, work, m, member);
      for (int slab = 0; slab < Traits::kSlabs; ++slab) {
        mbarrier_wait(smem_address(&barriers.turn_over[slab]), blocks % 2);
        mbarrier_arrive(smem_address(&barriers.turn_come[slab]));
        pass_turn(params.turns + Traits::kSlabs * slot + slab);
      }
      ++blocks;
    });
  });
}

// ---- launch -----------------------------------------------------------------------------------

// What the row kernels know of the main kernel's tiles.
template <typename Traits>
struct BwdRowTraits {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kHeadDim = slab_columns(Traits::kHeadDim), kHeadDimV = Traits::kHeadDimV;
  static constexpr bool kDqVector = true;
};

// prepare, the main kernel, finish.
template <typename Traits>
cudaError_t launch_backward(void (*kernel)(BwdParams), const BwdParams& params, int64_t grid,
                            cudaStream_t stream) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) return error;
  error = launch_prepare<BwdRowTraits<Traits>>(params.rows, stream);
  if (error != cudaSuccess) return error;
  if (grid > 0) {
    kernel<<<static_cast<unsigned>(grid), Traits::kThreads, Traits::kSmemBytes, stream>>>(params);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return launch_finish<BwdRowTraits<Traits>>(params.rows, stream);
}

}  // namespace flash_ext::fa3
