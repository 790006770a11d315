// The backward of fa3: which instance runs a problem, its workspace and tensor maps, and the call.
#include "fa3/backward.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "device/host.h"
#include "fa3/launch.h"
#include "fa3/maps.h"

namespace flash_ext::fa3 {
namespace {

using namespace device;

// ---- instances --------------------------------------------------------------------------------

struct Instance {
  DType dtype;
  int head_dim, head_dim_v, block_m, block_n, smem_bytes;
  int part_vectors;
  bool is_wide;  // consumers own columns, not keys, and add dQ themselves
  bool modified;
  cudaError_t (*launch)(const BwdParams&, int64_t grid, cudaStream_t);
};

template <typename Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, bool kModified>
constexpr Instance make_instance(bool is_wide, decltype(Instance::launch) launch) {
  const auto smem_bytes = is_wide ? bwd_wide_smem_bytes : bwd_smem_bytes;
  const auto part_vectors = is_wide ? bwd_wide_part_vectors : bwd_part_vectors;
  return {kDType<Element>,
          kHeadDim,
          kHeadDimV,
          kBlockM,
          kBlockN,
          smem_bytes(kHeadDim, kHeadDimV, kBlockM, kBlockN),
          part_vectors(kHeadDim, kHeadDimV, kBlockM, kBlockN),
          is_wide,
          kModified,
          launch};
}

#define INSTANCE_fwd(...)
#define INSTANCE_bwd(...) make_instance<__VA_ARGS__>(false, &launch_bwd<__VA_ARGS__>),
#define INSTANCE_bwd_wide(...) make_instance<__VA_ARGS__>(true, &launch_bwd_wide<__VA_ARGS__>),
#define INSTANCE(pass, ...) INSTANCE_##pass(__VA_ARGS__)
constexpr Instance kInstances[] = {
#include "fa3/instances.inc"
};

// An instance of the smallest bucket that holds both head dimensions; null when there is none.
// p.tile = 1, 2, ... forces one of the bucket's tiles.
const Instance* find_instance(const Problem& p) {
  const Instance* bucket = nullptr;
  int tile = 0;
  for (const Instance& instance : kInstances) {
    if (instance.dtype != static_cast<DType>(p.dtype) || instance.modified != is_modified(p))
      continue;
    if (instance.head_dim < p.head_dim || instance.head_dim_v < p.head_dim_v) continue;
    if (!bucket) bucket = &instance;
    if (instance.head_dim != bucket->head_dim || instance.head_dim_v != bucket->head_dim_v)
      continue;
    if (++tile == std::max(1, p.tile)) return &instance;
  }
  return nullptr;
}

// ---- tensors ----------------------------------------------------------------------------------

bool is_aligned(const Strides& stride, const Extent& of) {
  return (of.batch <= 1 || stride.batch % 8 == 0) && (of.rows <= 1 || stride.row % 8 == 0) &&
         (of.heads <= 1 || stride.head % 8 == 0);
}

// About `size` of `lanes` things in a group, so that the last group is whole, or nearly; the
// smaller of two such numbers.
int64_t even_group(int64_t lanes, int64_t size) {
  int64_t best = size, best_cost = lanes;
  for (int64_t off = 0; off < best_cost; ++off) {
    for (const int64_t group : {size - off, size + off}) {
      if (group < 1 || group > lanes) continue;
      const int64_t missing = (group - lanes % group) % group;
      if (off + missing < best_cost) best = group, best_cost = off + missing;
    }
  }
  return best;
}

// Blocks of keys. The first have the most queries where the mask is causal, and with
// `deterministic` they add to dQ in this order.
TileScheduler make_key_scheduler(const Problem& p, const Instance& instance) {
  TileScheduler scheduler{};
  const int64_t slots = p.packed_k ? packed_slots(p.total_k, p.batch, instance.block_n)
                                   : (keys(p).rows + instance.block_n - 1) / instance.block_n;
  scheduler.m_slots = static_cast<int>(slots);
  scheduler.lanes = p.packed_k ? p.nheads_k : p.batch * p.nheads_k;
  const int64_t lanes = std::max<int64_t>(1, scheduler.lanes), sms = p.device.sm_count;
  auto of_k = [&](int64_t of_q) { return of_q * p.nheads_k / std::max(1, p.nheads); };  // heads
  int64_t group = 1;
  if (p.window_right >= 0) {
    // Longest first over as many heads as keep what they share (Q, dO, dQ) in the L2, but over so
    // many that the last group's tiles outlast its first one, the longest: n tiles of a head have
    // the work of n / 2 longest ones.
    constexpr int64_t kL2Bytes = 32 << 20;
    const int64_t bytes = int64_t{8} * instance.head_dim * p.total_q * p.nheads / lanes;
    const int64_t shared = kL2Bytes / std::max<int64_t>(1, bytes);
    const int64_t outlast = 2 * sms / (slots + 1) + 1;
    // CTAs of a head walk over the same queries together, so 16 for a head of q share enough. In a
    // fixed order each follows the one before at the distance of an addition to dQ, and the last
    // ones begin late: then 4.
    const int64_t few = of_k(sms / (p.deterministic ? 4 : 16));
    group = std::max({shared, outlast, few});
  } else if (p.deterministic) {
    // As many heads side by side as CTAs have room for twice over, and 4 of q at least, that blocks
    // of keys begin about when they may add.
    group = std::max(2 * sms / std::max<int64_t>(1, slots), of_k(4));
  }
  group = even_group(lanes, std::clamp<int64_t>(group, 1, lanes));
  scheduler.lanes_per_group = static_cast<uint32_t>(group);
  scheduler.num_tiles = p.total_k == 0 ? 0 : slots * scheduler.lanes;
  return scheduler;
}

// How many blocks of queries see a block of keys, at most.
int64_t blocks_seen(const Problem& p, const Instance& instance) {
  const int64_t seqlen = p.packed_q || !p.batch ? p.seqlen_q : p.total_q / p.batch;
  const int64_t all = (seqlen + instance.block_m - 1) / instance.block_m;
  if (p.window_left < 0 || p.window_right < 0) return all;
  const int64_t seen =
      instance.block_n + clamp_window(p.window_left) + clamp_window(p.window_right);
  return std::min(all, seen / instance.block_m + 2);
}

// Which tiles of keys are cut, and in how many parts: so that the call takes the least time,
// counted in steps. Where all tiles take as long, those that would be left at the end for an SM
// each; else all.
SplitTiles split_tiles(const Problem& p, const Instance& instance, int64_t tiles) {
  const int64_t sms = std::max(1, p.device.sm_count);
  const bool alike = p.window_left < 0 && p.window_right < 0 && !p.packed_q && !p.packed_k &&
                     !p.has_seqused_q && !p.has_seqused_k;
  const bool causal = p.window_left < 0 && p.window_right >= 0;
  const int64_t rest = alike ? tiles % sms : tiles;
  const int64_t blocks = std::max<int64_t>(1, blocks_seen(p, instance));
  const int64_t members = p.nheads / std::max(1, p.nheads_k);
  // What a part's begin and end take, and to add what one has left, which takes workspace too.
  constexpr double kEnds = 6, kLeft = 1;
  const int64_t most = rest ? std::min({blocks, 1 + 5 * sms / rest, int64_t{64}}) : 1;
  int64_t best = 1;
  double least = INFINITY;
  for (int64_t parts = 1; parts <= most; ++parts) {
    const double longest = (blocks + parts - 1) / parts * members + kEnds;
    double time = (rest * parts + sms - 1) / sms * longest;
    if (causal) {  // the mean tile has half of the longest one's blocks, and parts to match
      const double items = rest * (parts + 1) / 2., steps = rest * blocks * members / 2.;
      time = std::max(longest, (steps + items * kEnds) / sms);
      if (parts > 1 && items > sms) time += longest / 2;  // SMs do not end together
    }
    time += kLeft * (parts - 1);
    if (time < least) best = parts, least = time;
  }
  SplitTiles split{};
  split.whole = static_cast<uint32_t>(best == 1 ? tiles : tiles - rest);
  split.parts = static_cast<int>(best);
  split.blocks = static_cast<int>((blocks + best - 1) / best);
  split.num_items = static_cast<uint32_t>(tiles + rest * (best - 1));
  return split;
}

// Everything but the tensor maps; returns the bytes of workspace.
uint64_t fill_params(const Problem& p, const BwdTensors& t, const Instance& instance,
                     void* workspace, BwdParams* params) {
  WorkspaceParts parts(workspace);
  const int64_t q_tiles = make_scheduler(p, instance.block_m).num_tiles;
  // A turn a tile of queries. Keys in columns need it only when deterministic, for each of their
  // slabs, which are two at most.
  const int64_t turns = !instance.is_wide ? q_tiles : p.deterministic ? 2 * q_tiles : 0;
  params->scheduler = make_key_scheduler(p, instance);
  SplitTiles split = split_tiles(p, instance, params->scheduler.num_tiles);
  const int64_t left = split.num_items - params->scheduler.num_tiles;
  fill_bwd_rows(p, t, instance.block_m, slab_columns(instance.head_dim), 1 + turns + left,
                !mappable(p.dout, queries(p)), parts, params->rows);
  split.sums = parts.take<float>(left * instance.part_vectors * 4);
  split.ready = params->rows.counters + 1 + turns;
  params->split = split;
  params->next_item = params->rows.counters;
  // Keys in rows store what a first block adds; keys in columns add to sums that prepare cleared.
  params->turns = instance.is_wide && !p.deterministic ? nullptr : params->rows.counters + 1;
  params->rows.turns = instance.is_wide ? nullptr : params->turns;
  params->deterministic = p.deterministic;
  params->keys = {{t.cu_seqlens_k, p.batch, p.total_k},
                  t.seqused_k,
                  padded_length(p.packed_k, p.total_k, p.batch),
                  p.nheads_k};
  params->score_options = score_options(p, t);
  params->nheads = p.nheads;
  params->heads_per_kv = p.nheads_k ? p.nheads / p.nheads_k : 1;
  params->top_left = p.top_left;
  params->window_left = clamp_window(p.window_left);
  params->window_right = clamp_window(p.window_right);
  params->dk_rows = t.dk, params->dv_rows = t.dv;
  params->dk_stride = p.dk, params->dv_stride = p.dv;
  params->softmax_scale = static_cast<float>(p.softmax_scale);
  params->softmax_scale_log2 = static_cast<float>(p.softmax_scale * 1.4426950408889634);
  return parts.bytes();
}

Status make_maps(const Problem& p, const BwdTensors& t, const Instance& instance,
                 BwdParams* params) {
  if (!tensor_map_encoder())
    return make_status(Code::kCudaError,
                       "the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
  const bool bf16 = p.dtype == static_cast<int32_t>(DType::kBFloat16);
  const void* copy = params->rows.dout_copy;
  const struct {
    TensorMap* map;
    const void* data;
    Strides stride;
    Extent of;
    int columns, box_rows;
  } maps[] = {
      {&params->q, t.q, p.q, queries(p), p.head_dim, instance.block_m},
      {&params->dout, copy ? copy : t.dout, copy ? params->rows.copy_stride : p.dout, queries(p),
       p.head_dim_v, instance.block_m},
      {&params->k, t.k, p.k, keys(p), p.head_dim, instance.block_n},
      {&params->v, t.v, p.v, keys(p), p.head_dim_v, instance.block_n},
      {&params->dk, t.dk, p.dk, keys(p), p.head_dim, instance.block_n},
      {&params->dv, t.dv, p.dv, keys(p), p.head_dim_v, instance.block_n},
  };
  for (const auto& m : maps) {
    if (m.of.rows * m.of.heads * m.of.batch == 0) continue;  // nobody loads it
    const CUresult error = make_tensor_map(m.map, bf16, m.data, m.stride, m.of.rows, m.columns,
                                           m.of.heads, m.of.batch, m.box_rows);
    if (error != CUDA_SUCCESS)
      return make_status(Code::kCudaError, "cuTensorMapEncodeTiled: error %d",
                         static_cast<int>(error));
  }
  return ok_status();
}

}  // namespace

Status backward_why_not(const Problem& p) {
  const Instance* instance = find_instance(p);
  if (!instance) {
    return make_status(Code::kUnsupported,
                       "its backward has no kernel for head_dim %d with head_dim_v %d yet "
                       "(up to 256)",
                       p.head_dim, p.head_dim_v);
  }
  const Status mapped = maps_why_not(p);
  if (!mapped.ok()) return mapped;
  if (!mappable(p.dk, keys(p)) || !mappable(p.dv, keys(p)) || !is_aligned(p.dq, queries(p)) ||
      !is_aligned(p.dk, keys(p)) || !is_aligned(p.dv, keys(p))) {
    return unsupported(
        "strides of dq, dk and dv must be multiples of 16 bytes, and a tensor map "
        "must step through dk and dv");
  }
  const int64_t tiles = std::max(make_scheduler(p, instance->block_m).num_tiles,
                                 make_key_scheduler(p, *instance).num_tiles);
  return instance_why_not(p, instance->smem_bytes, tiles);
}

Status plan_backward(const Problem& p, Plan* plan) {
  const Instance& instance = *find_instance(p);
  BwdParams params{};
  plan->workspace_bytes = fill_params(p, BwdTensors{}, instance, nullptr, &params);
  plan->tile_m = instance.block_m;
  plan->tile_n = instance.block_n;
  plan->grid = std::min<int64_t>(params.split.num_items, p.device.sm_count);
  if (p.max_ctas > 0) plan->grid = std::min<int64_t>(plan->grid, p.max_ctas);
  plan->smem = instance.smem_bytes;
  plan->stages = 2;
  plan->launches = 1 + (plan->grid > 0) + (params.rows.tiles.num_tiles > 0) + (p.has_sinks != 0);
  snprintf(plan->why, sizeof(plan->why), "bucket %d holds head_dim %d and head_dim_v %d",
           instance.head_dim, p.head_dim, p.head_dim_v);
  return ok_status();
}

Status run_backward(const Problem& p, const BwdTensors& t, const Call& call) {
  Plan planned{};
  plan_backward(p, &planned);
  for (const void* gradient : {t.dq, t.dk, t.dv}) {
    if (reinterpret_cast<uintptr_t>(gradient) % 16)
      return make_status(Code::kInvalid, "dq, dk and dv must be 16-byte aligned");
  }
  const Instance& instance = *find_instance(p);
  const DeviceGuard guard(p.device.ordinal);
  BwdParams params{};
  fill_params(p, t, instance, call.workspace, &params);
  const Status mapped = make_maps(p, t, instance, &params);
  if (!mapped.ok()) return mapped;
  return cuda_status(instance.launch(params, planned.grid, static_cast<cudaStream_t>(call.stream)),
                     "the backward kernels");
}

}  // namespace flash_ext::fa3
