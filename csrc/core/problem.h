// One attention problem as plain data: what every check produces and every backend reads.
// Only fixed-width fields: this struct crosses the border between separately built libraries.
#pragma once

#include <cstdint>

namespace flash_ext {

enum class Pass : int32_t { kForward = 0, kBackward = 1 };

enum class DType : int32_t {
  kFloat16 = 0,
  kBFloat16 = 1,
  kFloat32 = 2,
  kFloat64 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kOther = 6,
};

enum class DeviceType : int32_t { kCpu = 0, kCuda = 1, kOther = 2 };

struct Device {
  int32_t type;        // DeviceType
  int32_t ordinal;     // 0 for the CPU
  int32_t cc;          // compute capability, 10 * major + minor; 0 for the CPU
  int32_t sm_count;    // streaming multiprocessors; for the CPU the number of threads to use
  int32_t smem_optin;  // bytes of shared memory a block can opt in to
  int32_t l2_bytes;
};

// Element strides of a (batch, row, head, dim) tensor whose last stride is 1. Packed tensors
// (total, head, dim) have batch = 0: sequence b starts at row cu_seqlens[b].
struct Strides {
  int64_t batch, row, head;
};

struct Problem {
  int32_t pass;   // Pass
  int32_t dtype;  // DType of q, k, v, out and their gradients
  int32_t batch;
  int32_t nheads, nheads_k;  // nheads % nheads_k == 0
  int32_t head_dim, head_dim_v;
  int32_t packed_q, packed_k;  // 0 / 1: rows are packed, cu_seqlens given
  int64_t seqlen_q, seqlen_k;  // padded: the second dimension; packed: a planning hint only
  int64_t total_q, total_k;    // rows in memory: batch * seqlen when padded
  int32_t has_seqused_q, has_seqused_k;
  int32_t has_sinks;
  int32_t has_alibi;  // 0 none, 1 slopes (nheads), 2 slopes (batch, nheads)
  int32_t has_d_lse;  // backward: a gradient through lse
  int32_t top_left;   // 0: bottom-right aligned (offset seqlen_k - seqlen_q), 1: offset 0
  int64_t window_left, window_right;  // -1 unlimited; causal is already window_right = 0
  double softmax_scale;               // finite, > 0
  double softcap;                     // 0 off
  int32_t dropout_threshold;          // round(65536 * p): dropped iff 16 random bits < it; 0 off
  int32_t deterministic;
  Strides q, k, v, out;      // lse is contiguous: (batch, nheads, seqlen_q) or (nheads, total_q)
  Strides dout, dq, dk, dv;  // backward only
  Device device;
  int32_t max_ctas;  // tests: 0 unlimited
  int32_t tile;      // tests: 0 the backend's choice, else 1 + an index into its tile table
};

struct Plan {
  uint64_t workspace_bytes;
  int32_t tile_m, tile_n;
  int64_t grid;  // CTAs launched, or tiles pulled by the threads of the CPU
  int32_t smem;  // bytes of shared memory a CTA
  int32_t stages;
  int32_t launches;  // kernels launched
  char why[256];     // why this tile, one sentence
};

}  // namespace flash_ext
