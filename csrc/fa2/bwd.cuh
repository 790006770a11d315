// The backward for 8.0 and newer: device/mma_bwd.cuh on m16n8k16 and cp.async.
#pragma once

#include "device/mma.cuh"
#include "device/mma_bwd.cuh"
#include "fa2/bwd_load.cuh"
#include "fa2/launch.h"

namespace flash_ext::fa2 {

struct Ampere {
  template <typename Traits>
  using Loads = AsyncLoads<Traits>;

  template <typename Element>
  static __device__ __forceinline__ void mma(float* c, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    mma_16x8x16<Element>(c, a, b0, b1);
  }
};

template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kStages, int kDsStages,
          bool kModified>
cudaError_t launch_bwd(const BwdRowsParams& rows, const BwdParams& params, int64_t grid,
                       cudaStream_t stream) {
  using Cut = BwdCut<kHeadDim, kBlockM, kBlockN, kStages, kDsStages, kModified>;
  return launch_backward<BwdTraits<Element, Cut, Ampere>>(rows, params, grid, stream);
}

}  // namespace flash_ext::fa2

#define INSTANCE(header, ...)                                                               \
  namespace flash_ext::fa2 {                                                                \
  template cudaError_t launch_##header<__VA_ARGS__>(const BwdRowsParams&, const BwdParams&, \
                                                    int64_t, cudaStream_t);                 \
  }
