// The table of fa1: what it can run, which instance runs it, and the call.
#include <algorithm>

#include "device/fwd_host.h"
#include "fa1/backward.h"
#include "fa1/fwd_cut.h"
#include "fa1/launch.h"

namespace flash_ext::fa1 {
namespace {

using namespace device;

constexpr const char* kBuild = FLASH_EXT_ARCHS ", commit " FLASH_EXT_COMMIT;

// ---- instances --------------------------------------------------------------------------------

struct Instance {
  bool volta;
  int head_dim, block_m, block_n;
  bool modified;
  int smem_bytes;
  cudaError_t (*launch)(const FwdParams&, int64_t grid, cudaStream_t);
};

#define INSTANCE(header, ...) INSTANCE_##header(__VA_ARGS__)
#define INSTANCE_bwd(...)
#define INSTANCE_volta_bwd(...)
#define INSTANCE_fwd(head_dim, block_m, block_n, scores)   \
  {false,                                                  \
   head_dim,                                               \
   block_m,                                                \
   block_n,                                                \
   scores,                                                 \
   FwdCut<head_dim, block_m, block_n, scores>::kSmemBytes, \
   &launch_fwd<head_dim, block_m, block_n, scores>},
#define INSTANCE_volta_fwd(head_dim, block_m, block_n, scores) \
  {true,                                                       \
   head_dim,                                                   \
   block_m,                                                    \
   block_n,                                                    \
   scores,                                                     \
   2 * head_dim * (block_m + 2 * block_n), /* Q, K and V */    \
   &launch_volta_fwd<head_dim, block_m, block_n, scores>},
constexpr Instance kInstances[] = {
#include "fa1/instances.inc"
};
#undef INSTANCE

// 7.0 has kernels of its own. Built without the others they run on later cards too, by their PTX:
// that is how they are tested.
bool takes_volta(int cc) {
#ifdef FLASH_EXT_HAS_75
  return cc < 75;
#else
  return cc > 0;
#endif
}

// An instance of the smallest bucket that holds both head dimensions; p.tile = 1, 2, ... forces one
// of its tiles. Null when there is none.
const Instance* find_instance(const Problem& p) {
  const int dim = std::max(p.head_dim, p.head_dim_v);
  int bucket = 0, tile = 0;
  for (const Instance& instance : kInstances) {
    if (instance.volta != takes_volta(p.device.cc)) continue;
    if (instance.head_dim < dim || instance.modified != is_modified(p)) continue;
    if (bucket == 0) bucket = instance.head_dim;
    if (instance.head_dim != bucket) continue;
    if (++tile == p.tile || p.tile == 0) return &instance;
  }
  return nullptr;
}

const BwdTable& backward_table(const Problem& p) {
  return takes_volta(p.device.cc) ? kVoltaBackward : kBackward;
}

// ---- what it can run --------------------------------------------------------------------------

Status why_not(const Problem* problem) {
  const Problem& p = *problem;
  if (static_cast<DeviceType>(p.device.type) != DeviceType::kCuda) return common_why_not(p);
  const int cc = p.device.cc;
  if (cc < 70) {
    return make_status(Code::kUnsupported,
                       "it needs compute capability 7.0 or newer, this card has %d.%d", cc / 10,
                       cc % 10);
  }
  const Status card = card_why_not(kBuild, cc);
  if (!card.ok()) return card;
  if (static_cast<DType>(p.dtype) == DType::kBFloat16)
    return unsupported("its cards have no bfloat16 arithmetic: use float16");
  const Status common = common_why_not(p);
  if (!common.ok()) return common;
  if (static_cast<Pass>(p.pass) == Pass::kBackward) return backward_table(p).why_not(p);
  const Instance* instance = find_instance(p);
  if (!instance) return no_kernel(p);
  return instance_why_not(p, instance->smem_bytes, make_scheduler(p, instance->block_m).num_tiles);
}

// ---- plan -------------------------------------------------------------------------------------

Status plan(const Problem* problem, Plan* plan) {
  const Status reason = why_not(problem);
  if (!reason.ok()) return reason;
  if (static_cast<Pass>(problem->pass) == Pass::kBackward) {
    *plan = backward_table(*problem).plan(*problem);
    return ok_status();
  }
  const Instance& instance = *find_instance(*problem);
  *plan = plan_forward(*problem, instance, instance.smem_bytes, 1,
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
  return reason.ok() ? backward_table(*problem).run(*problem, *tensors, *call) : reason;
}

}  // namespace
}  // namespace flash_ext::fa1

FLASH_EXT_EXPORT const flash_ext::Backend* flash_ext_backend() {
  using namespace flash_ext;
  static constexpr Backend backend =
      device::make_backend("fa1", fa1::kBuild, fa1::why_not, fa1::plan, fa1::fwd, fa1::bwd);
  return &backend;
}
