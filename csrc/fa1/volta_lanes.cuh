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

// Q lies like K and V, but rows r and r + 8 too are apart: a lane's neighbour but one reads it.
template <typename Traits>
struct QuerySwizzle {
  static constexpr int kGroup = Swizzle<Traits>::kGroup;
  FLASH_EXT_HOST_DEVICE static uint32_t offset(int row, int chunk) {
    return Swizzle<Traits>::offset(row, chunk ^ (row / 8 % 2 * (kGroup == 8 ? 2 : 1)));
  }
};

// Where a lane finds its operands, in bytes from the tile's begin; Swizzle::step moves chunks on,
// an immediate 16 rows. All reads are of 16 bytes a lane, and the eight lanes that are served
// together meet eight different groups of banks.
template <typename Traits>
struct VoltaAddress {
  FLASH_EXT_HOST_DEVICE static uint32_t q(int lane) {
    return QuerySwizzle<Traits>::offset(VoltaLanes::a_row(lane), 0);
  }
  FLASH_EXT_HOST_DEVICE static uint32_t k(int lane) {
    return Swizzle<Traits>::offset(VoltaLanes::b_column(lane), 0);
  }
  // Of the keys of this lane's half of the columns of P, and of the others.
  FLASH_EXT_HOST_DEVICE static uint32_t v(int lane, bool other) {
    return Swizzle<Traits>::offset(VoltaLanes::b_row(lane) ^ (other ? 4 : 0),
                                   VoltaLanes::b_chunk(lane));
  }
};

}  // namespace flash_ext::fa1
