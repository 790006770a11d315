// What core knows about devices, asked of the driver (libcuda.so.1) without linking it.
#pragma once

#include <string>
#include <vector>

#include "core/problem.h"

namespace flash_ext {

struct Driver {
  int version = 0;      // 13000 for CUDA 13.0; 0: none
  std::string problem;  // why there is none, one sentence; empty when there is one
  struct Gpu {
    Device device;
    std::string name;
  };
  std::vector<Gpu> gpus;
};

// Loads the driver on the first call.
const Driver& cuda_driver();

// The CPU as a device: sm_count is the number of threads to use.
Device cpu_device(int threads);

// Throws when the driver or the GPU is missing.
Device cuda_device(int ordinal);

// A device by name: "cpu", "cuda", "cuda:1", or "sm_90" for a typical card that need not be here.
Device device_by_name(const std::string& name, int cpu_threads);

}  // namespace flash_ext
