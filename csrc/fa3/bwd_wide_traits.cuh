// What one instance of the backward above 128 columns is: its tile and its shared memory. Its
// barriers are those of bwd_traits.cuh.
#pragma once

#include "fa3/bwd_traits.cuh"

namespace flash_ext::fa3 {

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_,
          bool kModified_>
struct BwdWideTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;  // buckets
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr bool kModified = kModified_;  // softcap, ALiBi, dropout
  static constexpr int kStages = 2, kDoStages = bwd_wide_do_stages(kHeadDim);
  static constexpr int kConsumers = bwd_wide_consumers(kHeadDim);
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kKvReaders = kConsumers;  // arrivals when K and V may go
  static constexpr int kKBytes = kBlockN * kHeadDim * 2, kVBytes = kBlockN * kHeadDimV * 2;
  static constexpr int kQBytes = kBlockM * kHeadDim * 2, kDoBytes = kBlockM * kHeadDimV * 2;
  static constexpr int kPBytes = kBlockM * kBlockN * 2;      // of P, of dS
  static constexpr int kRowBytes = kBlockM * 4;              // of lse, of delta
  static constexpr int kKeys = kBlockN / kConsumers;         // whose scores a warp group computes
  static constexpr int kSlabs = kHeadDim / 64 / kConsumers;  // of 64 columns that it owns
  static constexpr int kOwnersV = kHeadDimV == 128 ? 2 : kConsumers;  // of columns of dV
  static constexpr int kSlabsV = kHeadDimV / 64 / kOwnersV;
  static constexpr int kPartVectors = bwd_wide_part_vectors(kHeadDim, kHeadDimV, kBlockM, kBlockN);
  static constexpr int kDqStages = 1, kDqThreads = 1 + kSlabs;  // they keep turns: consumers add
  static constexpr int kStaged =
      bwd_wide_staged(kHeadDim, kHeadDimV);           // eights of columns of a slab of dQ
  static constexpr int kStagedBytes = kStaged * 512;  // of a warp
  static constexpr int kSmemBytes = bwd_wide_smem_bytes(kHeadDim, kHeadDimV, kBlockM, kBlockN);
  // They add up to what the launch gives the block: 168 x 384 or 128 x 512.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kModified ? 40 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kModified ? 232 : 240;
  // Whose columns of dV a warp group computes. One without any computes another's and does not
  // write them: in a branch around products ptxas would serialise.
  static __device__ __forceinline__ int owner_v(int group) {
    if constexpr (kOwnersV == kConsumers) {
      return group;
    } else {
      return min(group, kOwnersV - 1);
    }
  }
  static_assert(kSlabs <= 2, "dQ is added slab by slab");
  static_assert(kBlockM == 64, "P and dS are one slab of 64 queries");
  static_assert(kBlockN % 16 == 0 && kKeys % 8 == 0, "keys are dealt out in eights");
  static_assert(!kModified || kKeys % 16 == 0, "dropout draws for 16 keys at a time");
  static_assert(kHeadDim == 64 * kSlabs * kConsumers && kHeadDimV == 64 * kSlabsV * kOwnersV,
                "a warp group owns a number of slabs");
  static_assert(kSmemBytes <= 232448, "a block has 227 KB");
};

template <typename Traits>
struct BwdWideSmem {
  uint32_t k, v, q, dout, p, ds, dq, lse, delta;

  __device__ __forceinline__ explicit BwdWideSmem(uint32_t base) {
    k = base;
    v = k + Traits::kKBytes;
    q = v + Traits::kVBytes;
    dout = q + Traits::kStages * Traits::kQBytes;
    p = dout + Traits::kDoStages * Traits::kDoBytes;
    ds = p + Traits::kPBytes;
    dq = ds + Traits::kPBytes;
    lse = dq + 4 * Traits::kConsumers * Traits::kStagedBytes;
    delta = lse + Traits::kStages * Traits::kRowBytes;
  }
};

}  // namespace flash_ext::fa3
