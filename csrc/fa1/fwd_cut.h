// How the forward for 7.5 cuts its work among warps and lays out its shared memory: what host and
// kernel have to agree on.
#pragma once

namespace flash_ext::fa1 {

template <int kHeadDim_, int kBlockM_, int kBlockN_, bool kModified_>
struct FwdCut {
  static constexpr int kHeadDim = kHeadDim_;  // the bucket: head_dim and head_dim_v may be less
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr bool kModified = kModified_;
  static constexpr int kWarpRows = kHeadDim > 96 ? 16 : 32;  // O and Q must fit registers
  static constexpr int kWarps = kBlockM / kWarpRows, kThreads = 32 * kWarps;
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kChunks = kRowBytes / 16;  // of a row: what a lane loads at once
  static constexpr int kMTiles = kWarpRows / 16;
  static constexpr int kDTiles = kHeadDim / 8;
  static constexpr int kStepN = kBlockN;  // keys whose scores are in registers at once
  static constexpr int kNTiles = kStepN / 8;
  static constexpr int kKVBytes = kBlockN * kRowBytes;  // of K, and of V
  // Where O leaves no registers for all of Q, its last columns lie in shared memory.
  static constexpr int kHeldChunks = kHeadDim > 192 ? (kModified ? 12 : 16) : kChunks;
  static constexpr int kQBytes = kBlockM * (kChunks - kHeldChunks) * 16;
  static constexpr int kSmemBytes = 2 * kKVBytes + kQBytes;
  static constexpr int kBlocksPerSM = kHeadDim > 96 ? 1 : 2;
  static_assert(kBlockM % kWarpRows == 0, "a warp owns whole rows");
  static_assert(kHeadDim % 32 == 0, "the swizzle permutes 4 or 8 chunks");
  static_assert(kBlocksPerSM * (kSmemBytes + 1024) <= 64 * 1024, "what an SM of 7.5 has");
};

}  // namespace flash_ext::fa1
