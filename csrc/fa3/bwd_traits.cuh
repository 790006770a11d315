// What one instance of the backward is: its tile, its shared memory and its barriers.
#pragma once

#include <cstdint>

#include "device/mask.cuh"
#include "device/mbarrier.cuh"
#include "device/row_tile.cuh"
#include "device/wgmma.cuh"
#include "fa3/bwd_params.h"

namespace flash_ext::fa3 {

using namespace device;

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_>
struct BwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;  // buckets
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr bool kDqVector = true;
  static constexpr int kStages = 2, kDoStages = 2;  // of Q and dS, of dO
  static constexpr int kDqStages = 2;               // the consumers run ahead of its addition
  static constexpr int kConsumers = 2;              // warp groups of 64 keys each
  static constexpr int kDqThreads = kDqStages;      // who add dQ
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kKBytes = kBlockN * kHeadDim * 2, kVBytes = kBlockN * kHeadDimV * 2;
  static constexpr int kQBytes = kBlockM * kHeadDim * 2, kDoBytes = kBlockM * kHeadDimV * 2;
  static constexpr int kDsBytes = kBlockM * kBlockN * 2, kDqBytes = kBlockM * kHeadDim * 4;
  static constexpr int kRowBytes = kBlockM * 4;  // of lse, of delta
  static constexpr int kSmemBytes = bwd_smem_bytes(kHeadDim, kHeadDimV, kBlockM, kBlockN);
  // dQ is 64 x kDqColumns a warp group: half of the rows, or half of the columns.
  static constexpr bool kSplitRows = kBlockM == 128;
  static constexpr int kDqColumns = kSplitRows ? kHeadDim : kHeadDim / 2;
  // They add up to what the launch gives the block: 168 x 384.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kBlockN == 64 * kConsumers, "a warp group owns 64 keys");
  static_assert(kBlockM == 64 || kBlockM == 128, "dQ is halved by rows or by columns");
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0, "tiles are slabs of 64 columns");
  static_assert(kSplitRows || kHeadDim % 128 == 0, "half of dQ is a number of slabs");
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
  BlockRange range;  // blocks of queries
};

template <typename Traits>
struct BwdBarriers {
  static constexpr int kStages = Traits::kStages, kDoStages = Traits::kDoStages;
  static constexpr int kDqStages = Traits::kDqStages;
  uint64_t k_full, v_full, kv_empty;
  uint64_t q_full[kStages], q_empty[kStages];
  uint64_t do_full[kDoStages], do_empty[kDoStages];
  uint64_t dq_full[kDqStages], dq_empty[kDqStages];
  uint64_t turn_come, turn_over;  // bwd_wide.cuh: when the consumers may add dQ, and have
  uint64_t tile_full[2], tile_empty[2];
  BwdWork works[2];

  __device__ __forceinline__ void init() {
    static_assert(sizeof(BwdBarriers) <= kBwdBarrierBytes, "shared memory starts with them");
    constexpr int kWarps = 4 * Traits::kConsumers;
    auto init = [](uint64_t& barrier, int arrivals) {
      mbarrier_init(smem_address(&barrier), arrivals);
    };
    init(k_full, 1), init(v_full, 1), init(kv_empty, Traits::kConsumers);
    for (int i = 0; i < kStages; ++i) init(q_full[i], 1), init(q_empty[i], kWarps);
    for (int i = 0; i < kDoStages; ++i) init(do_full[i], 1), init(do_empty[i], kWarps);
    init(turn_come, 1), init(turn_over, kWarps);
    for (int i = 0; i < kDqStages; ++i) init(dq_full[i], kWarps), init(dq_empty[i], 1);
    for (int i = 0; i < 2; ++i) {
      init(tile_full[i], 1), init(tile_empty[i], kWarps + Traits::kDqThreads);
    }
    mbarrier_init_fence();
  }
};

}  // namespace flash_ext::fa3
