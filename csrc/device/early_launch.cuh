// Kernels that are launched while the one before them in the stream still runs (programmatic
// dependent launch, Hopper and later): their beginning overlaps its end.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/jitter.cuh"

namespace flash_ext::device {

// A kernel launched early touches no global memory before this returns: then the other is complete,
// and what it wrote is visible.
__device__ __forceinline__ void wait_for_kernel_before() {
  jitter();
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// From here on the next kernel may be launched, as far as there is room for its blocks.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <typename Params>
cudaError_t launch_early(void (*kernel)(Params), int64_t grid, int threads, int smem_bytes,
                         cudaStream_t stream, const Params& params) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid)), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// Clears a counter for the kernel behind it. Unlike a memset it does not keep that one from
// starting early.
static __global__ void clear_kernel(uint32_t* counter) {
  let_next_kernel_start();
  wait_for_kernel_before();
  *counter = 0;
}

}  // namespace flash_ext::device
