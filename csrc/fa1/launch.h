// The launchers that the instances define, for backend.cpp.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "device/bwd_cut.h"
#include "device/bwd_params.h"
#include "device/bwd_rows_params.h"
#include "device/fwd_params.h"

namespace flash_ext::fa1 {

// Returns cudaGetLastError's answer; the device is the current one.
template <int kHeadDim, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_fwd(const device::FwdParams& params, int64_t grid, cudaStream_t stream);

// The same for 7.0.
template <int kHeadDim, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_volta_fwd(const device::FwdParams& params, int64_t grid, cudaStream_t stream);

// How the backward for 7.5 cuts its work: at head_dim 256 there is no room for V.
template <int kHeadDim, int kBlockM, int kBlockN, bool kModified>
using TuringBwdCut = device::BwdCut<kHeadDim, kBlockM, kBlockN, 1, 1, kModified, (kHeadDim <= 192)>;

// The three kernels of a backward, one after the other; 0 tiles of keys: the row kernels alone.
template <int kHeadDim, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_bwd(const device::BwdRowsParams& rows, const device::BwdParams& params,
                       int64_t grid, cudaStream_t stream);

// The same for 7.0.
template <int kHeadDim, int kBlockM, int kBlockN, bool kModified>
cudaError_t launch_volta_bwd(const device::BwdRowsParams& rows, const device::BwdParams& params,
                             int64_t grid, cudaStream_t stream);

}  // namespace flash_ext::fa1
