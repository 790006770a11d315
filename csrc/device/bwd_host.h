// The host side of an mma.sync backward (mma_bwd.cuh): which instance of a table runs a problem,
// the plan, the workspace and the call.
#pragma once

#include <algorithm>
#include <cstdio>

#include "device/bwd_cut.h"
#include "device/bwd_params.h"
#include "device/bwd_rows.h"
#include "device/host.h"

namespace flash_ext::device {

struct BwdInstance {
  DType dtype;
  int head_dim, block_m, block_n, stages;
  bool modified;
  int dq_columns, smem_bytes, ctas_per_sm;
  cudaError_t (*launch)(const BwdRowsParams&, const BwdParams&, int64_t grid, cudaStream_t);
  int parts = 1;  // CTAs that share a tile of keys, and take turns of their own at a dQ

  // Whether so many CTAs have room on an SM, which has 1 KB more than a CTA may ask for. Each takes
  // 1 KB for the system and a little for what the kernel declares itself.
  bool fits(const Device& device, int ctas) const {
    constexpr int kSystem = 1024, kDeclared = 256;
    return ctas * (smem_bytes + kDeclared + kSystem) <= device.smem_optin + kSystem;
  }
};

template <typename Element, typename Cut>
constexpr BwdInstance make_bwd_instance(decltype(BwdInstance::launch) launch) {
  return {kDType<Element>, Cut::kHeadDim,   Cut::kBlockM,    Cut::kBlockN,    Cut::kStages,
          Cut::kModified,  Cut::kDqColumns, Cut::kSmemBytes, Cut::kCtasPerSm, launch};
}

// A backend's instances, sorted by bucket.
class BwdTable {
 public:
  template <int kCount>
  constexpr explicit BwdTable(const BwdInstance (&instances)[kCount])
      : begin_(instances), end_(instances + kCount) {}

  Status why_not(const Problem& p) const;
  // Of a problem that why_not has nothing against.
  Plan plan(const Problem& p) const;
  Status run(const Problem& p, const BwdTensors& tensors, const Call& call) const;

 private:
  const BwdInstance* find(const Problem& p) const;

  const BwdInstance *begin_, *end_;
};

// Of the smallest bucket that holds both head dimensions the first tile that fits the card as often
// as it wants to, else the first that fits at all; null when there is none. p.tile = 1, 2, ...
// forces one of the bucket's tiles.
inline const BwdInstance* BwdTable::find(const Problem& p) const {
  const int dim = std::max(p.head_dim, p.head_dim_v);
  const BwdInstance* fallback = nullptr;
  int bucket = 0, tile = 0;
  for (const BwdInstance* i = begin_; i != end_; ++i) {
    const BwdInstance& instance = *i;
    if (instance.dtype != static_cast<DType>(p.dtype) || instance.modified != is_modified(p) ||
        instance.head_dim < dim) {
      continue;
    }
    if (bucket == 0) bucket = instance.head_dim;
    if (instance.head_dim != bucket) break;
    ++tile;
    if (!instance.fits(p.device, 1) || (p.tile != 0 && p.tile != tile)) continue;
    if (p.tile == tile || instance.fits(p.device, instance.ctas_per_sm)) return i;
    if (!fallback) fallback = i;
  }
  return fallback;
}

// Tiles of keys, blocks that many queries see first. Lanes whose Q, dO and sums of dQ share half of
// the L2 are worked on side by side; deterministic, where the tiles of a lane follow each other by
// a block, at least so many that eight tiles of each are, or three where causal lanes are short: a
// tile then has few blocks to make up for what it waited at first.
inline TileScheduler make_key_tiles(const Problem& p, const BwdInstance& instance) {
  TileScheduler tiles{};
  const int seqlen_k = padded_length(p.packed_k, p.total_k, p.batch), block_n = instance.block_n;
  tiles.m_slots = static_cast<int>(p.packed_k ? packed_slots(p.total_k, p.batch, block_n)
                                              : (seqlen_k + block_n - 1) / block_n);
  tiles.lanes = p.packed_k ? p.nheads_k : p.batch * p.nheads_k;
  const int64_t rows_q = p.packed_k || p.batch == 0 ? p.total_q : p.total_q / p.batch;
  const int64_t lane_bytes =
      std::max<int64_t>(rows_q, 1) * (p.nheads / std::max(p.nheads_k, 1)) * instance.head_dim * 8;
  int64_t group = p.device.l2_bytes / 2 / std::max<int64_t>(lane_bytes, 1);
  const bool is_short = p.window_right >= 0 && tiles.m_slots <= 32;
  if (p.deterministic)
    group = std::max<int64_t>(group, p.device.sm_count * instance.ctas_per_sm / (is_short ? 3 : 8));
  tiles.lanes_per_group =
      static_cast<int>(std::clamp<int64_t>(group, 1, std::max<int64_t>(tiles.lanes, 1)));
  tiles.num_tiles = p.total_k == 0 ? 0 : int64_t{tiles.m_slots} * tiles.lanes;
  return tiles;
}

// Fills in what the kernels get; the workspace begins at `workspace`. Returns its bytes.
inline uint64_t make_bwd_params(const Problem& p, const BwdTensors& t, const BwdInstance& instance,
                                void* workspace, BwdRowsParams& rows, BwdParams& params) {
  WorkspaceParts parts(workspace);
  const int64_t query_tiles = make_scheduler(p, instance.block_m).num_tiles;
  fill_bwd_rows(p, t, instance.block_m, instance.dq_columns,
                p.deterministic ? 1 + query_tiles * instance.parts : 0, false, parts, rows);
  params.q = t.q, params.k = t.k, params.v = t.v, params.dout = t.dout;
  params.dk = t.dk, params.dv = t.dv;
  params.q_stride = p.q, params.k_stride = p.k, params.v_stride = p.v;
  params.dout_stride = p.dout, params.dk_stride = p.dk, params.dv_stride = p.dv;
  params.lse_log2 = rows.lse_log2, params.delta = rows.delta, params.dq_sum = rows.dq_sum;
  if (p.deterministic) params.next_tile = rows.counters, params.dq_turns = rows.counters + 1;
  params.query_rows = rows.q, params.query_tiles = rows.tiles;
  params.key_rows = {{t.cu_seqlens_k, p.batch, p.total_k},
                     t.seqused_k,
                     padded_length(p.packed_k, p.total_k, p.batch),
                     p.nheads_k};
  params.key_tiles = make_key_tiles(p, instance);
  params.score_options = score_options(p, t);
  params.nheads = p.nheads;
  params.heads_per_kv = p.nheads_k ? p.nheads / p.nheads_k : 1;
  params.head_dim = p.head_dim, params.head_dim_v = p.head_dim_v;
  params.top_left = p.top_left;
  params.window_left = clamp_window(p.window_left);
  params.window_right = clamp_window(p.window_right);
  params.softmax_scale = static_cast<float>(p.softmax_scale);
  params.softmax_scale_log2 = static_cast<float>(p.softmax_scale * 1.4426950408889634);
  return parts.bytes();
}

inline Status BwdTable::why_not(const Problem& p) const {
  const BwdInstance* instance = find(p);
  if (!instance) {
    return make_status(
        Code::kUnsupported,
        "the backward of head_dim %d with head_dim_v %d has no kernel yet for a card "
        "with %d bytes of shared memory",
        p.head_dim, p.head_dim_v, p.device.smem_optin);
  }
  if (make_scheduler(p, instance->block_m).num_tiles > INT32_MAX)
    return unsupported("it has more than 2^31 tiles of queries");
  return make_key_tiles(p, *instance).num_tiles <= INT32_MAX
             ? ok_status()
             : unsupported("it has more than 2^31 tiles of keys");
}

inline Plan BwdTable::plan(const Problem& p) const {
  const BwdInstance& instance = *find(p);
  BwdRowsParams rows{};
  BwdParams params{};
  Plan plan{};
  plan.workspace_bytes = make_bwd_params(p, BwdTensors{}, instance, nullptr, rows, params);
  plan.tile_m = instance.block_m, plan.tile_n = instance.block_n;
  plan.grid = params.key_tiles.num_tiles * instance.parts;
  if (p.max_ctas > 0) plan.grid = std::min<int64_t>(plan.grid, p.max_ctas);
  plan.smem = instance.smem_bytes;
  plan.stages = instance.stages;
  const bool queries = rows.tiles.num_tiles > 0;
  plan.launches = (queries || rows.num_counters > 0) + (plan.grid > 0) + queries +
                  (p.has_sinks && p.nheads > 0);
  snprintf(plan.why, sizeof(plan.why), "bucket %d holds head_dim %d and head_dim_v %d",
           instance.head_dim, p.head_dim, p.head_dim_v);
  return plan;
}

inline Status BwdTable::run(const Problem& p, const BwdTensors& tensors, const Call& call) const {
  const BwdInstance& instance = *find(p);
  BwdRowsParams rows{};
  BwdParams params{};
  make_bwd_params(p, tensors, instance, call.workspace, rows, params);
  const DeviceGuard guard(p.device.ordinal);
  return cuda_status(
      instance.launch(rows, params, plan(p).grid, static_cast<cudaStream_t>(call.stream)),
      "the backward kernels");
}

}  // namespace flash_ext::device
