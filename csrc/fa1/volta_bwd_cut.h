// How the Volta backward's main kernel cuts its work among warps and lays out its shared memory:
// what host and kernel have to agree on.
#pragma once

namespace flash_ext::fa1 {

template <int kHeadDim_, int kBlockM_, int kBlockN_, bool kModified_>
struct VoltaBwdCut {
  static constexpr int kHeadDim = kHeadDim_;  // the bucket: head_dim and head_dim_v may be less
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kStages = 1;
  static constexpr bool kModified = kModified_;  // softcap, ALiBi or dropout, as run-time data
  // A warp owns so many keys: their dK and dV have to stay in registers. Where 16 are too many, two
  // CTAs make the same scores, and each has every other 32 columns of the gradients.
  static constexpr int kWarpKeys = kHeadDim > 64 ? 16 : 32, kParts = kHeadDim > 128 ? 2 : 1;
  static constexpr int kColumns = kHeadDim / kParts;
  static constexpr int kWarps = kBlockN / kWarpKeys, kThreads = 32 * kWarps;
  static constexpr int kCtasPerSm = 8 / kWarps < 2 || kParts > 1 ? 1 : 2;
  // dQ: a warp has 16 rows, and every kDqWarpsD-th 16 columns of its part.
  static constexpr int kDqWarpsM = kBlockM / 16, kDqWarpsD = kWarps / kDqWarpsM;
  static constexpr int kDqTiles = kColumns / 16 / kDqWarpsD;
  static constexpr int kDqColumns = (kHeadDim + 63) / 64 * 64;  // whole slabs of dq_index
  static_assert(kBlockN % kWarpKeys == 0 && kBlockM % 16 == 0, "warps own whole tiles");
  static_assert(kColumns % (16 * kDqWarpsD) == 0 && kDqWarpsD % 2 == 0, "warps share dQ evenly");
  static_assert(kBlockM <= 32, "a row of dS is 64 bytes");

  static constexpr int kKVBytes = kBlockN * kHeadDim * 2, kQBytes = kBlockM * kHeadDim * 2;
  static constexpr int kDsRowBytes = 64;
  // From the start: K, V, dS (a row is a key), then Q, dO, lse, delta.
  static constexpr int kV = kKVBytes, kDs = 2 * kKVBytes, kStage = kDs + kBlockN * kDsRowBytes;
  static constexpr int kRowValueBytes = kBlockM * 4;
  static constexpr int kSmemBytes = kStage + 2 * kQBytes + 2 * kRowValueBytes;
  static_assert(kCtasPerSm * (kSmemBytes + 512) <= 96 * 1024, "what an SM of 7.0 has");
};

}  // namespace flash_ext::fa1
