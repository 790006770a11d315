// The race test of a pipeline: built with -DFLASH_EXT_JITTER, every wait and barrier first spins
// for a pseudo-random time, so that an order which only usually holds stops holding.
#pragma once

#include <cstdint>

namespace flash_ext::device {

__device__ __forceinline__ void jitter() {
#ifdef FLASH_EXT_JITTER
  const uint32_t start = static_cast<uint32_t>(clock64());
  uint32_t hash =
      (start ^ (threadIdx.x / 32 * 0x9E3779B9u) ^ (blockIdx.x * 0x85EBCA6Bu)) * 0xC2B2AE35u;
  hash ^= hash >> 15;
  if (hash & 3) return;  // one warp in four is late
  const uint32_t cycles = (hash >> 8) % 2000;
  while (static_cast<uint32_t>(clock64()) - start < cycles) {
  }
#endif
}

}  // namespace flash_ext::device
