// What the host sides of the CUDA backends share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/backend.h"
#include "device/score_options.h"
#include "device/tile_scheduler.cuh"

namespace flash_ext::device {

template <typename Element>
constexpr DType kDType = DType::kFloat16;
template <>
inline constexpr DType kDType<__nv_bfloat16> = DType::kBFloat16;

constexpr int64_t kMaxLength = int64_t{1}
                               << 28;  // of a sequence: row and key arithmetic is in int32

// Whether a build ("nvcc 13.0, sm_80 sm_90 compute_90, ...") has code for a card.
inline bool built_for(const char* build, int cc) {
  for (const char* at = build; (at = std::strchr(at, '_')) != nullptr; ++at) {
    const int arch = std::atoi(at + 1);
    const bool specific = at[1 + (arch < 100 ? 2 : 3)] == 'a';  // 90a: that card alone
    if (at - build >= 2 && std::strncmp(at - 2, "sm", 2) == 0) {
      if (specific ? arch == cc : arch / 10 == cc / 10 && arch <= cc) return true;
    }
    if (at - build >= 7 && std::strncmp(at - 7, "compute", 7) == 0 && !specific && arch <= cc)
      return true;
  }
  return false;
}

inline Status unsupported(const char* sentence) {
  return make_status(Code::kUnsupported, "%s", sentence);
}

// What no CUDA backend can do yet; each adds what its own tiles and cards cannot.
inline Status common_why_not(const Problem& p) {
  const auto dtype = static_cast<DType>(p.dtype);
  if (static_cast<DeviceType>(p.device.type) != DeviceType::kCuda)
    return unsupported("it needs a CUDA device");
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16)
    return unsupported("it takes float16 and bfloat16 only");
  if (p.head_dim % 8 || p.head_dim_v % 8) {
    return make_status(Code::kUnsupported,
                       "head_dim and head_dim_v must be multiples of 8, got %d and %d", p.head_dim,
                       p.head_dim_v);
  }
  if (p.seqlen_q >= kMaxLength || p.seqlen_k >= kMaxLength)
    return unsupported("a sequence must be shorter than 2^28");
  return ok_status();
}

// For a library whose `build` has no code for a card of compute capability `cc`.
inline Status card_why_not(const char* build, int cc) {
  if (built_for(build, cc)) return ok_status();
  return make_status(Code::kUnsupported, "it was built for another card (%s), this one has %d.%d",
                     build, cc / 10, cc % 10);
}

// For a forward without an instance.
inline Status no_kernel(const Problem& p) {
  return make_status(Code::kUnsupported,
                     "head_dim %d with head_dim_v %d has no kernel yet (up to 256)", p.head_dim,
                     p.head_dim_v);
}

// Whether an instance that was found fits the card and the problem its grid.
inline Status instance_why_not(const Problem& p, int smem_bytes, int64_t tiles) {
  if (smem_bytes > p.device.smem_optin) {
    return make_status(Code::kUnsupported,
                       "its tile needs %d bytes of shared memory, this card gives %d", smem_bytes,
                       p.device.smem_optin);
  }
  return tiles <= INT32_MAX ? ok_status() : unsupported("it has more than 2^31 tiles of queries");
}

inline Status cuda_status(cudaError_t error, const char* where) {
  if (error == cudaSuccess) return ok_status();
  return make_status(Code::kCudaError, "%s: %s (%s)", where, cudaGetErrorName(error),
                     cudaGetErrorString(error));
}

// Makes the tensors' device the current one, and the one before it again at the end. Set also when
// it is current: a thread that never used CUDA (autograd's) has no context yet, which the encoder
// of tensor maps needs.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal) : ordinal_(ordinal) {
    cudaGetDevice(&before_);
    cudaSetDevice(ordinal_);
  }
  ~DeviceGuard() {
    if (before_ != ordinal_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  int ordinal_, before_ = 0;
};

inline int clamp_window(int64_t window) {
  return static_cast<int>(std::min(window, 2 * kMaxLength));
}

inline int padded_length(bool packed, int64_t total, int batch) {
  return packed || batch == 0 ? 0 : static_cast<int>(total / batch);
}

// Heads whose K and V fill two thirds of the L2 together: tiles of such a group run longest first,
// and still find their keys there. Groups are of one size: a small one at the end would have too
// few short tiles to fill the card's last moments.
inline int64_t lanes_per_group(const Problem& p, int64_t lanes) {
  const int64_t seqlen_k = p.packed_k || !p.batch ? p.seqlen_k : p.total_k / p.batch;
  const int64_t bytes = std::max<int64_t>(1, 2 * seqlen_k * (p.head_dim + p.head_dim_v));
  const int64_t heads = std::max<int64_t>(1, p.device.l2_bytes / 3 * 2 / bytes);
  const int64_t most = heads * (p.nheads / std::max(1, p.nheads_k));
  const int64_t groups = std::max<int64_t>(1, (lanes + most - 1) / most);
  return (lanes + groups - 1) / groups;
}

inline TileScheduler make_scheduler(const Problem& p, int block_m) {
  TileScheduler scheduler{};
  const int seqlen_q = padded_length(p.packed_q, p.total_q, p.batch);
  const int64_t m_slots = p.packed_q ? packed_slots(p.total_q, p.batch, block_m)
                                     : (int64_t{seqlen_q} + block_m - 1) / block_m;
  const int64_t lanes = p.packed_q ? p.nheads : int64_t{p.batch} * p.nheads;
  scheduler.m_slots = static_cast<uint32_t>(m_slots);
  scheduler.lanes = static_cast<uint32_t>(lanes);
  scheduler.longest_first = p.window_right >= 0 && p.window_left < 0;
  scheduler.lanes_per_group = static_cast<uint32_t>(
      scheduler.longest_first ? std::max<int64_t>(1, lanes_per_group(p, lanes)) : 1);
  // Packed slots are there even when no row is.
  scheduler.num_tiles = p.total_q == 0 ? 0 : m_slots * lanes;
  return scheduler;
}

// What the plans of all forwards say of an instance that runs as `ctas` CTAs.
template <typename Instance>
Plan plan_forward(const Problem& p, const Instance& instance, int smem_bytes, int stages,
                  int64_t ctas) {
  Plan plan{};
  plan.tile_m = instance.block_m;
  plan.tile_n = instance.block_n;
  plan.grid = p.max_ctas > 0 ? std::min<int64_t>(ctas, p.max_ctas) : ctas;
  plan.smem = smem_bytes;
  plan.stages = stages;
  plan.launches = plan.grid > 0;
  snprintf(plan.why, sizeof(plan.why), "bucket %d holds head_dim %d and head_dim_v %d",
           instance.head_dim, p.head_dim, p.head_dim_v);
  return plan;
}

// The fields that FwdParams of every generation has.
template <typename Params>
void fill_params(const Problem& p, const FwdTensors& t, int block_m, Params& params) {
  params.lse = static_cast<float*>(t.lse);
  params.sinks = static_cast<const float*>(t.sinks);
  params.cu_seqlens_k = t.cu_seqlens_k, params.seqused_q = t.seqused_q,
  params.seqused_k = t.seqused_k;
  params.scheduler = make_scheduler(p, block_m);
  params.rows_q = {t.cu_seqlens_q, p.batch, p.total_q};
  params.seqlen_q = padded_length(p.packed_q, p.total_q, p.batch);
  params.seqlen_k = padded_length(p.packed_k, p.total_k, p.batch);
  params.batch = p.batch, params.nheads = p.nheads;
  params.heads_per_kv = p.nheads_k ? p.nheads / p.nheads_k : 1;
  params.top_left = p.top_left;
  params.window_left = clamp_window(p.window_left),
  params.window_right = clamp_window(p.window_right);
  params.softmax_scale = static_cast<float>(p.softmax_scale);
  const double scale = is_modified(p) ? 1 : p.softmax_scale;  // of what the softmax sees
  params.score_scale = static_cast<float>(scale);
  params.score_scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  params.score_options = score_options(p, t);
}

inline Status alloc(const Device* device, uint64_t bytes, void* stream, void** out) {
  const DeviceGuard guard(device->ordinal);
  return cuda_status(cudaMallocAsync(out, bytes, static_cast<cudaStream_t>(stream)),
                     "the workspace");
}

inline Status free(const Device* device, void* data, void* stream) {
  const DeviceGuard guard(device->ordinal);
  return cuda_status(cudaFreeAsync(data, static_cast<cudaStream_t>(stream)), "the workspace");
}

// The table of a CUDA backend: the rest of it is the same for all.
constexpr Backend make_backend(const char* name, const char* build,
                               decltype(Backend::why_not) why_not, decltype(Backend::plan) plan,
                               decltype(Backend::fwd) fwd, decltype(Backend::bwd) bwd) {
  return {kAbiVersion,
          sizeof(Problem),
          sizeof(Plan),
          sizeof(FwdTensors),
          sizeof(BwdTensors),
          sizeof(Call),
          name,
          build,
          why_not,
          plan,
          fwd,
          bwd,
          &alloc,
          &free};
}

}  // namespace flash_ext::device
