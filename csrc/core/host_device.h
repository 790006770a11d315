// Marks the functions that the CPU, the host side and the kernels share.
#pragma once

#ifdef __CUDACC__
#define FLASH_EXT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_EXT_HOST_DEVICE inline
#endif
