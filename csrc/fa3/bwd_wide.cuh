// FlashAttention-3 backward for head dimensions above 128, where dK and dV of 64 keys would not fit
// a warp group's registers. See README.md for the schedule, drawn.
//
// A CTA owns a block of keys as in bwd.cuh, but here a warp group owns columns of dK, dV and dQ,
// one or two slabs of 64: it accumulates dV^T += dO^T P and dK^T += Q^T dS, for which P and dS of
// all keys lie in shared memory. For S = Q K^T and dP = dO V^T the keys are dealt out among the
// warp groups. As much of a slab of dQ as there is room for is staged for bulk additions.
#pragma once

#include <cuda_runtime.h>

#include "device/bwd_modify.cuh"
#include "device/bwd_rows.cuh"
#include "device/ptx.cuh"
#include "fa3/bwd_producer.cuh"
#include "fa3/bwd_wide_traits.cuh"
#include "fa3/launch.h"

namespace flash_ext::fa3 {

template <typename Traits>
struct BwdWideConsumer {
  using Element = typename Traits::Element;
  static constexpr int kS = Traits::kKeys / 2;    // accumulator registers of S and dP
  static constexpr int kD = Traits::kBlockN / 2;  // of a slab of dK^T, dV^T
  static constexpr int kSlabs = Traits::kSlabs, kSlabsV = Traits::kSlabsV;
  static constexpr int kSlabM = Traits::kBlockM * kSlabRowBytes,
                       kSlabN = Traits::kBlockN * kSlabRowBytes;
  static constexpr int kAllBarrier = 1, kOwnBarrier = 2;  // named; kOwnBarrier + group

  const BwdParams& params;
  const BwdWideSmem<Traits>& smem;
  BwdBarriers<Traits>& barriers;
  const int group;
  uint32_t blocks = 0, tiles = 0;  // of queries, of keys: where the rings stand

  __device__ __forceinline__ int q_stage() const { return blocks % Traits::kStages; }
  __device__ __forceinline__ uint32_t q_phase() const { return blocks / Traits::kStages % 2; }
  __device__ __forceinline__ int do_stage() const { return blocks % Traits::kDoStages; }
  __device__ __forceinline__ uint32_t do_phase() const { return blocks / Traits::kDoStages % 2; }
  static __device__ __forceinline__ void sync_all() {
    named_barrier_sync(kAllBarrier, 128 * Traits::kConsumers);
  }
  __device__ __forceinline__ void sync_own() const { named_barrier_sync(kOwnBarrier + group, 128); }
  static __device__ __forceinline__ bool is_leader() { return threadIdx.x % 128 == 0; }

  template <int kCount>
  static __device__ __forceinline__ void own(float (&c)[kCount][kD]) {
#pragma unroll
    for (int slab = 0; slab < kCount; ++slab) wgmma_own(c[slab]);
  }

  // c = A B^T of the kBlockM rows of a (Q, dO) and this warp group's keys of b (K, V).
  template <int kColumns>
  __device__ __forceinline__ void issue_scores(float (&c)[kS], uint32_t a, uint32_t b) const {
    const uint64_t a_first = descriptor_k_major(afresh(a));
    const uint64_t b_first = descriptor_k_major(afresh(b + group * Traits::kKeys * kSlabRowBytes));
    wgmma_own(c);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kColumns / 16; ++d) {
      const int slab = d / 4, inside = d % 4 * 32;
      wgmma_shared<Element>(c, advance(a_first, slab * kSlabM + inside),
                            advance(b_first, slab * kSlabN + inside), d > 0);
    }
    wgmma_commit();
  }

  // c += A^T B: a slab of a (dO, Q), and b (P, dS) as rows of keys.
  __device__ __forceinline__ void issue_gradient(float (&c)[kD], uint32_t a, uint32_t b) const {
    const uint64_t a_first = descriptor_mn_major(afresh(a), kSlabM);
    const uint64_t b_first = descriptor_k_major(afresh(b));
    wgmma_own(c);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < Traits::kBlockM / 16; ++m) {
      wgmma_shared_mn_k<Element>(c, advance(a_first, m * 16 * kSlabRowBytes),
                                 advance(b_first, m * 32));
    }
    wgmma_commit();
  }

  // A slab of dQ = dS K.
  __device__ __forceinline__ void issue_dq(float (&c)[32], int slab) const {
    const uint32_t ds = smem.ds, k = afresh(smem.k + group * kSlabs * kSlabN) + slab * kSlabN;
    const uint64_t a_first = descriptor_mn_major(afresh(ds), kSlabN),
                   b_first = descriptor_mn_major(k, kSlabN);
    wgmma_own(c);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < Traits::kBlockN / 16; ++n) {
      wgmma_shared_mn<Element>(c, advance(a_first, n * 16 * kSlabRowBytes),
                               advance(b_first, n * 16 * kSlabRowBytes), n > 0);
    }
    wgmma_commit();
  }

  // A 64 x (2 kCount) accumulator, scaled and rounded, as rows of its columns: row `first_row` + c
  // of the tile holds column c, 64 values.
  template <int kCount>
  static __device__ __forceinline__ void write_transposed(uint32_t tile, int first_row,
                                                          const float (&c)[kCount], float scale) {
    const int lane = afresh(threadIdx.x) % 32, warp = threadIdx.x / 32 % 4;
    const uint32_t mine = tile + (first_row + lane / 16 * 8 + lane % 8) * kSlabRowBytes +
                          (((warp * 2 + lane / 8 % 2) ^ (lane % 8)) << 4);
#pragma unroll
    for (int j = 0; j < kCount / 4; j += 2) {  // eights of columns, two at a time
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // i: row + 8 * (i % 2), columns + 8 * (i / 2)
        const int at = 4 * j + 2 * i < kCount ? 4 * j + 2 * i : 0;
        r[i] = pack<Element>(c[at] * scale, c[at + 1] * scale);
      }
      if (j + 1 < kCount / 4) {
        stmatrix_x4_trans(mine + j * 8 * kSlabRowBytes, r);
      } else {
        stmatrix_x2_trans(mine + j * 8 * kSlabRowBytes, r[0], r[1]);
      }
    }
  }

  __device__ __forceinline__ void run();
  __device__ __forceinline__ void differentiate(const BwdWork& work, float (&dk)[kSlabs][kD],
                                                float (&dv)[kSlabsV][kD]);
  template <bool kFirst>
  __device__ __forceinline__ void step(const BwdWork& work, int m, int member,
                                       float (&dk)[kSlabs][kD], float (&dv)[kSlabsV][kD]);
  __device__ __forceinline__ void issue_rest(float (&dq)[32], float (&dk)[kSlabs][kD]) const;
  __device__ __forceinline__ void write_p(const BwdWork& work, int m, int member, float (&s)[kS],
                                          float (&dp)[kS], float (&delta)[2],
                                          float (&dk)[kSlabs][kD]);
  __device__ __forceinline__ void add_dq(const BwdWork& work, int m, int member, uint32_t block,
                                         int slab, const float (&dq)[32]) const;
  __device__ __forceinline__ void end_turn(int slab) const;
  template <int kCount>
  __device__ __forceinline__ void write_gradient(const BwdWork& work, const TensorMap& map,
                                                 uint32_t tile, const float (&c)[kCount][kD],
                                                 float scale) const;
};

// What the block of queries before has left: its second slab of dQ and of dK.
template <typename Traits>
__device__ __forceinline__ void BwdWideConsumer<Traits>::issue_rest(float (&dq)[32],
                                                                    float (&dk)[kSlabs][kD]) const {
  const uint32_t q = smem.q + (q_stage() ^ 1) * Traits::kQBytes;
  issue_dq(dq, 1);
  issue_gradient(dk[1], q + (group * kSlabs + 1) * kSlabM, smem.ds);
}

// P of this warp group's keys and one block of queries, to shared memory; issues dP.
template <typename Traits>
__device__ __forceinline__ void BwdWideConsumer<Traits>::write_p(const BwdWork& work, int m,
                                                                 int member, float (&s)[kS],
                                                                 float (&dp)[kS], float (&delta)[2],
                                                                 float (&dk)[kSlabs][kD]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const float slope = Traits::kModified ? slope_of(params, work, member) : 0.f;
  float lse[2];
  // Loads from shared memory queue behind products: this one comes before them.
  const bool is_masked = m < work.range.full_min || m >= work.range.full_max;
  mbarrier_wait(smem_address(&barriers.do_full[do_stage()]), do_phase());  // dO, delta are there
  issue_scores<Traits::kHeadDimV>(dp, smem.dout + do_stage() * Traits::kDoBytes, smem.v);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = (row + 8 * half) * 4;
    lse[half] = ld_shared_float(smem.lse + q_stage() * Traits::kRowBytes + at);
    delta[half] = ld_shared_float(smem.delta + do_stage() * Traits::kRowBytes + at);
  }

  wgmma_wait<1>();  // S, and dK of the block before
  wgmma_own(s);
  own(dk);
  if (m < work.range.max - 1 || member > 0) release(barriers.q_empty[q_stage() ^ 1]);
  const int key = work.keys.block * Traits::kBlockN + group * Traits::kKeys;
  uint64_t kept = 0;
  if constexpr (Traits::kModified) {
    wgmma_wait<0>();
    wgmma_own(dp);
    const TilePlace at{m * Traits::kBlockM + row - lane / 4, key, work.seen_by.visible().offset};
    kept = modify_gradients<false>(s, dp, modifier_of(work, member, slope), at, [&](int) {
      return make_float4(delta[0], delta[0], delta[1], delta[1]);
    });
  }
  if (is_masked) apply_mask(s, work.seen_by.visible(), m * Traits::kBlockM + row, key);
  const float scale_log2 = Traits::kModified ? kLog2e : params.softmax_scale_log2;
#pragma unroll
  for (int i = 0; i < kS; ++i) {
    s[i] = exp2_approx(s[i] * scale_log2 - lse[i / 2 % 2]);
  }
  if constexpr (Traits::kModified) {
#pragma unroll
    for (int i = 0; i < kS; ++i) dp[i] *= s[i];
    drop(s, kept);
  }
  if (blocks > 0) {  // dV of the block before has read P, of all warp groups
    const uint32_t before = blocks - 1;
    mbarrier_wait(smem_address(&barriers.do_empty[before % Traits::kDoStages]),
                  before / Traits::kDoStages % 2);
  }
  write_transposed(smem.p, group * Traits::kKeys, s, 1.f);
  async_proxy_fence();
}

// One block of queries of a head of the group, but for the second slab of its dQ and dK, which the
// next step adds: so the additions, which take half of a step, begin half a step apart.
template <typename Traits>
template <bool kFirst>
__device__ __forceinline__ void BwdWideConsumer<Traits>::step(const BwdWork& work, int m,
                                                              int member, float (&dk)[kSlabs][kD],
                                                              float (&dv)[kSlabsV][kD]) {
  float s[kS], dp[kS], dq[32], delta[2];
  mbarrier_wait(smem_address(&barriers.q_full[q_stage()]), q_phase());  // Q, lse are there
  issue_scores<Traits::kHeadDim>(s, smem.q + q_stage() * Traits::kQBytes, smem.k);
  if constexpr (!kFirst && kSlabs == 2) {
    issue_rest(dq, dk);
    wgmma_wait<1>();  // S, and dQ
    wgmma_own(s);
    wgmma_own(dq);
    end_turn(0);
    const bool same = member > 0;
    add_dq(work, same ? m : m + 1, (same ? member : params.heads_per_kv) - 1, blocks - 1, 1, dq);
  }
  write_p(work, m, member, s, dp, delta, dk);
  sync_all();  // P of all keys is written, and nobody reads dS any more
  const uint32_t dout = smem.dout + do_stage() * Traits::kDoBytes;
#pragma unroll
  for (int slab = 0; slab < kSlabsV; ++slab)
    issue_gradient(dv[slab], dout + (Traits::owner_v(group) * kSlabsV + slab) * kSlabM, smem.p);
  if constexpr (!Traits::kModified) {
    wgmma_wait<kSlabsV>();  // dP
    wgmma_own(dp);
#pragma unroll
    for (int i = 0; i < kS; ++i) dp[i] = s[i] * (dp[i] - delta[i / 2 % 2]);
  }
  write_transposed(smem.ds, group * Traits::kKeys, dp, 1.f);
  async_proxy_fence();
  sync_all();  // dS of all keys is written
  if constexpr (!kFirst) end_turn(kSlabs - 1);
  issue_dq(dq, 0);
  issue_gradient(dk[0], smem.q + q_stage() * Traits::kQBytes + group * kSlabs * kSlabM, smem.ds);
  wgmma_wait<1>();  // dV, and the first slab of dQ
  wgmma_own(dq);
  own(dv);
  release(barriers.do_empty[do_stage()]);
  add_dq(work, m, member, blocks, 0, dq);
  ++blocks;
}

// Each warp adds its rows of a slab of dQ.
template <typename Traits>
__device__ __forceinline__ void BwdWideConsumer<Traits>::add_dq(const BwdWork& work, int m,
                                                                int member, uint32_t block,
                                                                int slab,
                                                                const float (&dq)[32]) const {
  const uint32_t thread = afresh(threadIdx.x) - 128, lane = thread % 32;  // of the consumers
  const int64_t slot = q_slot<Traits>(params, work, m, member);
  float* sums =
      params.rows.dq_sum + slot * (Traits::kBlockM * Traits::kHeadDim) +
      dq_index<Traits::kBlockM, true>(thread / 128 * kSlabs + slab, thread / 32 % 4, 0, 0, 0);
  const uint32_t staged = smem.dq + thread / 32 * Traits::kStagedBytes;
  if (params.turns) mbarrier_wait(smem_address(&barriers.turn_come[slab]), block % 2);
#pragma unroll
  for (int j = Traits::kStaged; j < 8; ++j) {
    red_add_floats(sums + dq_index<Traits::kBlockM, true>(0, 0, j, lane, 0), dq[4 * j],
                   dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  }
  if (lane == 0) tma_store_wait_read();  // what was staged has been read
  __syncwarp();
#pragma unroll
  for (int j = 0; j < Traits::kStaged; ++j) {
    st_shared_floats(staged + (32 * j + lane) * 16, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2],
                     dq[4 * j + 3]);
  }
  async_proxy_fence();
  __syncwarp();
  if (lane == 0) {
    bulk_add(sums, staged, Traits::kStagedBytes);
    tma_store_commit();
  }
}

// What this warp added to a slab of dQ, long before, is there: the next block of keys may add. What
// threads added themselves needs no fence here: end_turns releases it with the turn.
template <typename Traits>
__device__ __forceinline__ void BwdWideConsumer<Traits>::end_turn(int slab) const {
  if (!params.turns) return;
  if (threadIdx.x % 32 == 0) tma_store_wait();
  __syncwarp();
  release(barriers.turn_over[slab]);
}

template <typename Traits>
__device__ __forceinline__ void BwdWideConsumer<Traits>::differentiate(const BwdWork& work,
                                                                       float (&dk)[kSlabs][kD],
                                                                       float (&dv)[kSlabsV][kD]) {
  mbarrier_wait(smem_address(&barriers.k_full), tiles % 2);
  mbarrier_wait(smem_address(&barriers.v_full), tiles % 2);
  ++tiles;
  if (work.range.min >= work.range.max) return;
  for_each_q_block(
      params, work, [&](int m, int member) { step<true>(work, m, member, dk, dv); },
      [&](int m, int member) { step<false>(work, m, member, dk, dv); });
  float dq[32];
  if constexpr (kSlabs == 2) issue_rest(dq, dk);
  wgmma_wait<0>();
  own(dk);
  release(barriers.q_empty[q_stage() ^ 1]);
  if constexpr (kSlabs == 2) {
    wgmma_own(dq);
    end_turn(0);
    add_dq(work, work.range.min, params.heads_per_kv - 1, blocks - 1, 1, dq);
  }
  end_turn(kSlabs - 1);
}

// This warp group's columns of dK or dV, scaled, through the tile that K or V lay in.
template <typename Traits>
template <int kCount>
__device__ __forceinline__ void BwdWideConsumer<Traits>::write_gradient(
    const BwdWork& work, const TensorMap& map, uint32_t tile, const float (&c)[kCount][kD],
    float scale) const {
  const uint32_t mine = afresh(tile) + group * kCount * kSlabN;
#pragma unroll
  for (int slab = 0; slab < kCount; ++slab) {
    write_transposed(mine + slab * kSlabN, 0, c[slab], scale);
  }
  async_proxy_fence();
  sync_own();
  if (!is_leader()) return;
  const auto at = tma_at(map, work.keys.batch, work.keys.first_row, work.keys.rows,
                         work.keys.block * Traits::kBlockN, work.keys.head);
  for (int slab = 0; slab < kCount; ++slab) {
    tma_store(map, mine + slab * kSlabN, at, (group * kCount + slab) * kSlabColumns);
  }
  tma_store_commit();
}

template <typename Traits>
__device__ __forceinline__ void BwdWideConsumer<Traits>::run() {
  for (uint32_t tile = 0;; ++tile) {
    mbarrier_wait(smem_address(&barriers.tile_full[tile % 2]), tile / 2 % 2);
    const BwdWork& work = barriers.works[tile % 2];
    if (work.keys.head < 0) break;
    if (has_rows<Traits>(work)) {
      float dk[kSlabs][kD] = {}, dv[kSlabsV][kD] = {};
      differentiate(work, dk, dv);
      sync_all();  // nobody reads K and V any more
      if (join_parts<Traits>(params, work, dk, dv)) {
        if (group == Traits::owner_v(group))
          write_gradient(work, params.dv, smem.v, dv, kept_scale_of<Traits>(work));
        write_gradient(work, params.dk, smem.k, dk, params.softmax_scale);
      }
      if (is_leader()) {
        tma_store_wait_read();
        mbarrier_arrive(smem_address(&barriers.k_empty));
        mbarrier_arrive(smem_address(&barriers.v_empty));
      }
    }
    __syncwarp();
    release(barriers.tile_empty[tile % 2]);
  }
  if (threadIdx.x % 32 == 0) tma_store_wait();  // before shared memory goes
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_wide_kernel(const __grid_constant__ BwdParams params) {
  extern __shared__ __align__(1024) char dynamic[];
  auto& barriers = reinterpret_cast<BwdBarriers<Traits>&>(dynamic);
  const BwdWideSmem<Traits> smem(smem_address(dynamic) + kBwdBarrierBytes);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();

  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);  // 0: the producer
  if (role == 0) {
    give_registers<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) load_tiles<Traits>(params, smem, barriers);
    if (threadIdx.x == 32) end_turns<Traits>(params, barriers);
    if (threadIdx.x == 64) watch_turns<Traits>(params, barriers, 0);
    if (Traits::kSlabs == 2 && threadIdx.x == 96) watch_turns<Traits>(params, barriers, 1);
  } else {
    take_registers<Traits::kConsumerRegisters>();
    BwdWideConsumer<Traits> consumer{params, smem, barriers, role - 1};
    consumer.run();
  }
}

template <typename Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_bwd_wide(const BwdParams& params, int64_t grid, cudaStream_t stream) {
  using Traits = BwdWideTraits<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kModified>;
  return launch_backward<Traits>(&bwd_wide_kernel<Traits>, params, grid, stream);
}

}  // namespace flash_ext::fa3

#define INSTANCE(header, ...)                                                                 \
  namespace flash_ext::fa3 {                                                                  \
  template cudaError_t launch_##header<__VA_ARGS__>(const BwdParams&, int64_t, cudaStream_t); \
  }
