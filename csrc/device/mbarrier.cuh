// mbarriers, named barriers, and the position in a ring of buffers. Every wait and arrive of a
// pipeline goes through here, so the jitter build delays them all.
#pragma once

#include <cstdint>

#include "device/jitter.cuh"
#include "device/ptx.cuh"

namespace flash_ext::device {

// The buffer that the count-th use of a ring of kStages buffers takes, and the parity that its
// barriers complete then. One counter is one register.
template <int kStages>
struct RingPosition {
  static_assert((kStages & (kStages - 1)) == 0, "a ring has a power of two of buffers");
  uint32_t stage, phase;

  __device__ __forceinline__ explicit RingPosition(uint32_t count)
      : stage(count % kStages), phase(count / kStages & 1) {}
};

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the async proxy (TMA) too.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  jitter();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A consumer is done with a buffer. One arrival a warp: the MMAs of a warp group complete warp by
// warp.
__device__ __forceinline__ void release(uint64_t& barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&barrier));
}

// One arrival that also announces bytes still to come by TMA.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  jitter();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is complete. A fresh barrier passes a wait for parity 1.
// kSleep: after how many nanoseconds to look again at least; 0: when the hardware thinks fit.
template <int kSleep = 0>
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  jitter();
  if constexpr (kSleep == 0) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}\n" ::"r"(barrier),
        "r"(parity), "n"(kSleep)
        : "memory");
  }
}

// Named barrier `id` of `threads` threads, those that sync and those that only arrive counted.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  jitter();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and whether `vote` is true in any of the threads.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool vote) {
  jitter();
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.u32 in, %1, 0;\n"
      "bar.red.or.pred out, %2, %3, in;\n"
      "selp.u32 %0, 1, 0, out;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(vote)), "r"(id), "r"(threads)
      : "memory");
  return any;
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  jitter();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Turns between CTAs, counted in global memory. Each fences what it orders: additions by bulk
// copies (complete, in the thread that calls).
__device__ __forceinline__ void wait_for_turn(const uint32_t* counter, uint32_t turn) {
  jitter();
  uint32_t now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now < turn);
  asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void pass_turn(uint32_t* counter) {
  jitter();
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

template <uint32_t kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <uint32_t kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace flash_ext::device
