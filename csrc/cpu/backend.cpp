// The backend's table. Nothing behind it throws, and nothing but `alloc` allocates.
#include <cstdlib>

#include "cpu/attention.h"
#include "cpu/sequence.h"

#ifndef FLASH_EXT_COMMIT
#define FLASH_EXT_COMMIT "unknown"
#endif

#if defined(__AVX512BF16__)
#define FLASH_EXT_CPU_ISA "AVX-512 with BF16"
#elif defined(__AVX512F__)
#define FLASH_EXT_CPU_ISA "AVX-512"
#elif defined(__AVX2__)
#define FLASH_EXT_CPU_ISA "AVX2"
#else
#define FLASH_EXT_CPU_ISA "the compiler's default instruction set"
#endif

namespace flash_ext::cpu {
namespace {

Status why_not(const Problem* problem) {
  if (static_cast<DeviceType>(problem->device.type) != DeviceType::kCpu) {
    return make_status(Code::kUnsupported, "the tensors are not on the CPU");
  }
  return with_element_type(*problem, [](auto) { return ok_status(); });
}

bool is_forward(const Problem& problem) {
  return static_cast<Pass>(problem.pass) == Pass::kForward;
}

Status plan(const Problem* problem, Plan* plan) {
  const Status reason = why_not(problem);
  if (!reason.ok()) return reason;
  *plan = Plan{};
  return is_forward(*problem) ? plan_forward(*problem, plan) : plan_backward(*problem, plan);
}

Status check_call(const Problem* problem, const Call* call) {
  Plan needed;
  const Status reason = plan(problem, &needed);
  if (!reason.ok()) return reason;
  if (call->workspace_bytes < needed.workspace_bytes) {
    return make_status(Code::kInvalid, "the CPU backend needs %llu bytes of workspace, got %llu",
                       static_cast<unsigned long long>(needed.workspace_bytes),
                       static_cast<unsigned long long>(call->workspace_bytes));
  }
  return ok_status();
}

Status fwd(const Problem* problem, const FwdTensors* tensors, const Call* call) {
  const Status reason = check_call(problem, call);
  return reason.ok() ? forward(*problem, *tensors, *call) : reason;
}

Status bwd(const Problem* problem, const BwdTensors* tensors, const Call* call) {
  const Status reason = check_call(problem, call);
  return reason.ok() ? backward(*problem, *tensors, *call) : reason;
}

Status alloc(const Device*, uint64_t bytes, void*, void** out) {
  constexpr uint64_t kAlignment = 256;
  *out = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (*out) return ok_status();
  return make_status(Code::kInvalid, "no memory for %llu bytes of workspace",
                     static_cast<unsigned long long>(bytes));
}

Status free(const Device*, void* data, void*) {
  std::free(data);
  return ok_status();
}

}  // namespace
}  // namespace flash_ext::cpu

FLASH_EXT_EXPORT const flash_ext::Backend* flash_ext_backend() {
  using namespace flash_ext;
  static const Backend backend = {kAbiVersion,
                                  sizeof(Problem),
                                  sizeof(Plan),
                                  sizeof(FwdTensors),
                                  sizeof(BwdTensors),
                                  sizeof(Call),
                                  "cpu",
                                  "g++ " __VERSION__ ", " FLASH_EXT_CPU_ISA
                                  ", commit " FLASH_EXT_COMMIT,
                                  cpu::why_not,
                                  cpu::plan,
                                  cpu::fwd,
                                  cpu::bwd,
                                  cpu::alloc,
                                  cpu::free};
  return &backend;
}
