// The launchers that the instances define, for backend.cpp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "device/bwd_params.h"
#include "device/bwd_rows.h"
#include "device/fwd_params.h"

namespace flash_ext::fa2 {

// Returns cudaGetLastError's answer; the device is the current one.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kStages, bool kModified>
cudaError_t launch_fwd(const device::FwdParams& params, int64_t grid, cudaStream_t stream);

// The three kernels of a backward, one after the other; 0 tiles of keys: the row kernels alone.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kStages, int kDsStages,
          bool kModified>
cudaError_t launch_bwd(const device::BwdRowsParams& rows, const device::BwdParams& params,
                       int64_t grid, cudaStream_t stream);

}  // namespace flash_ext::fa2
