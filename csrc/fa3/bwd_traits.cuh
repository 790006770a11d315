// What one instance of the backward is: its tile, its shared memory and its barriers.
#pragma once

#include <cstdint>

#include "device/mask.cuh"
#include "device/mbarrier.cuh"
#include "device/modify.cuh"
#include "device/row_tile.cuh"
#include "device/wgmma.cuh"
#include "fa3/bwd_params.h"

namespace flash_ext::fa3 {

using namespace device;

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_,
          bool kModified_>
struct BwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;  // buckets
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr bool kModified = kModified_;     // softcap, ALiBi, dropout
  static constexpr int kStages = 2, kDoStages = 2;  // of Q and dS, of dO
  static constexpr int kDqStages = 2;               // the consumers run ahead of its addition
  static constexpr int kConsumers = 2;              // warp groups of 64 keys each
  static constexpr int kDqThreads = kDqStages;      // who add dQ
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kKvReaders = 4 * kConsumers;  // arrivals when K and V may go: a warp each
  static constexpr int kSlabs = slab_columns(kHeadDim) / 64, kSlabsV = slab_columns(kHeadDimV) / 64;
  static constexpr int kKBytes = kBlockN * kSlabs * 128, kVBytes = kBlockN * kSlabsV * 128;
  static constexpr int kQBytes = kBlockM * kSlabs * 128, kDoBytes = kBlockM * kSlabsV * 128;
  static constexpr int kDsBytes = kBlockM * kBlockN * 2, kDqBytes = kBlockM * kSlabs * 64 * 4;
  static constexpr int kRowBytes = kBlockM * 4;  // of lse, of delta
  static constexpr int kSmemBytes = bwd_smem_bytes(kHeadDim, kHeadDimV, kBlockM, kBlockN);
  static constexpr int kPartVectors = bwd_part_vectors(kHeadDim, kHeadDimV, kBlockM, kBlockN);
  // dQ is 64 x kDqColumns a warp group: half of the rows, or half of the columns.
  static constexpr bool kSplitRows = kBlockM == 128;
  static constexpr int kDqColumns = kSplitRows ? 64 * kSlabs : 32 * kSlabs;
  // Blocks of 128 queries: dQ is computed a block late, so that the warp groups need not meet, and
  // S and dP in turns. With 64, whose steps are half as long, that gains nothing.
  static constexpr bool kDqLate = kBlockM == 128;
  // Nanoseconds after which a waiting consumer looks again; 0: when the hardware wakes it.
  static constexpr int kSleep = kDqLate ? 0 : 32;
  // They add up to what the launch gives the block: 168 x 384.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kBlockN == 64 * kConsumers, "a warp group owns 64 keys");
  static_assert(kBlockM == 64 || kBlockM == 128, "dQ is halved by rows or by columns");
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0, "gradients leave 16 columns at a time");
  static_assert(kSplitRows || kSlabs % 2 == 0, "half of dQ is a number of slabs");
  static_assert(kSmemBytes <= 232448, "a block has 227 KB");
};

// ---- shared memory ----------------------------------------------------------------------------

template <typename Traits>
struct BwdSmem {
  uint32_t k, v, q, dout, ds, dq, lse, delta;

  __device__ __forceinline__ explicit BwdSmem(uint32_t base) {
    k = base;
    v = k + Traits::kKBytes;
    q = v + Traits::kVBytes;
    dout = q + Traits::kStages * Traits::kQBytes;
    ds = dout + Traits::kDoStages * Traits::kDoBytes;
    dq = ds + Traits::kStages * Traits::kDsBytes;
    lse = dq + Traits::kDqStages * Traits::kDqBytes;
    delta = lse + Traits::kStages * Traits::kRowBytes;
  }
};

// Which queries see key j, where keys past the end see nothing: their scores are not 0 by
// themselves.
struct SeenBy {
  Visible queries;  // of a key, in the words of Visible: seqlen_k counts queries
  int keys;

  FLASH_EXT_HOST_DEVICE Visible visible() const {  // the keys of a query
    return {keys, -queries.offset, queries.window_right, queries.window_left};
  }
  FLASH_EXT_HOST_DEVICE int begin(int j) const { return queries.begin(j); }
  FLASH_EXT_HOST_DEVICE int end(int j) const { return j < keys ? queries.end(j) : 0; }
};

// Which keys of which sequence and head a tile is, and which queries see them.
struct BwdWork {
  RowTile keys;  // head: of k; -1: no more tiles
  int64_t q_row;
  int batch_q, used_q;
  SeenBy seen_by;
  BlockRange range;   // blocks of queries: of this part
  int part;           // of a tile that is cut, else -1
  uint32_t slot;      // of the tile's first part in SplitTiles
  bool leaves;        // dK and dV are for a later part
  Modifier modifier;  // modified scores only: of the group's first head
};

// What a step of the group's head `member` is modified by: only its slope and number are its own.
__device__ __forceinline__ float slope_of(const BwdParams& params, const BwdWork& work,
                                          int member) {
  const ScoreOptions& options = params.score_options;
  if (!options.alibi_slopes) return 0.f;
  const int head = work.keys.head * params.heads_per_kv + member;
  return options.alibi_slopes[int64_t{work.keys.sequence} * options.alibi_batch_stride + head];
}
__device__ __forceinline__ Modifier modifier_of(const BwdWork& work, int member, float slope) {
  Modifier modifier = work.modifier;
  modifier.head += member;
  modifier.slope = slope;
  return modifier;
}
// What dropout left of dV's sums.
template <typename Traits>
__device__ __forceinline__ float kept_scale_of(const BwdWork& work) {
  const bool modified = Traits::kModified && work.range.min < work.range.max;
  return modified ? work.modifier.kept_scale : 1.f;
}

template <typename Traits>
struct BwdBarriers {
  static constexpr int kStages = Traits::kStages, kDoStages = Traits::kDoStages;
  static constexpr int kDqStages = Traits::kDqStages;
  uint64_t k_full, v_full, k_empty, v_empty;
  uint64_t q_full[kStages], q_empty[kStages];
  uint64_t do_full[kDoStages], do_empty[kDoStages];
  uint64_t ds_full[kStages], ds_empty[kStages];
  uint64_t dq_full[kDqStages], dq_empty[kDqStages];
  uint64_t turn_come[2], turn_over[2];  // bwd_wide.cuh: when the consumers may add dQ, and have
  uint64_t tile_full[2], tile_empty[2];
  BwdWork works[2];

  __device__ __forceinline__ void init() {
    static_assert(sizeof(BwdBarriers) <= kBwdBarrierBytes, "shared memory starts with them");
    constexpr int kWarps = 4 * Traits::kConsumers;
    auto init = [](uint64_t& barrier, int arrivals) {
      mbarrier_init(smem_address(&barrier), arrivals);
    };
    init(k_full, 1), init(v_full, 1);
    init(k_empty, Traits::kKvReaders), init(v_empty, Traits::kKvReaders);
    for (int i = 0; i < kStages; ++i) init(q_full[i], 1), init(q_empty[i], kWarps);
    for (int i = 0; i < kDoStages; ++i) init(do_full[i], 1), init(do_empty[i], kWarps);
    for (int i = 0; i < kStages; ++i) init(ds_full[i], kWarps), init(ds_empty[i], kWarps);
    for (int i = 0; i < 2; ++i) init(turn_come[i], 2), init(turn_over[i], kWarps);
    for (int i = 0; i < kDqStages; ++i) init(dq_full[i], kWarps), init(dq_empty[i], 1);
    for (int i = 0; i < 2; ++i) {
      init(tile_full[i], 1), init(tile_empty[i], kWarps + Traits::kDqThreads);
    }
    mbarrier_init_fence();
  }
};

}  // namespace flash_ext::fa3
