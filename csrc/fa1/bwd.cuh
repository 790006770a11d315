// The backward for 7.5: device/mma_bwd.cuh on m16n8k8, with loads through registers.
#pragma once

#include "device/mma.cuh"
#include "device/mma_bwd.cuh"
#include "fa1/bwd_load.cuh"
#include "fa1/launch.h"

namespace flash_ext::fa1 {

struct Turing {
  template <typename Traits>
  using Loads = StagedLoads<Traits>;

  template <typename Element>
  static __device__ __forceinline__ void mma(float* c, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    mma_16x8x8(c, a[0], a[1], b0, c);
    mma_16x8x8(c, a[2], a[3], b1, c);
  }
};

template <int kHeadDim, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_bwd(const BwdRowsParams& rows, const BwdParams& params, int64_t grid,
                       cudaStream_t stream) {
  using Cut = TuringBwdCut<kHeadDim, kBlockM, kBlockN, kModified>;
  static_assert(Cut::kSmemBytes + 1024 <= 64 * 1024, "what an SM of 7.5 has");
  return launch_backward<BwdTraits<__half, Cut, Turing>>(rows, params, grid, stream);
}

}  // namespace flash_ext::fa1

#define INSTANCE(header, ...)                                                               \
  namespace flash_ext::fa1 {                                                                \
  template cudaError_t launch_##header<__VA_ARGS__>(const BwdRowsParams&, const BwdParams&, \
                                                    int64_t, cudaStream_t);                 \
  }
