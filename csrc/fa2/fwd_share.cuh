// What two warps trade that share 32 queries (FwdCut::kSharers), through shared memory: whether a
// score has passed a reference, the maxima then, P, and sums at the end.
#pragma once

#include "device/mbarrier.cuh"
#include "device/warp_rows.cuh"

namespace flash_ext::fa2 {

using namespace device;

template <typename Traits>
struct Pair {
  static constexpr int kThreads = 32 * Traits::kSharers;
  uint32_t smem;  // the kernel's

  __device__ __forceinline__ void barrier() const {
    named_barrier_sync(1 + Place<Traits>().group, kThreads);
  }
  __device__ __forceinline__ bool any(bool vote) const {
    return named_barrier_any(1 + Place<Traits>().group, kThreads, vote);
  }

  // As Alone's. A barrier of both; between two calls for the same rows there must be another one.
  template <typename Combine>
  __device__ __forceinline__ void combine(int m, float (&values)[2], Combine combine) const {
    const Place<Traits> place;
    const int row = place.first_row() + 16 * m + place.lane / 4, other = 1 - place.sharer;
    const uint32_t to = smem + Traits::kRowValues + 4 * (Traits::kBlockM * place.sharer + row),
                   from = smem + Traits::kRowValues + 4 * (Traits::kBlockM * other + row);
#pragma unroll
    for (int half = 0; half < 2; ++half) st_shared(to + 32 * half, __float_as_uint(values[half]));
    barrier();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      values[half] = combine(values[half], ld_shared_float(from + 32 * half));
  }

  // P goes as it lies in registers: a fragment is read by the lane with the same place in the other
  // warp. `sharer`: whose P.
  __device__ __forceinline__ uint32_t p_address(int sharer) const {
    const Place<Traits> place;
    const int warp = place.group * Traits::kSharers + sharer;
    return smem + Traits::kP + warp * (Traits::kWarpRows * Traits::kWarpN * 2) + place.lane * 16;
  }
  // The address of the fragment of 16 rows m and the k-th 16 keys, from p_address.
  static __device__ __forceinline__ uint32_t fragment(uint32_t p, int k, int m) {
    return p + (k * Traits::kMTiles + m) * 512;
  }
};

}  // namespace flash_ext::fa2
