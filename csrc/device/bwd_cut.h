// How the backward's main kernel cuts its work among warps and lays out its shared memory: what
// host and kernel have to agree on.
#pragma once

namespace flash_ext::device {

template <int kHeadDim_, int kBlockM_, int kBlockN_, int kStages_, int kDsStages_, bool kModified_,
          bool kVInSmem_ = true>
struct BwdCut {
  static constexpr int kHeadDim = kHeadDim_;  // the bucket: head_dim and head_dim_v may be less
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;       // of Q and dO
  static constexpr int kDsStages = kDsStages_;   // of dS
  static constexpr bool kModified = kModified_;  // softcap, ALiBi or dropout, as run-time data
  static constexpr bool kVInSmem = kVInSmem_;    // else its fragments come from global memory
  static_assert(kStages == 2 || (kStages == 1 && kDsStages == 1),
                "one buffer of Q and dO has a barrier behind dQ, which a second dS is to save");

  // A warp owns 32 keys. So many warps share them, each with its part of the queries of S and of
  // the columns of dK and dV, which have to stay in registers.
  static constexpr int kSharers = kHeadDim <= 64 ? 1 : kHeadDim <= 128 ? 2 : 4;
  static constexpr int kKeyWarps = kBlockN / 32;
  static constexpr int kWarps = kKeyWarps * kSharers, kThreads = 32 * kWarps;
  static constexpr int kCtasPerSm = kWarps == 4 ? 2 : 1;  // each may then take 255 registers
  // Queries of S^T that a warp has in registers at once; modified scores need some of them, and a
  // block of 32 queries is made in two steps where a warp has it for itself.
  static constexpr int kMostM = kModified || kBlockM <= 32 ? 16 : 32;
  static constexpr int kStepM = kBlockM / kSharers < kMostM ? kBlockM / kSharers : kMostM;
  static constexpr int kSteps = kBlockM / (kSharers * kStepM);
  static constexpr int kColumnBlocks = kHeadDim / 16 / kSharers;  // of dK and dV, of one warp
  static_assert(kBlockN % 32 == 0 && kBlockM % (kSharers * kStepM) == 0 && kStepM % 8 == 0,
                "warps own whole tiles");
  static_assert(kHeadDim % (16 * kSharers) == 0, "warps share the columns of dK and dV evenly");

  // dQ: the warps make a grid over its rows and columns.
  static constexpr int kDqWarpsD = kWarps == 8 && kHeadDim % 64 == 0 ? 4 : 2;
  static constexpr int kDqWarpsM = kWarps / kDqWarpsD;
  static constexpr int kDqRowBlocks = kBlockM / 16 / kDqWarpsM;
  static constexpr int kDqColumnBlocks = kHeadDim / 16 / kDqWarpsD;
  static_assert(kBlockM % (16 * kDqWarpsM) == 0 && kHeadDim % (16 * kDqWarpsD) == 0,
                "warps share dQ evenly");
  static constexpr int kDqColumns = (kHeadDim + 63) / 64 * 64;  // whole slabs of dq_index

  static constexpr int kKVBytes = kBlockN * kHeadDim * 2;
  static constexpr int kQBytes = kBlockM * kHeadDim * 2;
  static constexpr int kScoreBytes = kBlockN * kBlockM * 2;
  static constexpr int kRowValueBytes = kBlockM * 4;
  static constexpr int kStageBytes = 2 * kQBytes + 2 * kRowValueBytes;  // Q, dO, lse, delta
  // From the start: K, V, dS, P (when sharers trade it), then the stages.
  static constexpr int kDs = (kVInSmem ? 2 : 1) * kKVBytes, kP = kDs + kDsStages * kScoreBytes;
  static constexpr int kStage = kSharers == 1 ? kP : kP + kScoreBytes;
  static constexpr int kSmemBytes = kStage + kStages * kStageBytes;
  static constexpr int kV = kVInSmem ? kKVBytes : kStage;  // dV leaves through it in any case
  static_assert(kV + kKVBytes <= kSmemBytes, "dV needs room");
};

}  // namespace flash_ext::device
