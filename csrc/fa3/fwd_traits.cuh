// What one instance of the forward is: its tile, its shared memory and its barriers.
#pragma once

#include <cstdint>

#include "device/mask.cuh"
#include "device/wgmma.cuh"

namespace flash_ext::fa3 {

using namespace device;

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_,
          int kStages_, bool kOwnO_>
struct FwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;  // buckets
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kStages = kStages_;
  static constexpr bool kOwnO = kOwnO_;  // O has a buffer of its own, or leaves through Q's
  static constexpr int kConsumers = kBlockM / 64;  // warp groups
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kQBytes = kBlockM * kHeadDim * 2;
  static constexpr int kOBytes = kBlockM * kHeadDimV * 2;
  static constexpr int kKBytes = kBlockN * kHeadDim * 2,
                       kVBytes = kBlockN * kHeadDimV * 2;  // of a stage
  static constexpr int kSmemBytes =
      1024 + kQBytes + (kOwnO ? kOBytes : 0) + kStages * (kKBytes + kVBytes);
  // They must add up to what the launch gives the block: 168 x 384 or 128 x 512.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static_assert(kBlockM % 64 == 0 && kConsumers >= 2 && kConsumers <= 3,
                "a warp group owns 64 queries");
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0, "tiles are slabs of 64 columns");
  static_assert(kOwnO || kOBytes <= kQBytes, "O leaves through Q's buffer");
  static_assert(kSmemBytes <= 232448, "a block has 227 KB");
};

// ---- shared memory ----------------------------------------------------------------------------

template <typename Traits>
struct Smem {
  uint32_t q, o, k, v;

  __device__ __forceinline__ explicit Smem(uint32_t base) {
    q = base;
    o = Traits::kOwnO ? q + Traits::kQBytes : q;
    k = q + Traits::kQBytes + (Traits::kOwnO ? Traits::kOBytes : 0);
    v = k + Traits::kStages * Traits::kKBytes;
  }
};

template <int kStages>
struct Barriers {
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  uint64_t tile_full[2], tile_empty[2];
  Work works[2];  // the tiles that the producer hands to the consumers; head = -1: no more
};

}  // namespace flash_ext::fa3
