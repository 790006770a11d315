// How the backward's operands get to shared memory without cp.async: through registers.
#pragma once

#include "device/mma_bwd_work.cuh"
#include "fa1/staged_block.cuh"

namespace flash_ext::fa1 {

using namespace device;

// A block of queries waits in registers between `queries` and `wait`: while dQ of the block before
// it is multiplied, when dK and dV alone need registers too.
template <typename Traits>
class StagedLoads {
 public:
  __device__ __forceinline__ StagedLoads() : asked_(false) {}

  static __device__ __forceinline__ void keys(uint32_t smem, const BwdParams& params,
                                              const BwdWork& work) {
    const RowTile& keys = work.keys;
    StagedRows<Block<Traits::kBlockN>> rows;
    auto copy = [&](uint32_t to, const void* tensor, const Strides& stride, int dim) {
      rows.load(matrix_rows<__half>(tensor, stride, keys.batch, keys.first_row, keys.head,
                                    keys.used, dim),
                keys.block * Traits::kBlockN);
      rows.store(to);
    };
    copy(smem, params.k, params.k_stride, params.head_dim);
    copy(smem + Traits::kV, params.v, params.v_stride, params.head_dim_v);
  }

  // Asks for Q, dO, lse and delta of a block of queries, if there is one.
  __device__ __forceinline__ void queries(uint32_t, const BwdParams& params, const BwdWork& work,
                                          Cursor at) {
    if (at.head >= params.heads_per_kv) return;
    asked_ = true;
    const int head = work.keys.head * params.heads_per_kv + at.head;
    const int first = at.m * Traits::kBlockM;
    q_.load(matrix_rows<__half>(params.q, params.q_stride, work.batch_q, work.q_row, head,
                                work.used_q, params.head_dim),
            first);
    dout_.load(matrix_rows<__half>(params.dout, params.dout_stride, work.batch_q, work.q_row, head,
                                   work.used_q, params.head_dim_v),
               first);
    const uint32_t thread = fresh_thread_index();
    if (thread >= 2 * kValueThreads) return;
    const int64_t tile = work.first_tile + int64_t{at.head} * params.query_tiles.m_slots + at.m;
    const float* values = thread < kValueThreads ? params.lse_log2 : params.delta;
    row_values_ = ld_global_16(values + tile * Traits::kBlockM + thread % kValueThreads * 4);
  }

  // Puts what was asked for where it belongs.
  template <int kPending>
  __device__ __forceinline__ void wait(uint32_t stage) {
    static_assert(kPending == 0, "one block at a time");
    jitter();
    if (!asked_) return;
    q_.store(stage);
    dout_.store(stage + Traits::kQBytes);
    const uint32_t thread = fresh_thread_index();
    if (thread < 2 * kValueThreads)
      st_shared_16(stage + 2 * Traits::kQBytes + thread * 16, row_values_);
    asked_ = false;
  }

 private:
  // As StagedRows wants it.
  template <int kRows>
  struct Block {
    static constexpr int kThreads = Traits::kThreads, kBlockN = kRows;
    static constexpr int kHeadDim = Traits::kHeadDim, kRowBytes = 2 * kHeadDim;
    static constexpr int kChunks = kHeadDim / 8;
  };
  static constexpr int kValueThreads =
      Traits::kBlockM / 4;  // lse and delta lie one behind the other
  static_assert(2 * kValueThreads <= Traits::kThreads, "a thread has four values at most");

  StagedRows<Block<Traits::kBlockM>> q_, dout_;
  uint4 row_values_;
  bool asked_;
};

}  // namespace flash_ext::fa1
