// How the forward cuts its work among warps and lays out its shared memory: what host and kernel
// have to agree on.
#pragma once

namespace flash_ext::fa2 {

template <int kHeadDim_, int kBlockM_, int kBlockN_, int kStages_>
struct FwdCut {
  static constexpr int kHeadDim = kHeadDim_;  // the bucket: head_dim and head_dim_v may be less
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kStages = kStages_;

  // A warp owns 32 queries: each ldmatrix of K and V then feeds two MMAs. O of so many rows does
  // not fit its registers beyond head_dim 128: there two warps share the 32 queries, each with half
  // of a block's keys in S and half of the columns of O.
  static constexpr int kWarpRows = 32, kMTiles = kWarpRows / 16;
  static constexpr int kSharers = kHeadDim <= 128 ? 1 : 2;
  static constexpr int kWarps = kBlockM / kWarpRows * kSharers, kThreads = 32 * kWarps;
  static_assert(kBlockM % kWarpRows == 0, "a warp owns whole rows");

  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kQBytes = kBlockM * kRowBytes;   // O leaves through the same buffer
  static constexpr int kKVBytes = kBlockN * kRowBytes;  // of K, and of V
  // What sharers trade: P, and one value a row from each.
  static constexpr int kPBytes = kSharers == 1 ? 0 : kBlockM * kBlockN * 2;
  static constexpr int kRowValueBytes = kSharers == 1 ? 0 : kBlockM * kSharers * 4;
  // From the start: Q, the stages of K and V, P, row values.
  static constexpr int kKV = kQBytes, kP = kKV + kStages * 2 * kKVBytes, kRowValues = kP + kPBytes;
  static constexpr int kSmemBytes = kRowValues + kRowValueBytes;
};

}  // namespace flash_ext::fa2
