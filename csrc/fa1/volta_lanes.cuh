// How the operands of Volta's mma.sync m8n8k4 lie in a warp, and in shared memory.
//
// One instruction makes four products of 8 x 8 x 4, one in each quad-pair: lanes 4 p to 4 p + 3 and
// 16 + 4 p to 16 + 4 p + 3. Here the four are a square of 16 rows and 16 columns: bit 3 of a lane's
// number says which rows, bit 2 which columns. With l = lane % 4 and h = lane / 16 a lane holds, of
// its quad-pair's product,
//   A  row l + 4 h                 B  column l + 4 h, or row l of columns 4 h to 4 h + 3
//   C  c[i]: row l % 2 + 2 (i / 2 % 2) + 4 h, column l / 2 * 2 + i % 2 + 4 (i / 4)
// Which of the tile's rows and columns these are is for us to say. Called as VoltaLanes has them,
// the eight values of C are, one by one, what two neighbouring m16n8 tiles have: rows g and g + 8,
// columns 2 t + {0, 1} and 8 + 2 t + {0, 1}. So everything that works on such tiles works here.
#pragma once

#include "device/matrix_rows.cuh"

namespace flash_ext::fa1 {

using namespace device;

struct VoltaLanes {
  FLASH_EXT_HOST_DEVICE static constexpr int row(int lane) { return lane % 2 + lane / 8 * 2; }
  FLASH_EXT_HOST_DEVICE static constexpr int column_pair(int lane) { return lane / 2 % 4; }
  static constexpr int kNextPair = 2, kNextTwoPairs = 4, kNextRow = 1;

  // The row of A and the column of B of a 16 x 16 tile that a lane holds.
  FLASH_EXT_HOST_DEVICE static constexpr int a_row(int lane) {
    return row(lane) + lane / 2 % 2 * 8;
  }
  FLASH_EXT_HOST_DEVICE static constexpr int b_column(int lane) { return lane % 8 + lane / 16 * 8; }
  // Of B by rows: the row of every 8, and the chunk of every 4 chunks of 8 columns. A chunk is
  // columns 4 h to 4 h + 3 of two tiles.
  FLASH_EXT_HOST_DEVICE static constexpr int b_row(int lane) { return lane % 8; }
  FLASH_EXT_HOST_DEVICE static constexpr int b_chunk(int lane) {
    return lane / 4 % 2 + lane / 16 * 2;
  }
};

// Of an operand that is read as rows of A: a lane and its neighbour but one read rows r and r + 8,
// which are apart here too.
template <typename Traits>
struct RowsOfA {
  static constexpr int kGroup = Swizzle<Traits>::kGroup;

  FLASH_EXT_HOST_DEVICE static uint32_t offset(int row, int chunk) {
    return Swizzle<Traits>::offset(row, chunk ^ row / 8 % 2 * 2);
  }
  // The address `rows` rows (a multiple of 4) below one in rows 0 to 3.
  FLASH_EXT_HOST_DEVICE static constexpr uint32_t down(uint32_t address, int rows) {
    const int key = (kGroup == 8 ? rows % 8 : rows / 2 % 4) ^ rows / 8 % 2 * 2;
    return (address ^ key * 16) + rows * Traits::kRowBytes;
  }
};

// Where a lane finds its operands, in bytes from the tile's begin; Swizzle::step moves chunks on,
// an immediate 16 rows. Reads are of 16 bytes a lane, and the eight lanes that are served together
// meet eight different groups of banks.
template <typename Traits>
struct VoltaAddress {
  // A by rows.
  FLASH_EXT_HOST_DEVICE static uint32_t a(int lane) {
    return RowsOfA<Traits>::offset(VoltaLanes::a_row(lane), 0);
  }
  // B by columns, each a row of the tile: C's columns are these.
  FLASH_EXT_HOST_DEVICE static uint32_t b(int lane) {
    return Swizzle<Traits>::offset(VoltaLanes::b_column(lane), 0);
  }
  // B by rows, from a chunk (a multiple of 4) on: the rows that belong to A as relay makes it,
  // those of this lane's half of 8, or of the other half.
  FLASH_EXT_HOST_DEVICE static uint32_t b_rows(int lane, int chunk, bool other) {
    return Swizzle<Traits>::offset(VoltaLanes::b_row(lane) ^ (other ? 4 : 0),
                                   chunk + VoltaLanes::b_chunk(lane));
  }
  // Four rows of B, in a tile of RowsOfA: 8 bytes of a lane are 4 columns of one of them, such that
  // C's columns are 16 neighbours. chunk: even.
  FLASH_EXT_HOST_DEVICE static uint32_t four_rows(int lane, int chunk) {
    return RowsOfA<Traits>::offset(lane % 4, chunk + lane / 16) + lane / 4 % 2 * 8;
  }
  // The same for A by columns, of 16 rows of C which lie as store_columns puts them.
  FLASH_EXT_HOST_DEVICE static uint32_t four_columns(int lane, int chunk) {
    return RowsOfA<Traits>::offset(lane % 4, chunk + lane / 16) + lane / 8 % 2 * 8;
  }
};

}  // namespace flash_ext::fa1
