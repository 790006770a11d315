// What the host tells the backward's main kernel: the Problem, made ready for the device.
#pragma once

#include "core/problem.h"
#include "device/row_tile.cuh"
#include "device/score_options.h"

namespace flash_ext::device {

struct BwdParams {
  const void* q;     // (batch, seqlen_q, nheads, head_dim) or (total_q, nheads, head_dim)
  const void* k;     // (batch, seqlen_k, nheads_k, head_dim) or packed
  const void* v;     // (batch, seqlen_k, nheads_k, head_dim_v) or packed
  const void* dout;  // (batch, seqlen_q, nheads, head_dim_v) or packed
  void* dk;          // shape of k
  void* dv;          // shape of v
  Strides q_stride, k_stride, v_stride, dout_stride, dk_stride, dv_stride;  // elements
  // By tiles of kBlockM queries of a head, as prepare makes them (device/bwd_rows.h).
  const float* lse_log2;  // (tiles, kBlockM): +inf in rows where P = 0
  const float* delta;     // (tiles, kBlockM)
  float* dq_sum;          // (tiles, kBlockM * kDqColumns) in the order of dq_index
  // Deterministic only, else null; cleared by prepare.
  uint32_t* next_tile;  // the number of the next tile of keys to be worked on
  uint32_t* dq_turns;   // (tiles): how many blocks of keys have added to this tile's dQ
  Rows query_rows, key_rows;
  TileScheduler query_tiles;  // of kBlockM queries of a head
  TileScheduler key_tiles;    // of kBlockN keys of a key head
  ScoreOptions score_options;
  int nheads, heads_per_kv;
  int head_dim, head_dim_v;
  int top_left, window_left, window_right;
  float softmax_scale, softmax_scale_log2;
};

}  // namespace flash_ext::device
