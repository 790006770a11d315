// The launchers that the instances define, for backend.cpp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "fa3/bwd_params.h"
#include "fa3/fwd_params.h"

namespace flash_ext::fa3 {

// Returns cudaGetLastError's answer; the device is the current one.
template <typename Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kStages,
          int kQStages, bool kModified>
cudaError_t launch_fwd(const FwdParams& params, int64_t grid, cudaStream_t stream);

// All kernels of the backward; grid is the main kernel's.
template <typename Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_bwd(const BwdParams& params, int64_t grid, cudaStream_t stream);
template <typename Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_bwd_wide(const BwdParams& params, int64_t grid, cudaStream_t stream);

}  // namespace flash_ext::fa3
