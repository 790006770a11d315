// The border of a backend: one C table of plain data behind one exported symbol.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "core/status.h"
#include "core/tensors.h"

#define FLASH_EXT_EXPORT extern "C" __attribute__((visibility("default")))

namespace flash_ext {

constexpr uint32_t kAbiVersion = 1;

// Runs body(begin, end, context) over [begin, end) on the caller's thread pool and waits.
using ParallelBody = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, ParallelBody body,
                             void* context);

struct Call {
  void* stream;     // cudaStream_t; null on the CPU
  void* workspace;  // Plan::workspace_bytes, 256-byte aligned, never cleared
  uint64_t workspace_bytes;
  ParallelFor parallel_for;  // CPU only; Device::sm_count says how many threads
};

struct Backend {
  uint32_t abi_version;
  uint32_t problem_bytes, plan_bytes, fwd_bytes, bwd_bytes,
      call_bytes;     // sizeof, held against the loader's
  const char* name;   // "cpu", "fa1", "fa2", "fa3"
  const char* build;  // compiler, instruction set or archs, commit
  Status (*why_not)(
      const Problem*);  // pure, works without a GPU: ok, or why this problem cannot run here
  Status (*plan)(const Problem*, Plan*);  // pure: exactly what fwd / bwd will do
  Status (*fwd)(const Problem*, const FwdTensors*, const Call*);
  Status (*bwd)(const Problem*, const BwdTensors*, const Call*);
  Status (*alloc)(const Device*, uint64_t bytes, void* stream,
                  void** out);  // for the door without torch
  Status (*free)(const Device*, void* data, void* stream);
};

using GetBackend = const Backend* (*)();
constexpr const char* kBackendSymbol = "flash_ext_backend";

}  // namespace flash_ext
