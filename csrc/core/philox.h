// Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) and
// the place of every attention score in its output. One call draws the 16 random bits of 8 scores:
// a thread's share of a 16 x 16 block (rows i, columns j, from the start of the sequence) in the
// fragment layout of mma.m16n8k16. So every backend and every tile drops the same scores.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flash_ext {

constexpr int kPhiloxBlock = 16;  // a block is 16 rows x 16 columns
constexpr int kPhiloxSlots = 32;  // calls for one block

struct PhiloxWords {
  uint32_t word[4];
};

// The upper half of a product. On a GPU not from 64 bits: the compiler would add zeros to it.
FLASH_EXT_HOST_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
#endif
}

FLASH_EXT_HOST_DEVICE PhiloxWords philox4x32_7(uint64_t key, PhiloxWords counter) {
  uint32_t key_0 = static_cast<uint32_t>(key), key_1 = static_cast<uint32_t>(key >> 32);
  uint32_t x = counter.word[0], y = counter.word[1], z = counter.word[2], w = counter.word[3];
  for (int round = 0; round < 7; ++round) {
    constexpr uint32_t kFactor0 = 0xD2511F53, kFactor1 = 0xCD9E8D57;
    const uint32_t high_0 = multiply_high(kFactor0, x), low_0 = kFactor0 * x;
    const uint32_t high_1 = multiply_high(kFactor1, z), low_1 = kFactor1 * z;
    x = high_1 ^ y ^ key_0, y = low_1;
    z = high_0 ^ w ^ key_1, w = low_0;
    key_0 += 0x9E3779B9;
    key_1 += 0xBB67AE85;
  }
  return {{x, y, z, w}};
}

// The counter of slot s of the block that holds score (i, j); head counts through the batch.
FLASH_EXT_HOST_DEVICE PhiloxWords philox_counter(int64_t i, int64_t j, int slot, int64_t head,
                                                 int64_t offset) {
  return {{static_cast<uint32_t>(kPhiloxSlots * (j / kPhiloxBlock) + slot),
           static_cast<uint32_t>(i / kPhiloxBlock), static_cast<uint32_t>(head),
           static_cast<uint32_t>(offset)}};
}

// Where the two halves of a slot's word lie in the block: the low 16 bits at this row and column,
// the high ones in the next column.
FLASH_EXT_HOST_DEVICE constexpr int philox_row(int slot, int word) {
  return slot / 4 + 8 * (word % 2);
}
FLASH_EXT_HOST_DEVICE constexpr int philox_column(int slot, int word) {
  return 2 * (slot % 4) + 8 * (word / 2);
}

}  // namespace flash_ext
