// Tile copies by the tensor memory accelerator, through maps made by tensor_map.h: what lies past a
// sequence's end arrives as zeros and is not written.
#pragma once

#include <cstdint>

#include "device/tensor_map.h"

namespace flash_ext::device {

// L2 policies, as createpolicy makes them: Q is read once, K and V by every block of queries.
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictLast = 0x14F0000000000000;

struct TmaCoordinates {
  int row, end, head;
};

// Row `row` of the sequence that has `length` rows from row `start` of its batch on.
__device__ __forceinline__ TmaCoordinates tma_at(const TensorMap& map, int batch, int64_t start,
                                                 int length, int row, int head) {
  return {kMapRows - length + row, static_cast<int>(start) + batch * map.batch_rows + length,
          head + batch * map.batch_heads};
}

__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map.map) : "memory");
}

// Global to shared, a box from column `column` on; the bytes arrive at the mbarrier.
__device__ __forceinline__ void tma_load(uint32_t smem, const TensorMap& map, uint32_t barrier,
                                         const TmaCoordinates& at, int column,
                                         uint64_t cache_hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
      "l"(&map.map), "r"(barrier), "r"(column), "r"(at.row), "r"(at.end), "r"(kMapRows),
      "r"(at.head), "l"(cache_hint)
      : "memory");
}

// Shared to global.
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32_t smem,
                                          const TmaCoordinates& at, int column) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(&map.map),
      "r"(smem), "r"(column), "r"(at.row), "r"(at.end), "r"(kMapRows), "r"(at.head)
      : "memory");
}

// Contiguous bytes, global to shared; a multiple of 16, which arrive at the mbarrier.
__device__ __forceinline__ void bulk_load(uint32_t smem, const void* gmem, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(gmem), "r"(bytes), "r"(barrier)
      : "memory");
}

// Contiguous bytes, shared to global.
__device__ __forceinline__ void bulk_store(void* gmem, uint32_t smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem), "r"(smem),
               "r"(bytes)
               : "memory");
}

// Adds float32 values in shared memory to contiguous ones in global memory, in L2.
__device__ __forceinline__ void bulk_add(float* gmem, uint32_t smem, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, "
      "%3;" ::"l"(gmem),
      "r"(smem), "r"(bytes), "l"(kEvictLast)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;"); }

// Waits until the stores of this thread have read their shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until the stores and additions of this thread are complete.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders shared-memory writes, this thread's and those of others that it has waited for, before
// later reads by TMA or WGMMA. PTX says that its effect composes with other synchronization; Lustig
// et al., 2022, "Mixed-Proxy Extensions for the NVIDIA PTX Memory Consistency Model", for older
// proxies: it stands between the two accesses, in the CTA of the one that is not generic.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flash_ext::device
