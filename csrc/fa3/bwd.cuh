// FlashAttention-3 backward: TMA and WGMMA, warp-specialised. See README.md for the schedule,
// drawn.
//
// A CTA owns a block of keys of one head of k and walks over the queries that see them, or a part
// of these (bwd_parts.cuh), of every head of its group. Two consumer warp groups own 64 keys each
// and hold dK and dV in registers. They compute S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T
// come out as A operands: dV += P^T dO and dK += dS^T Q read them from registers. dS^T also goes to
// shared memory, where dQ = dS K takes it from. With blocks of 128 queries that happens a block
// later: so the warp groups need not meet, and one computes P and dS while the products of the
// other run. Threads of the producer's group add dQ to its float32 sums by bulk copies.
#pragma once

#include <cuda_runtime.h>

#include "device/bwd_modify.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"
#include "fa3/bwd_producer.cuh"
#include "fa3/launch.h"

namespace flash_ext::fa3 {

// ---- consumers: a warp group each -------------------------------------------------------------

template <typename Traits>
struct BwdConsumer {
  using Element = typename Traits::Element;
  static constexpr int kS = Traits::kBlockM / 2;  // accumulator registers of S^T and dP^T
  static constexpr int kDk = Traits::kHeadDim / 2, kDv = Traits::kHeadDimV / 2;
  static constexpr int kDq = Traits::kDqColumns / 2;
  static constexpr int kSlabM = Traits::kBlockM * kSlabRowBytes,
                       kSlabN = Traits::kBlockN * kSlabRowBytes;
  static constexpr int kTurnBarrier = 1;  // named; kTurnBarrier + group

  const BwdParams& params;
  const BwdSmem<Traits>& smem;
  BwdBarriers<Traits>& barriers;
  const int group;                 // 0, 1
  uint32_t blocks = 0, tiles = 0;  // of queries, of keys: where the rings stand

  static __device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) {
    mbarrier_wait<Traits::kSleep>(smem_address(&barrier), parity);
  }
  __device__ __forceinline__ uint32_t stage() const { return blocks % Traits::kStages; }
  __device__ __forceinline__ uint32_t phase() const { return blocks / Traits::kStages % 2; }
  // Where dQ is late, S^T and dP^T are computed in turns, so that one warp group's softmax hides
  // behind the products of the other.
  __device__ __forceinline__ void wait_turn() const {
    if constexpr (Traits::kDqLate) named_barrier_sync(kTurnBarrier + group, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Traits::kDqLate) named_barrier_arrive(kTurnBarrier + 1 - group, 256);
  }

  // c = A B^T of this warp group's 64 rows of a (K, V) and the kBlockM rows of b (Q, dO).
  template <int kColumns>
  __device__ __forceinline__ void issue_scores(float (&c)[kS], uint32_t a, uint32_t b) const {
    const uint64_t a_first = descriptor_k_major(afresh(a + group * 64 * kSlabRowBytes)),
                   b_first = descriptor_k_major(afresh(b));
    wgmma_own(c);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kColumns / 16; ++d) {
      const int slab = d / 4, inside = d % 4 * 32;
      wgmma_shared<Element>(c, advance(a_first, slab * kSlabN + inside),
                            advance(b_first, slab * kSlabM + inside), d > 0);
    }
    wgmma_commit();
  }

  // c += A B: A (64 keys, kBlockM queries) in registers, the rows of b (Q, dO) are queries.
  template <int kCount>
  __device__ __forceinline__ void issue_gradient(float (&c)[kCount], const uint32_t (&a)[kS / 8][4],
                                                 uint32_t b) const {
    const uint64_t first = descriptor_mn_major(afresh(b), kSlabM);
    wgmma_own(c);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < Traits::kBlockM / 16; ++m) {
      wgmma_registers<Element>(c, a[m], advance(first, m * 16 * kSlabRowBytes), true);
    }
    wgmma_commit();
  }

  // This warp group's half of the dQ = dS K of block `of`, over the keys of both.
  __device__ __forceinline__ void issue_dq(float (&c)[kDq], uint32_t of) const {
    const uint32_t ds = smem.ds + of % Traits::kStages * Traits::kDsBytes +
                        (Traits::kSplitRows ? group * kSlabN : 0);
    const uint32_t k = smem.k + (Traits::kSplitRows ? 0 : group * (kDq / 32) * kSlabN);
    const uint64_t a_first = descriptor_mn_major(afresh(ds), kSlabN),
                   b_first = descriptor_mn_major(afresh(k), kSlabN);
    // Both halves of dS are written.
    wait(barriers.ds_full[of % Traits::kStages], of / Traits::kStages % 2);
    wgmma_own(c);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < Traits::kBlockN / 16; ++n) {
      const int keys = n * 16 * kSlabRowBytes;
      wgmma_shared_mn<Element>(c, advance(a_first, keys), advance(b_first, keys), n > 0);
    }
    wgmma_commit();
  }

  static __device__ __forceinline__ void round(uint32_t (&to)[kS / 8][4], const float (&from)[kS]) {
#pragma unroll
    for (int m = 0; m < kS / 8; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[m][i] = pack<Element>(from[8 * m + 2 * i], from[8 * m + 2 * i + 1]);
      }
    }
  }

  // A 64-row tile of this warp group, rounded, to its rows of a tile of kSlabN-byte slabs.
  template <int kCount>
  __device__ __forceinline__ void write_tile(uint32_t tile, const uint32_t (&r)[kCount][4]) const {
    const uint32_t thread = afresh(threadIdx.x), lane = thread % 32, warp = thread / 32 % 4;
    const uint32_t mine = tile + (group * 64 + warp * 16 + lane % 16) * kSlabRowBytes;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const int chunk = c % 4 * 2 + lane / 16;
      stmatrix_x4(mine + c / 4 * kSlabN + ((chunk ^ (lane % 8)) << 4), r[c]);
    }
  }

  __device__ __forceinline__ void run();
  __device__ __forceinline__ void differentiate(const BwdWork& work, float (&dk)[kDk],
                                                float (&dv)[kDv]);
  template <bool kHasDq>
  __device__ __forceinline__ void step(const BwdWork& work, int m, int member, float (&dk)[kDk],
                                       float (&dv)[kDv]);
  __device__ __forceinline__ void write_dq(const float (&dq)[kDq], uint32_t of) const;
  template <int kCount>
  __device__ __forceinline__ void write_gradient(const BwdWork& work, void* out,
                                                 const Strides& stride, int columns,
                                                 const float (&c)[kCount], float scale) const;
};

// One block of queries. Its dQ, or where dQ is late that of the block before, if kHasDq.
template <typename Traits>
template <bool kHasDq>
__device__ __forceinline__ void BwdConsumer<Traits>::step(const BwdWork& work, int m, int member,
                                                          float (&dk)[kDk], float (&dv)[kDv]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t my_columns = stage() * Traits::kRowBytes + lane % 4 * 8;
  const uint32_t q = smem.q + stage() * Traits::kQBytes,
                 dout = smem.dout + stage() * Traits::kDoBytes;
  float s[kS], dp[kS];
  uint32_t p_rounded[kS / 8][4], ds_rounded[kS / 8][4];
  const float slope = Traits::kModified ? slope_of(params, work, member) : 0.f;

  // Loads from shared memory queue behind products, so this one comes before them; where the warp
  // groups walk side by side, it is better late.
  auto is_masked = [&] { return m < work.range.full_min || m >= work.range.full_max; };
  const bool known_masked = Traits::kDqLate && is_masked();

  wait(barriers.q_full[stage()], phase());   // Q and lse are there
  wait(barriers.do_full[stage()], phase());  // dO and delta too
  wait_turn();
  issue_scores<Traits::kHeadDim>(s, smem.k, q);
  issue_scores<Traits::kHeadDimV>(dp, smem.v, dout);
  wgmma_wait<1>();  // S^T
  wgmma_own(s);
  auto wait_dp = [&] {
    wgmma_wait<0>();
    wgmma_own(dp);
    pass_turn();
  };
  const int key = work.keys.block * Traits::kBlockN + group * 64 + warp * 16;
  uint64_t kept = 0;
  if constexpr (Traits::kModified) {
    wait_dp();
    const TilePlace at{m * Traits::kBlockM, key, work.seen_by.visible().offset};
    kept = modify_gradients<true>(s, dp, modifier_of(work, member, slope), at, [&](int j) {
      const float2 delta = ld_shared_floats(smem.delta + my_columns + j * 32);
      return make_float4(delta.x, delta.y, delta.x, delta.y);
    });
  }
  if (Traits::kDqLate ? known_masked : is_masked())
    apply_mask(s, work.seen_by, key + lane / 4, m * Traits::kBlockM);
  const float scale_log2 = Traits::kModified ? kLog2e : params.softmax_scale_log2;
#pragma unroll
  for (int j = 0; j < kS / 4; ++j) {
    const float2 lse = ld_shared_floats(smem.lse + my_columns + j * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[4 * j + i] = exp2_approx(s[4 * j + i] * scale_log2 - (i % 2 ? lse.y : lse.x));
    }
  }
  if constexpr (!Traits::kModified) wait_dp();
#pragma unroll
  for (int j = 0; j < kS / 4; ++j) {
    const float2 delta =
        Traits::kModified ? float2{} : ld_shared_floats(smem.delta + my_columns + j * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      dp[4 * j + i] = s[4 * j + i] * (dp[4 * j + i] - (i % 2 ? delta.y : delta.x));
    }
  }
  if constexpr (Traits::kModified) drop(s, kept);
  round(p_rounded, s);
  round(ds_rounded, dp);

  // dQ of two blocks before has read what was there.
  wait(barriers.ds_empty[stage()], phase() ^ 1);
  write_tile(smem.ds + stage() * Traits::kDsBytes, ds_rounded);
  // A fence waits for the products before it too. Where the other warp group waits for dS it comes
  // first.
  if constexpr (Traits::kDqLate) issue_gradient(dv, p_rounded, dout);
  async_proxy_fence();
  __syncwarp();
  release(barriers.ds_full[stage()]);
  if constexpr (!Traits::kDqLate) issue_gradient(dv, p_rounded, dout);

  const uint32_t dq_block = blocks - (Traits::kDqLate ? 1 : 0);
  float dq[kDq];
  if constexpr (kHasDq) issue_dq(dq, dq_block);
  issue_gradient(dk, ds_rounded, q);
  wgmma_wait<1>();  // dV and dQ
  wgmma_own(dv);
  release(barriers.do_empty[stage()]);
  if constexpr (kHasDq) {
    wgmma_own(dq);
    release(barriers.ds_empty[dq_block % Traits::kStages]);
    write_dq(dq, dq_block);
  }
  wgmma_wait<0>();  // dK
  wgmma_own(dk);
  release(barriers.q_empty[stage()]);
  ++blocks;
}

// Hands this warp group's half of the dQ of block `of` to the thread that adds it.
template <typename Traits>
__device__ __forceinline__ void BwdConsumer<Traits>::write_dq(const float (&dq)[kDq],
                                                              uint32_t of) const {
  const uint32_t thread = afresh(threadIdx.x), lane = thread % 32, warp = thread / 32 % 4;
  const uint32_t dq_stage = of % Traits::kDqStages;
  // What was there has been added.
  wait(barriers.dq_empty[dq_stage], of / Traits::kDqStages % 2 ^ 1);
  const uint32_t tile = smem.dq + dq_stage * Traits::kDqBytes;
#pragma unroll
  for (int j = 0; j < kDq / 4; ++j) {
    const int slab = j / 8 + (Traits::kSplitRows ? 0 : group * (kDq / 32));
    const int row_block = warp + (Traits::kSplitRows ? 4 * group : 0);
    const int at = dq_index<Traits::kBlockM, true>(slab, row_block, j % 8, lane, 0);
    st_shared_floats(tile + at * 4, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  }
  __syncwarp();
  release(barriers.dq_full[dq_stage]);
}

template <typename Traits>
__device__ __forceinline__ void BwdConsumer<Traits>::differentiate(const BwdWork& work,
                                                                   float (&dk)[kDk],
                                                                   float (&dv)[kDv]) {
  wait(barriers.k_full, tiles % 2);
  wait(barriers.v_full, tiles % 2);
  ++tiles;
  if (work.range.min >= work.range.max) return;
  auto step_with_dq = [&](int m, int member) { step<true>(work, m, member, dk, dv); };
  if constexpr (!Traits::kDqLate) {
    for_each_q_block(params, work, step_with_dq);
  } else {
    for_each_q_block(
        params, work, [&](int m, int member) { step<false>(work, m, member, dk, dv); },
        step_with_dq);
    float dq[kDq];
    issue_dq(dq, blocks - 1);
    wgmma_wait<0>();
    wgmma_own(dq);
    release(barriers.ds_empty[stage() ^ 1]);
    write_dq(dq, blocks - 1);
  }
}

// dK or dV, scaled, from registers to global memory: shared memory belongs to the next tile
// already.
template <typename Traits>
template <int kCount>
__device__ __forceinline__ void BwdConsumer<Traits>::write_gradient(const BwdWork& work, void* out,
                                                                    const Strides& stride,
                                                                    int columns,
                                                                    const float (&c)[kCount],
                                                                    float scale) const {
  const int quad_lane = threadIdx.x % 4;
  const int row = work.keys.block * Traits::kBlockN + group * 64 + threadIdx.x / 32 % 4 * 16 +
                  threadIdx.x % 32 / 4;
  Element* to = static_cast<Element*>(out) + row_offset(stride, work.keys, row) + 8 * quad_lane;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // A lane holds two columns of each group of eight; four groups later it holds one group whole.
#pragma unroll
    for (int j = 0; j < kCount / 16; ++j) {
      uint32_t r[4];
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const float* pair = &c[4 * (4 * j + g) + 2 * half];
        r[g] = pack<Element>(pair[0] * scale, pair[1] * scale);
      }
      transpose_quad(r);
      if (row + 8 * half < work.keys.rows && 32 * j + 8 * quad_lane < columns)
        st_global_16(to + 8 * half * stride.row + 32 * j, r);
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void BwdConsumer<Traits>::run() {
  if (group == 1) pass_turn();  // the first turn is group 0's
  for (uint32_t tile = 0;; ++tile) {
    wait(barriers.tile_full[tile % 2], tile / 2 % 2);
    const BwdWork& work = barriers.works[tile % 2];
    if (work.keys.head < 0) break;
    if (has_rows<Traits>(work)) {
      float dk[kDk] = {}, dv[kDv] = {};
      differentiate(work, dk, dv);
      release(barriers.v_empty);
      release(barriers.k_empty);
      if (join_parts<Traits>(params, work, dk, dv)) {
        write_gradient(work, params.dv_rows, params.dv_stride, params.rows.head_dim_v, dv,
                       kept_scale_of<Traits>(work));
        write_gradient(work, params.dk_rows, params.dk_stride, params.rows.head_dim, dk,
                       params.softmax_scale);
      }
    }
    __syncwarp();
    release(barriers.tile_empty[tile % 2]);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdParams params) {
  extern __shared__ __align__(1024) char dynamic[];
  auto& barriers = reinterpret_cast<BwdBarriers<Traits>&>(dynamic);
  const BwdSmem<Traits> smem(smem_address(dynamic) + kBwdBarrierBytes);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();

  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);  // 0: the producer's group
  if (role == 0) {
    give_registers<Traits::kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) load_tiles<Traits>(params, smem, barriers);
    if (threadIdx.x % 32 == 0 && warp >= 1 && warp <= Traits::kDqStages) {
      add_dq<Traits>(params, smem, barriers, warp - 1);
    }
  } else {
    take_registers<Traits::kConsumerRegisters>();
    BwdConsumer<Traits> consumer{params, smem, barriers, role - 1};
    consumer.run();
  }
}

template <typename Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_bwd(const BwdParams& params, int64_t grid, cudaStream_t stream) {
  using Traits = BwdTraits<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kModified>;
  return launch_backward<Traits>(&bwd_kernel<Traits>, params, grid, stream);
}

}  // namespace flash_ext::fa3

#define INSTANCE(header, ...)                                                                 \
  namespace flash_ext::fa3 {                                                                  \
  template cudaError_t launch_##header<__VA_ARGS__>(const BwdParams&, int64_t, cudaStream_t); \
  }
