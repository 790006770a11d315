// The table of fa2: what it can run, which instance runs it, and the call.
#include <algorithm>

#include "device/fwd_host.h"
#include "fa2/backward.h"
#include "fa2/fwd_cut.h"
#include "fa2/launch.h"

namespace flash_ext::fa2 {
namespace {

using namespace device;

constexpr const char* kBuild = FLASH_EXT_ARCHS ", commit " FLASH_EXT_COMMIT;

// ---- instances --------------------------------------------------------------------------------

struct Instance {
  DType dtype;
  int head_dim, block_m, block_n, stages;
  bool modified;
  int warps, smem_bytes;
  decltype(&launch_fwd<__half, 64, 128, 64, 2, false>) launch;

  // Warps that an SM holds at once, as far as more of them are faster. An SM has 1 KB beyond what a
  // CTA may ask for; each takes 1 KB for the system and a little for what the kernel declares
  // itself. Registers are there for 8 warps at least.
  int warps_on(const Device& device) const {
    constexpr int kSystem = 1024, kDeclared = 256;
    constexpr int kFull = 8;  // two for each scheduler hide each other's latency
    const int ctas = (device.smem_optin + kSystem) / (smem_bytes + kDeclared + kSystem);
    return std::min(ctas, kFull / warps) * warps;
  }
};

template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kStages, bool kModified>
constexpr Instance make_instance() {
  using Cut = FwdCut<kHeadDim, kBlockM, kBlockN, kStages>;
  return {kDType<Element>,
          kHeadDim,
          kBlockM,
          kBlockN,
          kStages,
          kModified,
          Cut::kWarps,
          Cut::kSmemBytes,
          &launch_fwd<Element, kHeadDim, kBlockM, kBlockN, kStages, kModified>};
}

#define INSTANCE(header, ...) INSTANCE_##header(__VA_ARGS__)
#define INSTANCE_bwd(...)
#define INSTANCE_fwd(...) make_instance<__VA_ARGS__>(),
constexpr Instance kInstances[] = {
#include "fa2/instances.inc"
};
#undef INSTANCE

// An instance of the smallest bucket that holds both head dimensions: the first of those that give
// an SM most warps; p.tile = 1, 2, ... forces one of them. Null when there is none.
const Instance* find_instance(const Problem& p) {
  const int dim = std::max(p.head_dim, p.head_dim_v);
  const Instance* best = nullptr;
  int bucket = 0, tile = 0;
  for (const Instance& instance : kInstances) {
    if (instance.dtype != static_cast<DType>(p.dtype) || instance.head_dim < dim) continue;
    if (instance.modified != is_modified(p)) continue;
    if (bucket == 0) bucket = instance.head_dim;
    if (instance.head_dim != bucket) continue;
    if (++tile == p.tile) return &instance;
    if (!best || instance.warps_on(p.device) > best->warps_on(p.device)) best = &instance;
  }
  return p.tile > 0 ? nullptr : best;
}

// ---- what it can run --------------------------------------------------------------------------

Status why_not(const Problem* problem) {
  const Problem& p = *problem;
  if (static_cast<DeviceType>(p.device.type) != DeviceType::kCuda) return common_why_not(p);
  const int cc = p.device.cc;
  if (cc < 80) {
    return make_status(Code::kUnsupported,
                       "it needs compute capability 8.0 or newer, this card has %d.%d", cc / 10,
                       cc % 10);
  }
  const Status card = card_why_not(kBuild, cc);
  if (!card.ok()) return card;
  const Status common = common_why_not(p);
  if (!common.ok()) return common;
  if (static_cast<Pass>(p.pass) == Pass::kBackward) return kBackward.why_not(p);
  const Instance* instance = find_instance(p);
  if (!instance) return no_kernel(p);
  return instance_why_not(p, instance->smem_bytes, make_scheduler(p, instance->block_m).num_tiles);
}

// ---- plan -------------------------------------------------------------------------------------

Status plan(const Problem* problem, Plan* plan) {
  const Status reason = why_not(problem);
  if (!reason.ok()) return reason;
  if (static_cast<Pass>(problem->pass) == Pass::kBackward) {
    *plan = kBackward.plan(*problem);
    return ok_status();
  }
  const Instance& instance = *find_instance(*problem);
  *plan = plan_forward(*problem, instance, instance.smem_bytes, instance.stages,
                       make_scheduler(*problem, instance.block_m).num_tiles);
  return ok_status();
}

// ---- the call ---------------------------------------------------------------------------------

Status fwd(const Problem* problem, const FwdTensors* tensors, const Call* call) {
  Plan planned;
  const Status reason = plan(problem, &planned);
  if (!reason.ok() || planned.grid == 0) return reason;
  const Instance& instance = *find_instance(*problem);
  const DeviceGuard guard(problem->device.ordinal);
  const FwdParams params = make_fwd_params(*problem, *tensors, instance.block_m);
  return cuda_status(instance.launch(params, planned.grid, static_cast<cudaStream_t>(call->stream)),
                     "the forward kernel");
}

Status bwd(const Problem* problem, const BwdTensors* tensors, const Call* call) {
  const Status reason = why_not(problem);
  return reason.ok() ? kBackward.run(*problem, *tensors, *call) : reason;
}

}  // namespace
}  // namespace flash_ext::fa2

FLASH_EXT_EXPORT const flash_ext::Backend* flash_ext_backend() {
  using namespace flash_ext;
  static constexpr Backend backend =
      device::make_backend("fa2", fa2::kBuild, fa2::why_not, fa2::plan, fa2::fwd, fa2::bwd);
  return &backend;
}
