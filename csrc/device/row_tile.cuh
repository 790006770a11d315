// A block of rows of one sequence, of queries or of keys, found from a tile number on the device.
#pragma once

#include "device/tile_scheduler.cuh"

namespace flash_ext::device {

// Rows of a padded or packed tensor, and which of them count.
struct Rows {
  PackedRows packed;       // cu_seqlens is null: padded
  const int32_t* seqused;  // (batch) or null: all
  int seqlen;              // padded length
  int heads;
};

struct RowTile {
  int sequence;  // -1: rows outside every sequence, which are only zeroed
  int head, block;
  int64_t slot;       // the tile's place in workspace that is laid out by tiles
  int64_t first_row;  // the sequence's first row: 0 when padded
  int batch;          // coordinate in a padded tensor: 0 when packed
  int rows, used;     // of the sequence: rows to write, and those that are not 0 by rule
};

// Where sequence `sequence` has its first block among the tiles of one head.
template <int kBlock>
FLASH_EXT_HOST_DEVICE int64_t first_slot_of(const Rows& rows, const TileScheduler& scheduler,
                                            int sequence, int head) {
  const int lane = rows.packed.cu_seqlens ? head : sequence * rows.heads + head;
  const int64_t first =
      rows.packed.cu_seqlens ? rows.packed.template first_slot<kBlock>(sequence + 1) : 0;
  return int64_t{lane} * scheduler.m_slots + first;
}

FLASH_EXT_HOST_DEVICE int64_t first_row_of(const Rows& rows, int sequence) {
  return rows.packed.cu_seqlens ? rows.packed.cu_seqlens[sequence] : 0;
}

// Rows of a sequence, and among them those that count.
FLASH_EXT_HOST_DEVICE int rows_of(const Rows& rows, int sequence) {
  const int32_t* cu = rows.packed.cu_seqlens;
  return cu ? cu[sequence + 1] - cu[sequence] : rows.seqlen;
}
FLASH_EXT_HOST_DEVICE int used_of(const Rows& rows, int sequence) {
  const int all = rows_of(rows, sequence);
  return rows.seqused && rows.seqused[sequence] < all ? rows.seqused[sequence] : all;
}

// A packed tile may have no row: block * kBlock >= rows.
template <int kBlock>
FLASH_EXT_HOST_DEVICE RowTile find_row_tile(const Rows& rows, const TileScheduler& scheduler,
                                            int64_t tile) {
  RowTile found{};
  int lane, slot;
  scheduler.decode(tile, &lane, &slot);
  found.slot = int64_t{lane} * scheduler.m_slots + slot;
  found.block = slot;
  if (!rows.packed.cu_seqlens) {
    found.sequence = found.batch = lane / rows.heads;
    found.head = lane % rows.heads;
    found.rows = rows.seqlen;
  } else {
    const int s = rows.packed.template sequence_of<kBlock>(slot);
    found.sequence = s == 0 || s == rows.packed.batch + 1 ? -1 : s - 1;
    found.head = lane;
    found.block -= static_cast<int>(rows.packed.template first_slot<kBlock>(s));
    found.first_row = rows.packed.start(s);
    found.rows = static_cast<int>(rows.packed.start(s + 1) - found.first_row);
  }
  found.used = found.sequence < 0 ? 0 : used_of(rows, found.sequence);
  return found;
}

}  // namespace flash_ext::device
