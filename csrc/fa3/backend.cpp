// The table of fa3: what it can run, which instance runs it, and the call.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/host.h"
#include "fa3/backward.h"
#include "fa3/launch.h"
#include "fa3/maps.h"

namespace flash_ext::fa3 {
namespace {

using namespace device;

constexpr const char* kBuild = FLASH_EXT_ARCHS ", commit " FLASH_EXT_COMMIT;

// ---- instances --------------------------------------------------------------------------------

struct Instance {
  DType dtype;
  int head_dim, head_dim_v, block_m, block_n, stages, q_stages;
  bool modified;
  cudaError_t (*launch)(const FwdParams&, int64_t grid, cudaStream_t);

  int smem_bytes() const {
    const int slabs = (head_dim + 63) / 64, slabs_v = (head_dim_v + 63) / 64;
    return 1024 + 128 * (slabs * q_stages * block_m + (slabs + slabs_v) * stages * block_n);
  }
};

#define INSTANCE_bwd(...)
#define INSTANCE_bwd_wide(...)
#define INSTANCE_fwd(element, head_dim, head_dim_v, block_m, block_n, stages, q_stages, scores) \
  {kDType<element>,                                                                             \
   head_dim,                                                                                    \
   head_dim_v,                                                                                  \
   block_m,                                                                                     \
   block_n,                                                                                     \
   stages,                                                                                      \
   q_stages,                                                                                    \
   scores,                                                                                      \
   &launch_fwd<element, head_dim, head_dim_v, block_m, block_n, stages, q_stages, scores>},
#define INSTANCE(pass, ...) INSTANCE_##pass(__VA_ARGS__)
constexpr Instance kInstances[] = {
#include "fa3/instances.inc"
};

// Whether wide blocks of keys take less time than the bucket's first tile, where it has both. They
// are 4 % faster a key; but the last one holds more that nobody sees, and a tile begins and ends
// with a block whose softmax or MMAs stand alone, which costs as much as 60 keys, and as 240 where
// a diagonal crosses the blocks. Fitted to measurements of full 1024 to 16384, 2049, causal 2048 to
// 16384 (README.md).
bool is_wide_faster(const Problem& p, int narrow, int wide) {
  if (p.packed_q || p.packed_k || p.has_seqused_k || p.window_left >= 0 || p.batch == 0)
    return false;
  const int64_t keys = p.total_k / p.batch, cost = p.window_right >= 0 ? 240 : 60;
  const auto whole = [keys](int block) { return (keys + block - 1) / block * block; };
  return 25 * (whole(wide) + cost) < 26 * whole(narrow);
}

// An instance of the smallest bucket that holds both head dimensions, the faster one if it has two;
// p.tile = 1, 2 forces one of them. Null when there is none.
const Instance* find_instance(const Problem& p) {
  const Instance* first = nullptr;
  int tile = 0;
  for (const Instance& instance : kInstances) {
    if (instance.dtype != static_cast<DType>(p.dtype) || instance.modified != is_modified(p) ||
        instance.head_dim < p.head_dim || instance.head_dim_v < p.head_dim_v) {
      continue;
    }
    if (!first) first = &instance;
    if (instance.head_dim != first->head_dim || instance.head_dim_v != first->head_dim_v) continue;
    if (++tile == p.tile) return &instance;
    if (p.tile == 0 && tile == 2 && is_wide_faster(p, first->block_n, instance.block_n))
      return &instance;
  }
  return p.tile > 0 ? nullptr : first;
}

// ---- what it can run --------------------------------------------------------------------------

Status why_not(const Problem* problem) {
  const Problem& p = *problem;
  if (static_cast<DeviceType>(p.device.type) != DeviceType::kCuda) return common_why_not(p);
  const int cc = p.device.cc;
  if (cc != 90) {
    return make_status(Code::kUnsupported,
                       "it runs on compute capability 9.0 only, this card has %d.%d", cc / 10,
                       cc % 10);
  }
  const Status common = common_why_not(p);
  if (!common.ok()) return common;
  if (static_cast<Pass>(p.pass) == Pass::kBackward) return backward_why_not(p);
  const Status mapped = maps_why_not(p);
  if (!mapped.ok()) return mapped;
  const Instance* instance = find_instance(p);
  if (!instance) return no_kernel(p);
  return instance_why_not(p, instance->smem_bytes(),
                          make_scheduler(p, instance->block_m).num_tiles);
}

// ---- plan -------------------------------------------------------------------------------------

// Whether tiles differ in length: a counter hands them out then, else each CTA takes its share,
// which costs nothing.
bool are_unequal(const Problem& p, int block_m) {
  const int64_t rows = p.batch ? p.total_q / p.batch : 0;
  return p.window_right >= 0 || p.window_left >= 0 || p.packed_q || p.packed_k || p.has_seqused_q ||
         p.has_seqused_k || rows % block_m;
}

Status plan(const Problem* problem, Plan* plan) {
  const Status reason = why_not(problem);
  if (!reason.ok()) return reason;
  if (static_cast<Pass>(problem->pass) == Pass::kBackward) {
    *plan = Plan{};
    return plan_backward(*problem, plan);
  }
  const Instance& instance = *find_instance(*problem);
  const int64_t tiles = make_scheduler(*problem, instance.block_m).num_tiles;
  *plan = plan_forward(*problem, instance, instance.smem_bytes(), instance.stages,
                       std::min<int64_t>(tiles, problem->device.sm_count));
  Problem narrow = *problem;
  narrow.tile = 1;
  if (find_instance(narrow) != &instance) {
    const size_t end = strlen(plan->why);
    snprintf(plan->why + end, sizeof(plan->why) - end,
             "; of its two tiles the one with blocks of %d keys: %s", instance.block_n,
             problem->tile ? "forced" : "keys are many or fill them better");
  }
  if (plan->grid > 0 && tiles > plan->grid && are_unequal(*problem, instance.block_m)) {
    plan->workspace_bytes = sizeof(uint32_t);
    plan->launches = 2;  // one clears the counter
  }
  return ok_status();
}

// ---- the call ---------------------------------------------------------------------------------

Status make_params(const Problem& p, const FwdTensors& t, const Instance& instance,
                   FwdParams* params) {
  fill_params(p, t, instance.block_m, *params);
  // Rounded down, so that a power that fits is no larger than kMaxGrowth (device/softmax.cuh).
  params->score_slack = std::nextafter(8 / params->score_scale_log2, 0.f);
  params->out = t.out, params->out_stride = p.out, params->head_dim_v = p.head_dim_v;
  const bool bf16 = p.dtype == static_cast<int32_t>(DType::kBFloat16);
  const Extent q = queries(p), kv = keys(p);
  const int64_t rows_k = std::max<int64_t>(1, kv.rows);
  if (!tensor_map_encoder())
    return make_status(Code::kCudaError,
                       "the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
  const void* k =
      p.total_k ? t.k : t.q;  // without keys no block is loaded, but a map must be valid
  const void* v = p.total_k ? t.v : t.q;
  const CUresult errors[] = {make_tensor_map(&params->q, bf16, t.q, p.q, q.rows, p.head_dim,
                                             q.heads, q.batch, instance.block_m),
                             make_tensor_map(&params->k, bf16, k, p.k, rows_k, p.head_dim, kv.heads,
                                             kv.batch, instance.block_n),
                             make_tensor_map(&params->v, bf16, v, p.v, rows_k, p.head_dim_v,
                                             kv.heads, kv.batch, instance.block_n)};
  for (const CUresult error : errors) {
    if (error != CUDA_SUCCESS)
      return make_status(Code::kCudaError, "cuTensorMapEncodeTiled: error %d",
                         static_cast<int>(error));
  }
  return ok_status();
}

Status fwd(const Problem* problem, const FwdTensors* tensors, const Call* call) {
  Plan planned;
  const Status reason = plan(problem, &planned);
  if (!reason.ok() || planned.grid == 0) return reason;
  const Instance& instance = *find_instance(*problem);
  const DeviceGuard guard(problem->device.ordinal);
  FwdParams params{};
  const auto stream = static_cast<cudaStream_t>(call->stream);
  if (planned.workspace_bytes > 0) params.next_tile = static_cast<uint32_t*>(call->workspace);
  const Status status = make_params(*problem, *tensors, instance, &params);
  if (!status.ok()) return status;
  return cuda_status(instance.launch(params, planned.grid, stream), "the forward kernel");
}

Status bwd(const Problem* problem, const BwdTensors* tensors, const Call* call) {
  const Status reason = why_not(problem);
  return reason.ok() ? run_backward(*problem, *tensors, *call) : reason;
}

}  // namespace
}  // namespace flash_ext::fa3

FLASH_EXT_EXPORT const flash_ext::Backend* flash_ext_backend() {
  using namespace flash_ext;
  static constexpr Backend backend =
      device::make_backend("fa3", fa3::kBuild, fa3::why_not, fa3::plan, fa3::fwd, fa3::bwd);
  return &backend;
}
