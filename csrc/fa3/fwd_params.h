// What the host tells the forward kernel: the Problem, made ready for the device. A kernel
// parameter, tensor maps included, so that a captured graph holds it.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "device/score_options.h"
#include "device/tensor_map.h"
#include "device/tile_scheduler.cuh"

namespace flash_ext::fa3 {

struct FwdParams {
  device::TensorMap q, k, v;  // boxes of 64 columns and a tile's rows
  void* out;
  Strides out_stride;
  int head_dim_v;
  uint32_t* next_tile;  // counter of tiles handed out, or null: every CTA takes each gridDim-th
  float* lse;           // (batch, nheads, seqlen_q) or (nheads, total_q)
  const float* sinks;   // (nheads) or null
  const int32_t* cu_seqlens_k;  // null: padded keys
  const int32_t* seqused_q;     // null: all rows are used
  const int32_t* seqused_k;
  device::TileScheduler scheduler;
  device::PackedRows rows_q;  // cu_seqlens is null: padded queries
  int seqlen_q, seqlen_k;     // padded lengths
  int batch, nheads, heads_per_kv;
  int top_left, window_left, window_right;
  float softmax_scale;
  float score_scale, score_scale_log2;  // of what the softmax sees: 1 when scores are modified
  float score_slack;                    // what a maximum may grow by and stay, as such a score
  device::ScoreOptions score_options;
};

}  // namespace flash_ext::fa3
