// What one instance of the forward is: its tile, its shared memory and its barriers.
#pragma once

#include <cstdint>

#include "device/mask.cuh"
#include "device/mbarrier.cuh"
#include "device/modify.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"

namespace flash_ext::fa3 {

using namespace device;

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_,
          int kStages_, int kQStages_, bool kModified_>
struct FwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;  // buckets
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kStages = kStages_, kQStages = kQStages_;  // buffers of K and V, and of Q
  static constexpr bool kModified = kModified_;                   // softcap, ALiBi, dropout
  // A first block of which a warp group sees so few keys takes no more work than they need. Other
  // loops than its neighbour's run then: at smaller head dims that loses more than it saves (the
  // instruction cache, it seems).
  static constexpr int kFewKeys = kHeadDimV == 256 && !kModified ? 32 : kBlockN;
  // Whether maxima are computed only when a score has outgrown one. At 256, and beside what
  // modified scores need, the registers do not suffice for that branch; at 192 it gains nothing.
  static constexpr bool kLooksFirst = kHeadDimV < 192 && !kModified;
  // Of a lane's scores of a block, those that become probabilities before the last O += P V is
  // waited for: all, or at 128 the first part, for the compiler moves the wait up to the branch
  // between the two.
  static constexpr bool kInParts = kHeadDim == 128 && !kModified;
  static constexpr int kEarlyScores = !kInParts ? kBlockN / 2 : kBlockN > 128 ? 40 : 32;
  static constexpr int kConsumers = kBlockM / 64;  // warp groups
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kSlabs = (kHeadDim + 63) / 64, kSlabsV = (kHeadDimV + 63) / 64;
  static constexpr int kQBytes = kBlockM * kSlabs * kSlabRowBytes;
  static constexpr int kKBytes = kBlockN * kSlabs * kSlabRowBytes,
                       kVBytes = kBlockN * kSlabsV * kSlabRowBytes;  // of a stage
  static constexpr int kSmemBytes = 1024 + kQStages * kQBytes + kStages * (kKBytes + kVBytes);
  // They must add up to what the launch gives the block: 168 x 384 or 128 x 512.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static_assert(kBlockM % 64 == 0 && kConsumers >= 2 && kConsumers <= 3,
                "a warp group owns 64 queries");
  static_assert(kEarlyScores == kBlockN / 2 || !kModified, "dropout follows all exponentials");
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0, "O is written 32 columns at a time");
  static_assert(kSmemBytes <= 232448, "a block has 227 KB");
};

// ---- shared memory ----------------------------------------------------------------------------

template <typename Traits>
struct Smem {
  uint32_t q, k, v;

  __device__ __forceinline__ explicit Smem(uint32_t base) {
    q = base;
    k = q + Traits::kQStages * Traits::kQBytes;
    v = k + Traits::kStages * Traits::kKBytes;
  }
};

// A tile, and the blocks that each warp group's 64 rows see of it: those of no other group are
// passed over.
struct TileWork : Work {
  TmaCoordinates q_at, k_at, v_at;  // of its first query, and of the sequence's first key
  int64_t out_offset;               // of the sequence's first row, in elements
  float sink;                       // of its head, as a raw score; -infinity: none
  BlockRange groups[3];
  int first_keys[3];  // how far into its first block a group's rows see
  Modifier modifier;  // modified scores only
};

// The producer hands tiles to the consumers through a ring; head = -1: no more.
struct TileSlot {
  uint64_t full, empty;
  TileWork work;
};
constexpr int kTilesAhead = 4;

template <typename Traits>
struct Barriers {
  uint64_t q_full[Traits::kQStages], q_empty[Traits::kQStages];
  uint64_t k_full[Traits::kStages], k_empty[Traits::kStages];
  uint64_t v_full[Traits::kStages], v_empty[Traits::kStages];
  uint64_t almost_loaded;  // the loads of a tile near their end: the next one is to be found
  TileSlot tiles[kTilesAhead];

  __device__ __forceinline__ void init() {
    constexpr int kWarps = 4 * Traits::kConsumers;
    auto init = [](uint64_t& barrier, int arrivals) {
      mbarrier_init(smem_address(&barrier), arrivals);
    };
    for (int i = 0; i < Traits::kQStages; ++i) init(q_full[i], 1), init(q_empty[i], kWarps);
    for (int i = 0; i < Traits::kStages; ++i) init(k_full[i], 1), init(k_empty[i], kWarps);
    for (int i = 0; i < Traits::kStages; ++i) init(v_full[i], 1), init(v_empty[i], kWarps);
    for (TileSlot& slot : tiles) init(slot.full, 1), init(slot.empty, kWarps + 1);
    init(almost_loaded, 1);
    mbarrier_init_fence();
  }
};

}  // namespace flash_ext::fa3
