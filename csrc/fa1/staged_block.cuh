// How K and V get to shared memory on cards without cp.async: through registers, a block ahead.
#pragma once

#include "device/matrix_rows.cuh"
#include "device/ptx.cuh"

namespace flash_ext::fa1 {

using namespace device;

// This thread's part of a block of kBlockN rows, on its way: asked for with load, and put where it
// belongs with store, when it has come and its place is free.
//
// Traits: kThreads, kBlockN, kHeadDim, kChunks (of 16 bytes in a row), kRowBytes.
template <typename Traits>
class StagedRows {
 public:
  __device__ __forceinline__ void load(const MatrixRows& rows, int first_row) {
    const uint32_t thread = fresh_thread_index(), row = thread / kAcross, chunk = thread % kAcross;
    const uint32_t from = first_row + row;
    const char* source = rows.first + chunk * 16u + uint64_t{from} * rows.stride;
    auto load_all = [&](auto keep) {
#pragma unroll
      for (int r = 0; r < kPasses; ++r) {
#pragma unroll
        for (int c = 0; c < kChunkCount; ++c) {
          uint4& held = held_[r * kChunkCount + c];
          held = make_uint4(0, 0, 0, 0);
          if (keep(r, c)) held = ld_global_16(source + c * kAcross * 16);
        }
        source += kRowsPerPass * rows.stride;
      }
    };
    // A block that is there whole, as nearly all are, needs no comparisons.
    if (first_row + Traits::kBlockN <= rows.end && rows.dim == Traits::kHeadDim) {
      load_all([](int, int) { return true; });
    } else {
      const int end = rows.end - from, dim = rows.dim / 8 - chunk;
      load_all([&](int r, int c) { return c * kAcross < dim && r * kRowsPerPass < end; });
    }
  }

  __device__ __forceinline__ void store(uint32_t smem) const {
    const uint32_t thread = fresh_thread_index();
    smem += Swizzle<Traits>::offset(thread / kAcross, thread % kAcross);
#pragma unroll
    for (int r = 0; r < kPasses; ++r) {
#pragma unroll
      for (int c = 0; c < kChunkCount; ++c) {
        st_shared_16(smem + r * kRowsPerPass * Traits::kRowBytes + c * kAcross * 16,
                     held_[r * kChunkCount + c]);
      }
    }
  }

 private:
  // So many threads share a row (each row costs a thread a 64-bit addition): as few as make passes
  // over the block whole.
  static constexpr int threads_of_a_row() {
    int across = Swizzle<Traits>::kGroup;
    while (Traits::kBlockN % (Traits::kThreads / across)) across *= 2;
    return across;
  }
  static constexpr int kAcross = threads_of_a_row();
  static constexpr int kRowsPerPass = Traits::kThreads / kAcross;
  static constexpr int kPasses = Traits::kBlockN / kRowsPerPass;
  static constexpr int kChunkCount = Traits::kChunks / kAcross;
  static_assert(kRowsPerPass % 8 == 0, "the swizzle of a thread is the same in every pass");
  static_assert(Traits::kBlockN % kRowsPerPass == 0, "whole passes");
  static_assert(Traits::kChunks % kAcross == 0, "whole rows");

  uint4 held_[kPasses * kChunkCount];
};

}  // namespace flash_ext::fa1
