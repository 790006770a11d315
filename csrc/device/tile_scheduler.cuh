// Tile number -> (sequence, head, block of rows), for padded and packed queries alike, without a
// table: the lengths of packed sequences are known to the device only.
#pragma once

#include "device/visible.cuh"

namespace flash_ext::device {

struct Tile {
  int sequence, head, m_block;
};

// What the host fills in. 32 bits: a 64-bit division would take the producer of a kernel longer
// than a block of keys.
struct TileScheduler {
  int64_t num_tiles;         // m_slots * lanes, below 2^31
  uint32_t m_slots;          // blocks of rows of one head: of one sequence, or of all when packed
  uint32_t lanes;            // batch * nheads, or nheads when packed: things with m_slots each
  uint32_t lanes_per_group;  // neighbours in time: so many lanes share the L2, longest rows first
  uint32_t longest_first;    // 1: the last block of rows first (causal)

  FLASH_EXT_HOST_DEVICE void decode(uint32_t tile, int* lane, int* slot) const {
    const uint32_t group_tiles = lanes_per_group * m_slots, group = tile / group_tiles,
                   inside = tile - group * group_tiles, first = group * lanes_per_group,
                   left = lanes - first, size = left < lanes_per_group ? left : lanes_per_group,
                   row = inside / size;
    *lane = static_cast<int>(first + inside - row * size);
    *slot = static_cast<int>(longest_first ? m_slots - 1 - row : row);
  }
};

// Packed rows: sequence s owns rows [start(s), start(s + 1)). The rows before cu_seqlens[0] and
// after cu_seqlens[batch] are sequences 0 and batch + 1, so that somebody writes them too.
struct PackedRows {
  const int32_t* cu_seqlens;  // (batch + 1)
  int batch;
  int64_t total;

  FLASH_EXT_HOST_DEVICE int64_t start(int s) const {
    return s == 0 ? 0 : s == batch + 2 ? total : cu_seqlens[s - 1];
  }
  // Slots of a block of kBlockM rows: sequence s owns [start(s) / kBlockM + s, start(s + 1) /
  // kBlockM + s + 1), which is never fewer than its rows need: a slot without rows is left at once.
  template <int kBlockM>
  FLASH_EXT_HOST_DEVICE int64_t first_slot(int s) const {
    return start(s) / kBlockM + s;
  }
  template <int kBlockM>
  FLASH_EXT_HOST_DEVICE int sequence_of(int slot) const {
    int low = 0, high = batch + 2;  // first_slot(low) <= slot < first_slot(high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_slot<kBlockM>(middle) <= slot ? low : high) = middle;
    }
    return low;
  }
};

inline int64_t packed_slots(int64_t total, int batch, int block_m) {
  return total / block_m + batch + 2;
}

}  // namespace flash_ext::device
