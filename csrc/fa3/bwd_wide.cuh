// FlashAttention-3 backward for head dimensions above 128, where dK and dV of 64 keys would not fit
// a warp group's registers. See README.md for the schedule, drawn.
//
// A CTA owns a block of keys as in bwd.cuh, but here a warp group owns columns of dK, dV and dQ,
// 64 or 128 of them: it accumulates dV^T += dO^T P and dK^T += Q^T dS, for which P and dS of all
// keys of the block lie in shared memory. For S = Q K^T and dP = dO V^T the keys are dealt out
// among the warp groups. There is no room to stage dQ: each thread adds its own fragments.
#pragma once

#include <cuda_runtime.h>

#include "device/bwd_modify.cuh"
#include "device/bwd_rows.cuh"
#include "device/ptx.cuh"
#include "fa3/bwd_producer.cuh"
#include "fa3/launch.h"

namespace flash_ext::fa3 {

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_,
          bool kModified_>
struct BwdWideTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;  // buckets
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr bool kModified = kModified_;  // softcap, ALiBi, dropout
  static constexpr int kStages = 2, kDoStages = bwd_wide_do_stages(kHeadDim);
  static constexpr int kConsumers = kHeadDim == 256 ? 2 : 3;
  static constexpr int kDqStages = 1, kDqThreads = 1;  // who keeps turns: the consumers add dQ
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kKvReaders = kConsumers;  // arrivals when K and V may go
  static constexpr int kKBytes = kBlockN * kHeadDim * 2, kVBytes = kBlockN * kHeadDimV * 2;
  static constexpr int kQBytes = kBlockM * kHeadDim * 2, kDoBytes = kBlockM * kHeadDimV * 2;
  static constexpr int kPBytes = kBlockM * kBlockN * 2;      // of P, of dS
  static constexpr int kRowBytes = kBlockM * 4;              // of lse, of delta
  static constexpr int kKeys = kBlockN / kConsumers;         // whose scores a warp group computes
  static constexpr int kSlabs = kHeadDim / 64 / kConsumers;  // of 64 columns that it owns
  static constexpr int kSlabsV = kHeadDimV / 64 / kConsumers;
  static constexpr int kSmemBytes = bwd_wide_smem_bytes(kHeadDim, kHeadDimV, kBlockM, kBlockN);
  // They add up to what the launch gives the block: 168 x 384 or 128 x 512.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static_assert(kSlabs <= 2, "dQ is added slab by slab");
  static_assert(kBlockM == 64, "P and dS are one slab of 64 queries");
  static_assert(kBlockN % 16 == 0 && kKeys % 8 == 0, "keys are dealt out in eights");
  static_assert(!kModified || kKeys % 16 == 0, "dropout draws for 16 keys at a time");
  static_assert(kHeadDim == 64 * kSlabs * kConsumers && kHeadDimV == 64 * kSlabsV * kConsumers,
                "a warp group owns a number of slabs");
  static_assert(kSmemBytes <= 232448, "a block has 227 KB");
};

template <typename Traits>
struct BwdWideSmem {
  uint32_t k, v, q, dout, p, ds, lse, delta;

  __device__ __forceinline__ explicit BwdWideSmem(uint32_t base) {
    k = base;
    v = k + Traits::kKBytes;
    q = v + Traits::kVBytes;
    dout = q + Traits::kStages * Traits::kQBytes;
    p = dout + Traits::kDoStages * Traits::kDoBytes;
    ds = p + Traits::kStages * Traits::kPBytes;
    lse = ds + Traits::kStages * Traits::kPBytes;
    delta = lse + Traits::kStages * Traits::kRowBytes;
  }
};

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

  // c += A^T B: this warp group's slabs of a (dO, Q), and b (P, dS) as rows of keys.
  template <int kCount>
  __device__ __forceinline__ void issue_gradient(float (&c)[kCount][kD], uint32_t a,
                                                 uint32_t b) const {
    own(c);
    const uint64_t a_first = descriptor_mn_major(afresh(a + group * kCount * kSlabM), kSlabM);
    const uint64_t b_first = descriptor_k_major(afresh(b));
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < Traits::kBlockM / 16; ++m) {
#pragma unroll
      for (int slab = 0; slab < kCount; ++slab) {
        wgmma_shared_mn_k<Element>(c[slab],
                                   advance(a_first, slab * kSlabM + m * 16 * kSlabRowBytes),
                                   advance(b_first, m * 32));
      }
    }
    wgmma_commit();
  }

  // A slab of dQ = dS K.
  __device__ __forceinline__ void issue_dq(float (&c)[32], int slab) const {
    const uint32_t ds = smem.ds + q_stage() * Traits::kPBytes,
                   k = smem.k + (group * kSlabs + slab) * kSlabN;
    const uint64_t a_first = descriptor_mn_major(afresh(ds), kSlabN),
                   b_first = descriptor_mn_major(afresh(k), kSlabN);
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
  __device__ __forceinline__ void step(const BwdWork& work, int m, int member,
                                       float (&dk)[kSlabs][kD], float (&dv)[kSlabsV][kD]);
  __device__ __forceinline__ void write_scores(const BwdWork& work, int m, int member);
  __device__ __forceinline__ void add_dq(const BwdWork& work, int m, int member, int slab,
                                         const float (&dq)[32]) const;
  template <int kCount>
  __device__ __forceinline__ void write_gradient(const BwdWork& work, const TensorMap& map,
                                                 uint32_t tile, const float (&c)[kCount][kD],
                                                 float scale) const;
};

// P and dS of this warp group's keys and one block of queries, to shared memory.
template <typename Traits>
__device__ __forceinline__ void BwdWideConsumer<Traits>::write_scores(const BwdWork& work, int m,
                                                                      int member) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  float s[kS], dp[kS], lse[2], delta[2];
  const float slope = Traits::kModified ? slope_of(params, work, member) : 0.f;
  mbarrier_wait(smem_address(&barriers.q_full[q_stage()]), q_phase());  // Q, lse are there
  issue_scores<Traits::kHeadDim>(s, smem.q + q_stage() * Traits::kQBytes, smem.k);
  mbarrier_wait(smem_address(&barriers.do_full[do_stage()]), do_phase());  // dO, delta too
  issue_scores<Traits::kHeadDimV>(dp, smem.dout + do_stage() * Traits::kDoBytes, smem.v);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = (row + 8 * half) * 4;
    lse[half] = ld_shared_float(smem.lse + q_stage() * Traits::kRowBytes + at);
    delta[half] = ld_shared_float(smem.delta + do_stage() * Traits::kRowBytes + at);
  }

  wgmma_wait<0>();  // S and dP
  wgmma_own(s);
  wgmma_own(dp);
  const int key = work.keys.block * Traits::kBlockN + group * Traits::kKeys;
  uint64_t kept = 0;
  if constexpr (Traits::kModified) {
    const TilePlace at{m * Traits::kBlockM + row - lane / 4, key, work.seen_by.visible().offset};
    kept = modify_gradients<false>(s, dp, modifier_of(work, member, slope), at, [&](int) {
      return make_float4(delta[0], delta[0], delta[1], delta[1]);
    });
  }
  if (m < work.range.full_min || m >= work.range.full_max)
    apply_mask(s, work.seen_by.visible(), m * Traits::kBlockM + row, key);
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
  // The other stage of P and dS may still be read: by the products of the block before.
  const uint32_t stage = q_stage() * Traits::kPBytes;
  write_transposed(smem.p + stage, group * Traits::kKeys, s, 1.f);
#pragma unroll
  for (int i = 0; i < kS && !Traits::kModified; ++i) dp[i] = s[i] * (dp[i] - delta[i / 2 % 2]);
  write_transposed(smem.ds + stage, group * Traits::kKeys, dp, 1.f);
  async_proxy_fence();
}

// One block of queries of a head of the group.
template <typename Traits>
__device__ __forceinline__ void BwdWideConsumer<Traits>::step(const BwdWork& work, int m,
                                                              int member, float (&dk)[kSlabs][kD],
                                                              float (&dv)[kSlabsV][kD]) {
  write_scores(work, m, member);
  sync_all();  // P and dS of all keys are written
  float dq[32];
  issue_gradient(dv, smem.dout + do_stage() * Traits::kDoBytes,
                 smem.p + q_stage() * Traits::kPBytes);
  issue_dq(dq, 0);
  issue_gradient(dk, smem.q + q_stage() * Traits::kQBytes, smem.ds + q_stage() * Traits::kPBytes);
  wgmma_wait<1>();  // dV and the first slab of dQ
  wgmma_own(dq);
  own(dv);
  release(barriers.do_empty[do_stage()]);
  if (params.turns) mbarrier_wait(smem_address(&barriers.turn_come), blocks % 2);
  add_dq(work, m, member, 0, dq);
  if constexpr (kSlabs == 2) issue_dq(dq, 1);
  wgmma_wait<kSlabs - 1>();  // dK
  own(dk);
  release(barriers.q_empty[q_stage()]);
  if constexpr (kSlabs == 2) {
    wgmma_wait<0>();
    wgmma_own(dq);
    add_dq(work, m, member, 1, dq);
  }
  ++blocks;
  if (params.turns) {
    __threadfence();
    __syncwarp();
    release(barriers.turn_over);
  }
}

template <typename Traits>
__device__ __forceinline__ void BwdWideConsumer<Traits>::add_dq(const BwdWork& work, int m,
                                                                int member, int slab,
                                                                const float (&dq)[32]) const {
  const uint32_t thread = afresh(threadIdx.x), lane = thread % 32, warp = thread / 32 % 4;
  const int64_t slot = q_slot<Traits>(params, work, m, member);
  float* sums = params.rows.dq_sum + slot * (Traits::kBlockM * Traits::kHeadDim) +
                dq_index<Traits::kBlockM, true>(group * kSlabs + slab, warp, 0, lane, 0);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    red_add_floats(sums + dq_index<Traits::kBlockM, true>(0, 0, j, 0, 0), dq[4 * j], dq[4 * j + 1],
                   dq[4 * j + 2], dq[4 * j + 3]);
  }
}

template <typename Traits>
__device__ __forceinline__ void BwdWideConsumer<Traits>::differentiate(const BwdWork& work,
                                                                       float (&dk)[kSlabs][kD],
                                                                       float (&dv)[kSlabsV][kD]) {
  mbarrier_wait(smem_address(&barriers.k_full), tiles % 2);
  mbarrier_wait(smem_address(&barriers.v_full), tiles % 2);
  ++tiles;
  if (work.range.min >= work.range.max) return;
  for (int m = work.range.max - 1; m >= work.range.min; --m) {
    for (int member = 0; member < params.heads_per_kv; ++member) step(work, m, member, dk, dv);
  }
}

// This warp group's columns of dK or dV, scaled, through the tile that K or V lay in.
template <typename Traits>
template <int kCount>
__device__ __forceinline__ void BwdWideConsumer<Traits>::write_gradient(
    const BwdWork& work, const TensorMap& map, uint32_t tile, const float (&c)[kCount][kD],
    float scale) const {
  const uint32_t mine = tile + group * kCount * kSlabN;
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
      write_gradient(work, params.dv, smem.v, dv, kept_scale_of<Traits>(work));
      write_gradient(work, params.dk, smem.k, dk, params.softmax_scale);
      if (is_leader()) {
        tma_store_wait_read();
        mbarrier_arrive(smem_address(&barriers.k_empty));
        mbarrier_arrive(smem_address(&barriers.v_empty));
      }
    }
    __syncwarp();
    release(barriers.tile_empty[tile % 2]);
  }
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
    if (threadIdx.x == 32) keep_turns<Traits>(params, barriers);
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
