// The forward with the warps split along the keys (split-K), as FlashAttention-1 has them: each of
// the four warps takes a quarter of a block's keys, for all 128 queries, 32 after 32. Whether a
// score has passed a reference, the maxima then, and the four parts of O go through shared memory,
// for two barriers per 32 queries and block. A warp sums a quarter of the columns of O.
//
// Everything else is the shipped kernel's: loads, products, softmax, masks, output.
#pragma once

#include "fa2/fwd.cuh"

namespace flash_ext::fa2 {

// What all warps of the CTA agree on.
struct WholeBlock {
  uint32_t values;  // a float for each warp and row

  __device__ __forceinline__ void barrier() const { block_barrier(); }
  __device__ __forceinline__ bool any(bool vote) const { return __syncthreads_or(vote); }
  template <typename Combine>
  __device__ __forceinline__ void combine(int m, float (&mine)[2], Combine combine) const {
    constexpr int kWarpBytes = 32 * 4;
    const uint32_t thread = fresh_thread_index(), at = values + (16 * m + thread % 32 / 4) * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      st_shared(at + thread / 32 * kWarpBytes + 32 * half, __float_as_uint(mine[half]));
    barrier();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mine[half] = ld_shared_float(at + 32 * half);
#pragma unroll
      for (int warp = 1; warp < 4; ++warp)
        mine[half] = combine(mine[half], ld_shared_float(at + warp * kWarpBytes + 32 * half));
    }
  }
};

// Of 32 queries, which all four warps share.
template <typename Shipped_>
struct SplitKeys {
  using Shipped = Shipped_;
  using Element = typename Shipped::Element;
  using Lanes = typename Shipped::Lanes;
  using Sharers = WholeBlock;
  using Loads = RingLoads<SplitKeys>;
  static constexpr int kHeadDim = Shipped::kHeadDim, kBlockN = Shipped::kBlockN,
                       kStages = Shipped::kStages;
  static constexpr int kGroups = Shipped::kBlockM / 32;
  static constexpr int kSharers = 4, kThreads = 32 * kSharers;
  static constexpr int kBlockM = 32, kWarpRows = 32, kMTiles = 2;
  static constexpr int kStepN = kBlockN, kWarpN = kStepN / kSharers, kNTiles = kWarpN / 8;
  static constexpr int kDTiles = kHeadDim / 8 / kSharers;
  static constexpr bool kModified = false;
  static constexpr int kRowBytes = Shipped::kRowBytes, kChunks = kRowBytes / 16;
  static constexpr int kKVBytes = Shipped::kKVBytes, kKV = Shipped::kKV;
  // The parts of O: for each quarter of the columns one from each warp, as they lie in registers.
  static constexpr int kPartBytes = kMTiles * kDTiles * 512;
  static constexpr int kParts = kKV + kStages * 2 * kKVBytes;
  static constexpr int kValues = kParts + kSharers * kSharers * kPartBytes;
  static constexpr int kSmemBytes = kValues + kSharers * kWarpRows * 4;
  static_assert(kWarpN == 16, "P of a warp is one A fragment for 16 rows");
};

// P V of the warp's keys, to shared memory, a quarter of the columns after the other. v: this
// lane's ldmatrix address of the warp's first key.
template <typename Traits>
__device__ __forceinline__ void give_parts(const uint32_t (&p)[Traits::kMTiles][4], uint32_t v,
                                           uint32_t parts) {
  const uint32_t thread = fresh_thread_index();
  parts += thread / 32 * Traits::kPartBytes + thread % 32 * 16;
#pragma unroll
  for (int quarter = 0; quarter < Traits::kSharers; ++quarter) {
    float o[Traits::kMTiles][4 * Traits::kDTiles] = {};
    multiply_pv<Traits>(o, p, Swizzle<Traits>::step(v, 2 * quarter));
#pragma unroll
    for (int i = 0; i < Traits::kMTiles * Traits::kDTiles; ++i) {
      const float* part = &o[i / Traits::kDTiles][i % Traits::kDTiles * 4];
      st_shared_floats(parts + quarter * Traits::kSharers * Traits::kPartBytes + i * 512, part[0],
                       part[1], part[2], part[3]);
    }
  }
}

// O += the four parts of this warp's columns.
template <typename Traits>
__device__ __forceinline__ void add_parts(WarpRows<Traits>& rows, uint32_t parts) {
  const uint32_t thread = fresh_thread_index();
  parts += thread / 32 * Traits::kSharers * Traits::kPartBytes + thread % 32 * 16;
#pragma unroll
  for (int warp = 0; warp < Traits::kSharers; ++warp) {
#pragma unroll
    for (int i = 0; i < Traits::kMTiles * Traits::kDTiles; ++i) {
      uint32_t part[4];
      ld_shared_16(part, parts + warp * Traits::kPartBytes + i * 512);
      float* o = &rows.o[i / Traits::kDTiles][i % Traits::kDTiles * 4];
#pragma unroll
      for (int j = 0; j < 4; ++j) o[j] += __uint_as_float(part[j]);
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    split_keys_kernel(const __grid_constant__ FwdParams params) {
  constexpr int kGroupBytes = 32 * Traits::kRowBytes;
  extern __shared__ __align__(128) char smem_bytes[];
  const uint32_t smem = smem_address(smem_bytes), parts = smem + Traits::kParts;
  __shared__ Tile tile;
  __shared__ Work groups[Traits::kGroups];  // of 32 queries
  const BlockRange& range = tile.work.range;
  const WholeBlock warps{smem + Traits::kValues};

  for (uint32_t i = blockIdx.x; i < params.scheduler.num_tiles; i += gridDim.x) {
    block_barrier();
    if (threadIdx.x == 0) {
      find_tile<typename Traits::Shipped>(params, i, tile);
      for (int g = 0; g < Traits::kGroups; ++g) {
        groups[g] = tile.work;
        groups[g].m_block = tile.work.m_block * Traits::kGroups + g;
      }
    }
    block_barrier();
    const int first_row = tile.work.m_block * Traits::Shipped::kBlockM;
    if (first_row >= tile.work.rows) continue;
    if (range.min < range.max) load_rows<Traits, Traits::Shipped::kBlockM>(smem, tile.q, first_row);
    typename Traits::Loads loads{{range, tile.k, tile.v, smem + Traits::kKV}};
    loads.start();

    WarpRows<Traits> rows[Traits::kGroups] = {};
    const Place<Traits> place;
    const int lane = place.lane, first_key = place.sharer * Traits::kWarpN;
    const uint32_t q_lane = smem + Swizzle<Traits>::offset(lane % 16, lane / 16);
    const uint32_t k_lane =
        Swizzle<Traits>::offset(first_key + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t v_lane =
        Traits::kKVBytes + Swizzle<Traits>::offset(first_key + lane % 16, lane / 16);
    for (int n = range.max - 1; n >= range.min; --n) {
      const uint32_t keys = loads.keys(n);
      const int n_begin = n * Traits::kBlockN;
#pragma unroll
      for (int g = 0; g < Traits::kGroups; ++g) {
        View seen = View::kWhole;
        if (n < range.full_min || n >= range.full_max) seen = view<Traits>(groups[g], n_begin);
        if (seen == View::kNone) continue;
        Scores<Traits> s;
        multiply_qk<Traits>(s, rows[g], q_lane + g * kGroupBytes, keys + k_lane);
        if (seen == View::kPart) mask<Traits>(s, groups[g], n_begin + first_key);
        // Behind the barrier of this vote, all have added the parts of the 32 queries before.
        keep_below_reference<Traits>(s, rows[g], params.score_scale_log2, params.score_slack,
                                     warps);
        uint32_t p[Traits::kMTiles][4];
        exponentiate<Traits>(s, rows[g], groups[g], tile.modifier, n_begin, 0,
                             params.score_scale_log2, p);
        give_parts<Traits>(p, keys + v_lane, parts);
        block_barrier();  // all parts are there
        add_parts<Traits>(rows[g], parts);
      }
      loads.next(n);
    }
#pragma unroll
    for (int g = 0; g < Traits::kGroups; ++g)
      write_tile<Traits>(params, groups[g], rows[g], warps, 1.f, smem + g * kGroupBytes);
  }
}

}  // namespace flash_ext::fa2
