// FlashAttention-3 forward: TMA and WGMMA, warp-specialised. See README.md for the schedule, drawn.
//
// Two threads find tiles and load Q, K and V by TMA (fwd_load.cuh); two or three consumer warp
// groups own 64 queries each. Within a warp group S = Q K^T of one block runs on the tensor cores
// while the block before is finished with (O += P V) and its softmax is computed; between warp
// groups named barriers pass the tensor cores on (ping-pong), so that the softmax of one hides
// behind the MMAs of another. The grid is persistent: the next tile is loaded while the consumers
// write this one.
#pragma once

#include <cuda_runtime.h>

#include "device/early_launch.cuh"
#include "device/mbarrier.cuh"
#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "fa3/fwd_load.cuh"
#include "fa3/launch.h"

namespace flash_ext::fa3 {

// ---- consumers: a warp group each -------------------------------------------------------------

template <typename Traits>
struct Consumer {
  using Element = typename Traits::Element;
  static constexpr int kS = Traits::kBlockN / 2,
                       kO = Traits::kHeadDimV / 2;  // accumulator registers
  static constexpr int kEarly = Traits::kEarlyScores;

  const FwdParams& params;
  const Smem<Traits>& smem;
  Barriers<Traits>& barriers;
  const int group;     // 0, 1(, 2)
  uint32_t tile = 0;   // tiles begun; its Q is the tile-th
  uint32_t block = 0;  // blocks of keys begun: K of this one, V of the one before
  using Ring = RingPosition<Traits::kStages>;

  // Ping-pong: a warp group issues MMAs when it has the turn, and passes it on once they are
  // issued.
  static constexpr int kTurnBarrier = 1;
  __device__ __forceinline__ void wait_turn() const {
    named_barrier_sync(kTurnBarrier + group, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    named_barrier_arrive(kTurnBarrier + (group + 1 == Traits::kConsumers ? 0 : group + 1), 256);
  }

  using QRing = RingPosition<Traits::kQStages>;
  __device__ __forceinline__ void wait_q() const {
    const QRing ring(tile);
    mbarrier_wait(smem_address(&barriers.q_full[ring.stage]), ring.phase);
  }
  __device__ __forceinline__ void wait_k() const {
    const Ring ring(block);
    mbarrier_wait(smem_address(&barriers.k_full[ring.stage]), ring.phase);
  }
  __device__ __forceinline__ void wait_v(uint32_t block) const {
    const Ring ring(block);
    mbarrier_wait(smem_address(&barriers.v_full[ring.stage]), ring.phase);
  }

  // The query of this lane's first row. What a tile is stays in shared memory and is read where it
  // is needed (volatile), for the loops have no register to spare.
  __device__ __forceinline__ int first_row(const volatile Work& work) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    return work.m_block * Traits::kBlockM + group * 64 + warp * 16 + lane / 4;
  }

  // Issues S = Q K^T for a block's first 2 kCount keys; complete after a wgmma_wait.
  template <int kCount>
  __device__ __forceinline__ void issue_qk(float (&s)[kCount]) const {
    const uint64_t q = descriptor_k_major(smem.q + QRing(tile).stage * Traits::kQBytes +
                                          group * 64 * kSlabRowBytes),
                   k = descriptor_k_major(smem.k + Ring(block).stage * Traits::kKBytes);
    wgmma_own(s);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < Traits::kHeadDim / 16; ++d) {
      const int slab = d / 4, inside = d % 4 * 32;
      wgmma_shared<Element>(s, advance(q, slab * Traits::kBlockM * kSlabRowBytes + inside),
                            advance(k, slab * Traits::kBlockN * kSlabRowBytes + inside), d > 0);
    }
    wgmma_commit();
  }

  // Issues O += P V for a block's first kKeys keys, or O = P V of a tile's first block: zeroing O
  // is not allowed while MMAs run.
  template <int kKeys>
  __device__ __forceinline__ void issue_pv(float (&o)[kO], const uint32_t (&p)[kS / 8][4],
                                           bool accumulate) const {
    const uint64_t v = descriptor_mn_major(smem.v + Ring(block - 1).stage * Traits::kVBytes,
                                           Traits::kBlockN * kSlabRowBytes);
    wgmma_own(o);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      wgmma_registers<Element>(o, p[n], advance(v, n * 16 * kSlabRowBytes), accumulate || n > 0);
    }
    wgmma_commit();
  }

  // Rounds the probabilities of a block's first 2 kCount keys; those of the others are 0.
  template <int kCount>
  static __device__ __forceinline__ void round_p(uint32_t (&p)[kS / 8][4],
                                                 const float (&s)[kCount]) {
#pragma unroll
    for (int n = 0; n < kS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 8 * n + 2 * i;
        p[n][i] = at < kCount ? pack<Element>(s[at], s[at + 1]) : 0;
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void mask(float (&s)[kCount], const volatile Work& work, int n) const {
    const volatile Visible& v = work.visible;
    const Visible visible{v.seqlen_k, v.offset, v.window_left, v.window_right};
    apply_mask(s, visible, first_row(work), n * Traits::kBlockN);
  }

  // Q K^T of block n becomes modified scores.
  template <int kCount>
  __device__ __forceinline__ void modify(float (&s)[kCount], const volatile TileWork& work,
                                         int n) const {
    if constexpr (Traits::kModified) {
      const Visible visible{0, work.visible.offset, 0, 0};
      modify_scores(s, modifier(work), visible, first_row(work), n * Traits::kBlockN);
    }
  }
  // Some probabilities of block n are dropped.
  template <int kCount>
  __device__ __forceinline__ void drop_some(float (&s)[kCount], const volatile TileWork& work,
                                            int n) const {
    if constexpr (Traits::kModified) {
      if (modifier(work).drop_below == 0) return;
#pragma unroll
      for (int k = 0; k < kCount / 8; ++k)
        drop(s + 8 * k, modifier(work), first_row(work), n * Traits::kBlockN + 16 * k);
    }
  }
  static __device__ __forceinline__ const Modifier& modifier(const volatile TileWork& work) {
    return const_cast<const Modifier&>(work.modifier);
  }

  // Maxima follow scores [kFrom, kTo). One that grew is seldom: where kLooksFirst, whether one did
  // is asked first. True when O is to be multiplied by rescale; `raised`: it was so before. Warps
  // may differ here, so there must be no MMA and no wait for one.
  template <int kFrom, int kTo>
  __device__ __forceinline__ bool follow(float (&s)[kS], Softmax& softmax, float (&rescale)[2],
                                         bool raised) const {
    if (Traits::kLooksFirst) {
      const bool outgrown = softmax.outgrown<kFrom, kTo>(s, params.score_slack);
      if (__builtin_expect(!__any_sync(0xffffffffu, outgrown), 1)) return raised;
    }
    float more[2];
    softmax.raise<kFrom, kTo>(s, params.score_scale_log2, more);
#pragma unroll
    for (int i = 0; i < kFrom; ++i) s[i] *= more[i / 2 % 2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      rescale[half] = raised ? rescale[half] * more[half] : more[half];
    return true;
  }

  // A block that only other groups' rows see: the turn and the buffers go on.
  __device__ __forceinline__ void pass_over() {
    wait_turn();
    pass_turn();
    wait_k();
    release(barriers.k_empty[Ring(block).stage]);
    wait_v(block);
    release(barriers.v_empty[Ring(block).stage]);
    ++block;
  }

  __device__ __forceinline__ void run();
  template <int kFirstKeys>
  __device__ __forceinline__ void attend(const volatile TileWork& work, Softmax& softmax,
                                         float (&o)[kO]);
  __device__ __forceinline__ void write(const volatile TileWork& work, Softmax& softmax,
                                        const float (&o)[kO]);
};

// O and the softmax state of this warp group's rows over all its blocks, last block first. Of that
// one only the first kFirstKeys keys are looked at: no row sees the others.
template <typename Traits>
template <int kFirstKeys>
__device__ __forceinline__ void Consumer<Traits>::attend(const volatile TileWork& work,
                                                         Softmax& softmax, float (&o)[kO]) {
  const volatile BlockRange& range = work.groups[group];
  constexpr bool kFirstIsShort = kFirstKeys < Traits::kBlockN;
  float s[kS];
  auto& first = reinterpret_cast<float (&)[kFirstKeys / 2]>(s);
  uint32_t p[kS / 8][4];
  float rescale[2];

  wait_q();
  int n = work.range.max - 1;
  for (const int end = range.max; n >= end; --n) pass_over();
  if (n < range.min) {  // these rows see nothing
    release(barriers.q_empty[QRing(tile).stage]);
    wait_turn();
    pass_turn();
#pragma unroll
    for (int i = 0; i < kO; ++i) o[i] = 0.f;
    return;
  }

  wait_k();
  wait_turn();
  issue_qk(first);
  pass_turn();
  wgmma_wait<0>();
  wgmma_own(first);
  release(barriers.k_empty[Ring(block).stage]);
  ++block;
  modify(first, work, n);
  if (n >= range.full_max || n < range.full_min) mask(first, work, n);
  softmax.raise<0, kFirstKeys / 2>(first, params.score_scale_log2, rescale);
  softmax.exponentiate<0, kFirstKeys / 2>(first, params.score_scale_log2);
  drop_some(first, work, n);
  round_p(p, first);

  // Block n's scores and block n + 1's values, side by side.
  bool accumulate = false;
  auto step = [&](int n, auto masked) {
    wait_k();
    wait_turn();
    issue_qk(s);
    wait_v(block - 1);
    if (kFirstIsShort && decltype(masked)::value && !accumulate) {
      issue_pv<kFirstKeys>(o, p, false);
    } else {
      issue_pv<Traits::kBlockN>(o, p, accumulate);
    }
    accumulate = true;
    pass_turn();
    wgmma_wait<1>();  // S is there, O += P V still runs
    wgmma_own(s);
    release(barriers.k_empty[Ring(block).stage]);
    modify(s, work, n);
    if constexpr (decltype(masked)::value) mask(s, work, n);
    bool raised = follow<0, kEarly>(s, softmax, rescale, false);
    softmax.exponentiate<0, kEarly>(s, params.score_scale_log2);
    if constexpr (kEarly < kS) raised = follow<kEarly, kS>(s, softmax, rescale, raised);
    drop_some(s, work, n);
    wgmma_wait<0>();
    wgmma_own(o);
    wgmma_own(s);  // P is rounded into the registers that the MMA has read
    softmax.exponentiate<kEarly, kS>(s, params.score_scale_log2);
    release(barriers.v_empty[Ring(block - 1).stage]);
    ++block;
    round_p(p, s);
    if (raised && __any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f))
      rescale_rows(o, rescale);
  };
  --n;
  // The values of a short block are a masked step's: other steps have no branch between their MMAs.
  const int last_masked = kFirstIsShort ? min(n, range.full_max) : range.full_max;
  for (const int last = max(range.min, last_masked); n >= last; --n) step(n, std::true_type{});
  for (const int last = max(range.min, range.full_min); n >= last; --n) step(n, std::false_type{});
  for (const int last = range.min; n >= last; --n) step(n, std::true_type{});

  release(barriers.q_empty[QRing(tile).stage]);  // the last scores are computed
  wait_v(block - 1);
  wait_turn();
  issue_pv<Traits::kBlockN>(o, p, accumulate);
  pass_turn();
  wgmma_wait<0>();
  wgmma_own(o);
  release(barriers.v_empty[Ring(block - 1).stage]);
  for (const int last = work.range.min; n >= last; --n) pass_over();
}

// O / sum and lse, from registers to global memory: shared memory belongs to the next tile already.
template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::write(const volatile TileWork& work,
                                                        Softmax& softmax, const float (&o)[kO]) {
  const int quad_lane = threadIdx.x % 4, row = first_row(work), rows = work.rows,
            used_rows = work.used_rows;
  Element* out = static_cast<Element*>(params.out) + work.out_offset + row * params.out_stride.row +
                 8 * quad_lane;
  float* lse = params.lse + work.lse_offset + row;
  softmax.reduce();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + 8 * half;
    const bool seen = i < used_rows && softmax.sum[half] > 0.f;
    const float kept_scale = Traits::kModified ? modifier(work).kept_scale : 1.f;
    const float inverse = __fdividef(kept_scale, softmax.sum[half]);
    // By every lane and without a branch: the logarithm's latency passes beside the shuffles.
    const float row_lse = seen ? softmax.lse(half, params.score_scale) : -INFINITY;
    // A lane holds two columns of each group of eight; four groups later it holds one group whole.
    constexpr int kGroups = Traits::kHeadDimV / 32;
    uint32_t r[kGroups][4];
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const float* c = &o[4 * (4 * j + g) + 2 * half];
        r[j][g] = seen ? pack<Element>(c[0] * inverse, c[1] * inverse) : 0;
      }
      transpose_quad(r[j]);
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if (i < rows && 32 * j + 8 * quad_lane < params.head_dim_v) st_global_16(out + 32 * j, r[j]);
    }
    if (quad_lane == 0 && i < rows) lse[8 * half] = row_lse;
    out += 8 * params.out_stride.row;
  }
}

template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::run() {
  if (group == Traits::kConsumers - 1) pass_turn();  // the first turn is group 0's
  for (;; ++tile) {
    TileSlot& slot = barriers.tiles[tile % kTilesAhead];
    mbarrier_wait(smem_address(&slot.full), tile / kTilesAhead & 1);
    const volatile TileWork& work = slot.work;
    if (work.head < 0) return;
    float o[kO];
    Softmax softmax;
    softmax.start(work.sink);
    if (Traits::kFewKeys < Traits::kBlockN && work.first_keys[group] <= Traits::kFewKeys) {
      attend<Traits::kFewKeys>(work, softmax, o);
    } else {
      attend<Traits::kBlockN>(work, softmax, o);
    }
    write(work, softmax, o);
    __syncwarp();
    release(slot.empty);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdParams params) {
  extern __shared__ char dynamic[];
  __shared__ Barriers<Traits> barriers;
  const Smem<Traits> smem((smem_address(dynamic) + 1023) & ~1023u);
  if (threadIdx.x == 0) {
    barriers.init();
    tma_prefetch_map(params.q);
    tma_prefetch_map(params.k);
    tma_prefetch_map(params.v);
  }
  __syncthreads();
  let_next_kernel_start();
  wait_for_kernel_before();

  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // 0: the producer
  if (role == 0) {
    give_registers<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) Producer<Traits>{params, smem, barriers}.run();
    if (threadIdx.x == 32) schedule(params, barriers);
  } else {
    take_registers<Traits::kConsumerRegisters>();
    Consumer<Traits> consumer{params, smem, barriers, role - 1};
    consumer.run();
  }
}

// ---- launch -----------------------------------------------------------------------------------

template <typename Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kStages,
          int kQStages, bool kModified>
cudaError_t launch_fwd(const FwdParams& params, int64_t grid, cudaStream_t stream) {
  using Traits =
      FwdTraits<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kStages, kQStages, kModified>;
  auto* kernel = &fwd_kernel<Traits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) return error;
  if (params.next_tile) {
    const cudaError_t cleared = launch_early(&clear_kernel, 1, 1, 0, stream, params.next_tile);
    if (cleared != cudaSuccess) return cleared;
  }
  return launch_early(kernel, grid, Traits::kThreads, Traits::kSmemBytes, stream, params);
}

}  // namespace flash_ext::fa3

#define INSTANCE(header, element, head_dim, head_dim_v, block_m, block_n, stages, q_stages,        \
                 scores)                                                                           \
  namespace flash_ext::fa3 {                                                                       \
  template cudaError_t launch_##header<element, head_dim, head_dim_v, block_m, block_n, stages,    \
                                       q_stages, scores>(const FwdParams&, int64_t, cudaStream_t); \
  }
