// What the row kernels of a backward get, and where they keep things between the kernels.
//
// The backward is three kernels: prepare (delta, lse, perhaps an empty dQ), the main kernel (dK,
// dV, and dQ as float32 sums), finish (dQ as the user's type). What lies between them is laid out
// by tiles of kBlockM queries of one head, so that the main kernel loads and adds whole tiles
// without a guard.
#pragma once

#include "core/problem.h"
#include "device/row_tile.cuh"

namespace flash_ext::device {

struct BwdRowsParams {
  Rows q;
  TileScheduler tiles;  // of kBlockM queries
  const void* out;      // T (batch, seqlen_q, nheads, head_dim_v) or packed
  const void* dout;     // the same, any strides
  void* dq;             // T (batch, seqlen_q, nheads, head_dim) or packed
  Strides out_stride, dout_stride, dq_stride;
  const float* lse;    // (batch, nheads, seqlen_q) or (nheads, total_q)
  const float* d_lse;  // the same or null
  const float* sinks;  // (nheads) or null
  float* d_sink;       // (nheads)
  int batch, head_dim, head_dim_v;
  float softmax_scale;
  // Workspace, all by tiles.
  float* lse_log2;      // (tiles, kBlockM): lse * log2(e), +inf in rows where P = 0
  float* delta;         // (tiles, kBlockM): rowsum(dO O) - d_lse, 0 in such rows
  float* dq_sum;        // (tiles, kBlockM * bucket) in the order of dq_index
  float* d_sink_parts;  // (tiles) or null
  void* dout_copy;      // T, contiguous, or null: dO is read where it is
  Strides copy_stride;
  uint32_t* turns;     // (tiles): 0 where dq_sum was never written; null: prepare clears it
  uint32_t* counters;  // cleared by prepare: num_counters of them
  int64_t num_counters;
};

// Where an element of a tile's dQ lies: slabs of 64 columns, in them 16-row blocks, in them 8
// columns, each as an accumulator has it: lane 4 * (row % 8) + column % 8 / 2 holds columns
// {0, 1} of row % 16 < 8 as values 0 and 1, of the other rows as 2 and 3. kVector: a lane's four
// values lie together (one 16-byte access), else a value's 32 lanes do (for scalar atomics).
template <int kBlockM, bool kVector>
FLASH_EXT_HOST_DEVICE int dq_index(int slab, int row_block, int j, int lane, int value) {
  const int fragment = (slab * (kBlockM / 16) + row_block) * 8 + j;
  return fragment * 128 + (kVector ? lane * 4 + value : value * 32 + lane);
}

}  // namespace flash_ext::device
