// What the host tells an mma.sync forward: the Problem, made ready for the device.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "device/score_options.h"
#include "device/tile_scheduler.cuh"

namespace flash_ext::device {

struct FwdParams {
  const void* q;       // (batch, seqlen_q, nheads, head_dim) or (total_q, nheads, head_dim)
  const void* k;       // (batch, seqlen_k, nheads_k, head_dim) or packed
  const void* v;       // (batch, seqlen_k, nheads_k, head_dim_v) or packed
  void* out;           // (batch, seqlen_q, nheads, head_dim_v) or packed
  float* lse;          // (batch, nheads, seqlen_q) or (nheads, total_q)
  const float* sinks;  // (nheads) or null
  const int32_t* cu_seqlens_k;  // null: padded keys
  const int32_t* seqused_q;     // null: all rows are used
  const int32_t* seqused_k;
  Strides q_stride, k_stride, v_stride, out_stride;  // elements
  TileScheduler scheduler;
  PackedRows rows_q;       // cu_seqlens is null: padded queries
  int seqlen_q, seqlen_k;  // padded lengths
  int batch, nheads, heads_per_kv;
  int head_dim, head_dim_v;
  int top_left, window_left, window_right;
  float softmax_scale;
  // Of the scores that the softmax sees: 1 where modified scores come scaled already.
  float score_scale, score_scale_log2, score_slack;
  ScoreOptions score_options;
};

}  // namespace flash_ext::device
