// What the host tells the backward kernels: the Problem, made ready for the device. A kernel
// parameter, tensor maps included, so that a captured graph holds it.
#pragma once

#include <cstdint>

#include "device/bwd_rows.h"
#include "device/score_options.h"
#include "device/tensor_map.h"

namespace flash_ext::fa3 {

// Shared memory starts with the barriers; swizzled tiles are aligned to 1024 bytes.
constexpr int kBwdBarrierBytes = 1024;

// Shared memory of an instance: K, V, and two stages of Q, dO, dS, dQ, lse and delta.
// Tiles are slabs of 64 columns.
constexpr int slab_columns(int head_dim) { return (head_dim + 63) / 64 * 64; }
constexpr int bwd_smem_bytes(int head_dim, int head_dim_v, int block_m, int block_n) {
  const int dq = slab_columns(head_dim), both = 2 * (dq + slab_columns(head_dim_v));
  return kBwdBarrierBytes + block_n * both +
         2 * (block_m * both + block_m * block_n * 2 + block_m * dq * 4 + 2 * block_m * 4);
}

// The same for head dimensions above 128: P beside dS, one stage of each; a second one of dO where
// there is room. Of the eight eights of columns of a slab of dQ so many pass through shared memory.
constexpr int bwd_wide_do_stages(int head_dim) { return head_dim == 256 ? 1 : 2; }
constexpr int bwd_wide_consumers(int head_dim) { return head_dim == 256 ? 2 : 3; }
constexpr int bwd_wide_staged(int head_dim, int head_dim_v) {
  return head_dim == 256 ? 7 : head_dim_v == 128 ? 8 : 5;
}
constexpr int bwd_wide_smem_bytes(int head_dim, int head_dim_v, int block_m, int block_n) {
  const int do_stages = bwd_wide_do_stages(head_dim),
            staged = bwd_wide_consumers(head_dim) * bwd_wide_staged(head_dim, head_dim_v);
  return kBwdBarrierBytes + 2 * block_n * (head_dim + head_dim_v) +
         2 * block_m * (2 * head_dim + do_stages * head_dim_v) + 2 * 2 * block_m * block_n +
         staged * block_m * 8 * 4 + (2 + do_stages) * block_m * 4;
}

// How many vectors of four the consumers hold of dK and dV of a tile. Above 128 columns the warp
// groups have room for as many slabs of dV each, though not all may own one.
constexpr int bwd_part_vectors(int head_dim, int head_dim_v, int, int block_n) {
  return block_n * (head_dim + head_dim_v) / 4;
}
constexpr int bwd_wide_part_vectors(int head_dim, int head_dim_v, int, int block_n) {
  const int columns = 64 * bwd_wide_consumers(head_dim);
  return block_n * (head_dim + (head_dim_v + columns - 1) / columns * columns) / 4;
}

// What CTAs take: tiles of keys, of which those from `whole` on are cut into parts.
struct SplitTiles {
  uint32_t whole, num_items;
  int parts, blocks;  // `parts` items a tile; a part has `blocks` blocks of queries at most
  // Of each such tile, parts - 1 times:
  float* sums;      // dK and dV as the consumers hold them
  uint32_t* ready;  // how many warps have left theirs
};

struct BwdParams {
  device::TensorMap q, dout;  // boxes of 64 columns and kBlockM rows
  device::TensorMap k, v;     // kBlockN rows
  device::TensorMap dk, dv;   // kBlockN rows; bwd_wide.cuh writes through them,
  void *dk_rows, *dv_rows;    // bwd.cuh from registers
  Strides dk_stride, dv_stride;
  device::BwdRowsParams rows;
  device::Rows keys;
  device::TileScheduler scheduler;  // of blocks of keys
  SplitTiles split;                 // what CTAs take: see bwd_parts.cuh
  uint32_t* next_item;              // counter of those taken
  uint32_t* turns;  // (tiles of queries): blocks of keys that have added to dQ; or null
  device::ScoreOptions score_options;
  int nheads, heads_per_kv;
  int deterministic, top_left, window_left, window_right;
  float softmax_scale, softmax_scale_log2;
};

}  // namespace flash_ext::fa3
