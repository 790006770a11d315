// The pointers of one call. Shapes and strides are in Problem; every optional pointer may be null.
#pragma once

#include <cstdint>

namespace flash_ext {

// T is the dtype of q; acc is float32, or float64 when T is float64.
struct FwdTensors {
  const void* q;  // T (batch, seqlen_q, nheads, head_dim) or (total_q, nheads, head_dim)
  const void* k;  // T (batch, seqlen_k, nheads_k, head_dim) or (total_k, nheads_k, head_dim)
  const void* v;  // T (batch, seqlen_k, nheads_k, head_dim_v) or packed
  const int32_t* cu_seqlens_q;  // (batch + 1), packed q only
  const int32_t* cu_seqlens_k;  // (batch + 1), packed k only
  const int32_t* seqused_q;     // (batch)
  const int32_t* seqused_k;     // (batch)
  const float* alibi_slopes;    // (nheads) or (batch, nheads)
  const void* sinks;            // acc (nheads)
  const int64_t* rng_state;     // (2): seed, offset
  void* out;                    // T (batch, seqlen_q, nheads, head_dim_v) or packed
  void* lse;                    // acc (batch, nheads, seqlen_q) or (nheads, total_q), natural log
};

struct BwdTensors {
  const void* dout;   // T, shape of out, any strides with a contiguous last dimension
  const void* d_lse;  // acc, shape of lse, contiguous; null: zero
  const void* q;
  const void* k;
  const void* v;
  const void* out;
  const void* lse;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const int32_t* seqused_q;
  const int32_t* seqused_k;
  const float* alibi_slopes;
  const void* sinks;
  const int64_t* rng_state;
  void* dq;      // T, shape of q
  void* dk;      // T, shape of k
  void* dv;      // T, shape of v
  void* d_sink;  // acc (nheads); null without sinks
};

}  // namespace flash_ext
