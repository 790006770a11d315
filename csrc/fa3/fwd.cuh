// FlashAttention-3 forward: TMA and WGMMA, warp-specialised. See README.md for the schedule, drawn.
//
// One producer warp loads Q, K and V by TMA through rings of mbarriers; two or three consumer warp
// groups own 64 queries each. Within a warp group S = Q K^T of one block runs on the tensor cores
// while the block before is finished with (O += P V) and its softmax is computed; between warp
// groups named barriers pass the tensor cores on (ping-pong), so that the softmax of one hides
// behind the MMAs of another. The grid is persistent: the producer is already loading the next tile
// while the consumers write this one.
#pragma once

#include <cuda_runtime.h>

#include "device/mbarrier.cuh"
#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "fa3/fwd_traits.cuh"
#include "fa3/launch.h"

namespace flash_ext::fa3 {

// ---- producer: one thread ---------------------------------------------------------------------

template <typename Traits>
__device__ __forceinline__ void load_tiles(const FwdParams& params, const Smem<Traits>& smem,
                                           Barriers<Traits::kStages>& barriers) {
  constexpr int kSlabQ = Traits::kBlockM * kSlabRowBytes, kSlabKV = Traits::kBlockN * kSlabRowBytes;
  RingPosition<Traits::kStages> ring;
  RingPosition<1> q_ring;
  RingPosition<2> tile_ring;
  const uint32_t num_tiles = params.scheduler.num_tiles;
  uint32_t tile = blockIdx.x, next = 0;
  for (;; tile = next) {
    // The next number is asked for early: its way to memory and back hides behind this tile.
    next = params.next_tile ? gridDim.x + atomicAdd(params.next_tile, 1u) : tile + gridDim.x;
    mbarrier_wait(smem_address(&barriers.tile_empty[tile_ring.stage]), tile_ring.phase ^ 1);
    Work& work = barriers.works[tile_ring.stage];
    work.head = -1;
    if (tile < num_tiles) find_work<Traits::kBlockM, Traits::kBlockN>(params, tile, work);
    mbarrier_arrive(smem_address(&barriers.tile_full[tile_ring.stage]));
    tile_ring.next();
    if (work.head < 0) return;
    const BlockRange& range = work.range;
    if (work.m_block * Traits::kBlockM >= work.rows)
      continue;  // a slot without rows, for the consumers too

    const int kv_head = work.head / params.heads_per_kv,
              batch_k = params.cu_seqlens_k ? 0 : work.sequence;
    const int length_k = work.visible.seqlen_k;
    auto load_k = [&](int n) {
      mbarrier_wait(smem_address(&barriers.k_empty[ring.stage]),
                    ring.phase ^ 1);  // consumers are done with what was there
      const uint32_t full = smem_address(&barriers.k_full[ring.stage]);
      mbarrier_arrive_expect(full, Traits::kKBytes);
      const auto at = tma_at(params.k, batch_k, work.k_row, length_k, n * Traits::kBlockN, kv_head);
      for (int slab = 0; slab < Traits::kHeadDim / kSlabColumns; ++slab) {
        tma_load(smem.k + ring.stage * Traits::kKBytes + slab * kSlabKV, params.k, full, at,
                 slab * kSlabColumns, kEvictLast);
      }
    };
    auto load_v = [&](int n) {
      mbarrier_wait(smem_address(&barriers.v_empty[ring.stage]), ring.phase ^ 1);
      const uint32_t full = smem_address(&barriers.v_full[ring.stage]);
      mbarrier_arrive_expect(full, Traits::kVBytes);
      const auto at = tma_at(params.v, batch_k, work.k_row, length_k, n * Traits::kBlockN, kv_head);
      for (int slab = 0; slab < Traits::kHeadDimV / kSlabColumns; ++slab) {
        tma_load(smem.v + ring.stage * Traits::kVBytes + slab * kSlabKV, params.v, full, at,
                 slab * kSlabColumns, kEvictLast);
      }
    };

    mbarrier_wait(smem_address(&barriers.q_empty), q_ring.phase ^ 1);  // every consumer has left Q
    const uint32_t q_full = smem_address(&barriers.q_full);
    mbarrier_arrive_expect(q_full, Traits::kQBytes);
    const auto at = tma_at(params.q, work.batch_q, work.q_row, work.used_rows,
                           work.m_block * Traits::kBlockM, work.head);
    for (int slab = 0; slab < Traits::kHeadDim / kSlabColumns; ++slab) {
      tma_load(smem.q + slab * kSlabQ, params.q, q_full, at, slab * kSlabColumns, kEvictFirst);
    }
    q_ring.next();
    for (int n = range.max - 1; n >= range.min; --n) {
      load_k(n);
      load_v(n);
      ring.next();
    }
  }
}

// ---- consumers: a warp group each -------------------------------------------------------------

template <typename Traits>
struct Consumer {
  using Element = typename Traits::Element;
  static constexpr int kS = Traits::kBlockN / 2,
                       kO = Traits::kHeadDimV / 2;  // accumulator registers

  const FwdParams& params;
  const Smem<Traits>& smem;
  Barriers<Traits::kStages>& barriers;
  const int group;  // 0, 1(, 2)
  RingPosition<Traits::kStages> k_ring, v_ring;
  RingPosition<1> q_ring;

  // Ping-pong: a warp group issues MMAs when it has the turn, and passes it on once they are
  // issued.
  static constexpr int kTurnBarrier = 1, kStoreBarrier = 1 + Traits::kConsumers;
  __device__ __forceinline__ void wait_turn() const {
    named_barrier_sync(kTurnBarrier + group, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    named_barrier_arrive(kTurnBarrier + (group + 1 == Traits::kConsumers ? 0 : group + 1), 256);
  }

  // One arrival a warp: the MMAs of a warp group complete warp by warp.
  static __device__ __forceinline__ void release(uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&barrier));
  }

  // The query of this lane's first row. From shared memory each time: only masks and the end need
  // it.
  __device__ __forceinline__ int first_row(const Work& work) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    return work.m_block * Traits::kBlockM + group * 64 + warp * 16 + lane / 4;
  }

  // Issues S = Q K^T; complete after a wgmma_wait.
  __device__ __forceinline__ void issue_qk(float (&s)[kS]) const {
    const uint32_t q = smem.q + group * 64 * kSlabRowBytes,
                   k = smem.k + k_ring.stage * Traits::kKBytes;
    wgmma_own(s);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < Traits::kHeadDim / 16; ++d) {
      const int slab = d / 4, inside = d % 4 * 32;
      wgmma_shared<Element>(
          s, descriptor_k_major(q + slab * Traits::kBlockM * kSlabRowBytes + inside),
          descriptor_k_major(k + slab * Traits::kBlockN * kSlabRowBytes + inside), d > 0);
    }
    wgmma_commit();
  }

  // Issues O += P V.
  __device__ __forceinline__ void issue_pv(float (&o)[kO], const uint32_t (&p)[kS / 8][4]) const {
    const uint32_t v = smem.v + v_ring.stage * Traits::kVBytes;
    wgmma_own(o);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < Traits::kBlockN / 16; ++n) {
      wgmma_registers<Element>(
          o, p[n],
          descriptor_mn_major(v + n * 16 * kSlabRowBytes, Traits::kBlockN * kSlabRowBytes));
    }
    wgmma_commit();
  }

  static __device__ __forceinline__ void round_p(uint32_t (&p)[kS / 8][4], const float (&s)[kS]) {
#pragma unroll
    for (int n = 0; n < kS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] = pack<Element>(s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
    }
  }

  __device__ __forceinline__ void run();
  __device__ __forceinline__ void run_tile(const Work& work);
  __device__ __forceinline__ void attend(const Work& work, Softmax& softmax, float (&o)[kO]);
  __device__ __forceinline__ void write(const Work& work, Softmax& softmax, float (&o)[kO]);
};

// O and the softmax state of this warp group's rows over all visible blocks, last block first.
template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::attend(const Work& work, Softmax& softmax,
                                                         float (&o)[kO]) {
  const BlockRange range = work.range;
  float s[kS];
  uint32_t p[kS / 8][4];
  float rescale[2];

  mbarrier_wait(smem_address(&barriers.k_full[k_ring.stage]), k_ring.phase);
  wait_turn();
  issue_qk(s);
  pass_turn();
  wgmma_wait<0>();
  wgmma_own(s);
  release(barriers.k_empty[k_ring.stage]);
  k_ring.next();
  apply_mask(s, work.visible, first_row(work), (range.max - 1) * Traits::kBlockN);
  softmax.step(s, params.softmax_scale_log2, rescale);
  round_p(p, s);

  // Block n's scores and block n + 1's values, side by side.
  auto step = [&](int n, auto masked) {
    mbarrier_wait(smem_address(&barriers.k_full[k_ring.stage]), k_ring.phase);
    wait_turn();
    issue_qk(s);
    mbarrier_wait(smem_address(&barriers.v_full[v_ring.stage]), v_ring.phase);
    issue_pv(o, p);
    pass_turn();
    wgmma_wait<1>();  // S is there, O += P V still runs
    wgmma_own(s);
    release(barriers.k_empty[k_ring.stage]);
    k_ring.next();
    if constexpr (decltype(masked)::value)
      apply_mask(s, work.visible, first_row(work), n * Traits::kBlockN);
    softmax.step(s, params.softmax_scale_log2, rescale);
    wgmma_wait<0>();
    wgmma_own(o);
    wgmma_own(s);  // P is rounded into the registers that the MMA has read
    release(barriers.v_empty[v_ring.stage]);
    v_ring.next();
    round_p(p, s);
    rescale_rows(o, rescale);
  };
  int n = range.max - 2;
  for (; n >= range.min && n >= range.full_max; --n) step(n, std::true_type{});
  for (; n >= range.min && n >= range.full_min; --n) step(n, std::false_type{});
  for (; n >= range.min; --n) step(n, std::true_type{});

  if constexpr (Traits::kOwnO) release(barriers.q_empty);  // the last scores are computed
  mbarrier_wait(smem_address(&barriers.v_full[v_ring.stage]), v_ring.phase);
  issue_pv(o, p);
  wgmma_wait<0>();
  wgmma_own(o);
  release(barriers.v_empty[v_ring.stage]);
  v_ring.next();
}

// O / sum through shared memory and TMA; lse from registers.
template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::write(const Work& work, Softmax& softmax,
                                                        float (&o)[kO]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  softmax.reduce();
  float inverse[2];
  float* lse = params.lse + work.lse_offset;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = first_row(work) + 8 * half;
    const bool seen = i < work.used_rows && softmax.sum[half] > 0.f;
    inverse[half] = seen ? 1.f / softmax.sum[half] : 0.f;
    if (lane % 4 == 0 && i < work.rows) {
      lse[i] = seen ? softmax.lse(half, params.softmax_scale) : -INFINITY;
    }
  }
  const bool leader = threadIdx.x % 128 == 0;
  if (leader) tma_store_wait_read();  // the tile before has left the buffer
  named_barrier_sync(kStoreBarrier + group, 128);
  const uint32_t slab_bytes = Traits::kBlockM * kSlabRowBytes;
  const uint32_t mine = smem.o + (group * 64 + warp * 16 + lane % 16) * kSlabRowBytes;
#pragma unroll
  for (int d = 0; d < Traits::kHeadDimV / 16; ++d) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // i: row + 8 * (i % 2), columns + 8 * (i / 2)
      const float scale = inverse[i % 2];
      const float low = o[8 * d + 4 * (i / 2) + 2 * (i % 2)],
                  high = o[8 * d + 4 * (i / 2) + 2 * (i % 2) + 1];
      r[i] = pack<Element>(scale == 0.f ? 0.f : low * scale, scale == 0.f ? 0.f : high * scale);
    }
    const int chunk = d % 4 * 2 + lane / 16;
    stmatrix_x4(mine + d / 4 * slab_bytes + ((chunk ^ (lane % 8)) << 4), r);
  }
  async_proxy_fence();
  named_barrier_sync(kStoreBarrier + group, 128);
  if (leader && work.m_block * Traits::kBlockM + group * 64 < work.rows) {
    const auto at = tma_at(params.out, work.batch_q, work.q_row, work.rows,
                           work.m_block * Traits::kBlockM + group * 64, work.head);
    for (int slab = 0; slab < Traits::kHeadDimV / kSlabColumns; ++slab) {
      tma_store(params.out, smem.o + group * 64 * kSlabRowBytes + slab * slab_bytes, at,
                slab * kSlabColumns);
    }
    tma_store_commit();
  }
}

template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::run() {
  if (group == Traits::kConsumers - 1) pass_turn();  // the first turn is group 0's
  RingPosition<2> tile_ring;
  for (;; tile_ring.next()) {
    mbarrier_wait(smem_address(&barriers.tile_full[tile_ring.stage]), tile_ring.phase);
    const Work& work = barriers.works[tile_ring.stage];
    if (work.head < 0) break;
    if (work.m_block * Traits::kBlockM < work.rows) run_tile(work);
    __syncwarp();
    release(barriers.tile_empty[tile_ring.stage]);
  }
  if (threadIdx.x % 128 == 0) tma_store_wait_read();  // shared memory must outlive the last store
}

template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::run_tile(const Work& work) {
  float o[kO] = {};
  Softmax softmax;
  softmax.start(params.sinks != nullptr,
                params.sinks ? params.sinks[work.head] / params.softmax_scale : 0.f);
  mbarrier_wait(smem_address(&barriers.q_full), q_ring.phase);  // Q has arrived
  q_ring.next();
  const bool visible = work.range.min < work.range.max;
  if (visible) attend(work, softmax, o);
  write(work, softmax, o);
  if (!visible || !Traits::kOwnO) {
    if (threadIdx.x % 128 == 0) tma_store_wait_read();
    __syncwarp();
    release(barriers.q_empty);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdParams params) {
  extern __shared__ char dynamic[];
  __shared__ Barriers<Traits::kStages> barriers;
  const Smem<Traits> smem((smem_address(dynamic) + 1023) & ~1023u);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Traits::kConsumers;
    mbarrier_init(smem_address(&barriers.q_full), 1);
    mbarrier_init(smem_address(&barriers.q_empty), kWarps);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      mbarrier_init(smem_address(&barriers.k_full[stage]), 1);
      mbarrier_init(smem_address(&barriers.k_empty[stage]), kWarps);
      mbarrier_init(smem_address(&barriers.v_full[stage]), 1);
      mbarrier_init(smem_address(&barriers.v_empty[stage]), kWarps);
    }
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(smem_address(&barriers.tile_full[stage]), 1);
      mbarrier_init(smem_address(&barriers.tile_empty[stage]), kWarps);
    }
    mbarrier_init_fence();
    tma_prefetch_map(params.q);
    tma_prefetch_map(params.k);
    tma_prefetch_map(params.v);
    tma_prefetch_map(params.out);
  }
  __syncthreads();

  const int role = threadIdx.x / 128;  // 0: the producer
  if (role == 0) {
    give_registers<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) load_tiles<Traits>(params, smem, barriers);
  } else {
    take_registers<Traits::kConsumerRegisters>();
    Consumer<Traits> consumer{params, smem, barriers, role - 1};
    consumer.run();
  }
}

// ---- launch -----------------------------------------------------------------------------------

template <typename Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kStages,
          int kOwnO>
cudaError_t launch_fwd(const FwdParams& params, int64_t grid, cudaStream_t stream) {
  using Traits = FwdTraits<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kStages, kOwnO != 0>;
  auto* kernel = &fwd_kernel<Traits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(grid), Traits::kThreads, Traits::kSmemBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_ext::fa3

#define INSTANCE(header, element, head_dim, head_dim_v, block_m, block_n, stages, own_o)       \
  template cudaError_t flash_ext::fa3::launch_##header<element, head_dim, head_dim_v, block_m, \
                                                       block_n, stages, own_o>(                \
      const FwdParams&, int64_t, cudaStream_t);
