// Which lanes of a warp hold which part of an accumulator tile of 16 rows and 8 columns a register
// quadruple: a lane has rows g and g + 8, columns 2 t and 2 t + 1. An instruction has its own g and
// t of a lane; nothing else is different between them.
#pragma once

#include "core/host_device.h"

namespace flash_ext::device {

// mma.sync m16n8 and WGMMA.
struct MmaLanes {
  FLASH_EXT_HOST_DEVICE static constexpr int row(int lane) { return lane / 4; }          // g
  FLASH_EXT_HOST_DEVICE static constexpr int column_pair(int lane) { return lane % 4; }  // t
  // XORed with a lane's number, these change one bit of t, or of g.
  static constexpr int kNextPair = 1, kNextTwoPairs = 2, kNextRow = 4;
};

}  // namespace flash_ext::device
