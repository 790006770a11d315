// How the backward's operands get to shared memory without cp.async: through registers.
#pragma once

#include "device/mma_bwd_work.cuh"
#include "fa1/staged_block.cuh"

namespace flash_ext::fa1 {

using namespace device;

// A warp's 32 rows of V as an A operand, from global memory (or its first cache): where shared
// memory has no room for V.
template <typename Traits>
struct GmemRows {
  static constexpr int kUnroll = 4;  // more loads at once have no registers

  const BwdParams& params;
  const BwdWork& work;

  __device__ __forceinline__ void load(uint32_t (&a)[2][4], int d) const {
    const uint32_t thread = fresh_thread_index(), lane = thread % 32;
    const RowTile& keys = work.keys;
    const int first = keys.block * Traits::kBlockN + thread / 32 / Traits::kSharers * 32 + lane / 4;
    const int column = 16 * d + 2 * (lane % 4);
    const auto* v =
        head_rows<const __half*>(params.v, params.v_stride, keys.batch, keys.first_row, keys.head);
#pragma unroll
    for (int r = 0; r < 4; ++r) {  // rows g, g + 8, g + 16, g + 24
      const int row = first + 8 * r;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint32_t& pair = a[r / 2][r % 2 + 2 * c];
        pair = 0;
        if (row < keys.used && column + 8 * c < params.head_dim_v)
          pair = ld_global_4(v + row * params.v_stride.row + column + 8 * c);
      }
    }
  }
};

// A block of queries waits in registers between `queries` and `wait`: while dQ of the block before
// it is multiplied, when dK and dV alone need registers too. At head_dim 256 they need them all,
// and `wait` does everything.
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
    if constexpr (Traits::kVInSmem)
      copy(smem + Traits::kV, params.v, params.v_stride, params.head_dim_v);
  }

  // Asks for Q, dO, lse and delta of a block of queries, if there is one.
  __device__ __forceinline__ void queries(uint32_t, const BwdParams& params, const BwdWork& work,
                                          Cursor at) {
    if (at.head >= params.heads_per_kv) return;
    asked_ = true;
    at_ = at;
    if constexpr (kAhead) {
      q_.load(q_rows(params, work), at.m * Traits::kBlockM);
      dout_.load(dout_rows(params, work), at.m * Traits::kBlockM);
      load_row_values(params, work);
    }
  }

  static __device__ __forceinline__ auto values(uint32_t address, const BwdParams& params,
                                                const BwdWork& work) {
    if constexpr (Traits::kVInSmem) {
      return SmemRows<Traits>{address};
    } else {
      return GmemRows<Traits>{params, work};
    }
  }

  // Puts what was asked for where it belongs.
  template <int kPending>
  __device__ __forceinline__ void wait(uint32_t stage, const BwdParams& params,
                                       const BwdWork& work) {
    static_assert(kPending == 0, "one block at a time");
    jitter();
    if (!asked_) return;
    asked_ = false;
    if constexpr (!kAhead) q_.load(q_rows(params, work), at_.m * Traits::kBlockM);
    q_.store(stage);
    if constexpr (!kAhead) dout_.load(dout_rows(params, work), at_.m * Traits::kBlockM);
    dout_.store(stage + Traits::kQBytes);
    if constexpr (!kAhead) load_row_values(params, work);
    const uint32_t thread = fresh_thread_index();
    if (thread < 2 * kValueThreads)
      st_shared_16(stage + 2 * Traits::kQBytes + thread * 16, row_values_);
  }

 private:
  __device__ __forceinline__ int head(const BwdParams& params, const BwdWork& work) const {
    return work.keys.head * params.heads_per_kv + at_.head;
  }
  __device__ __forceinline__ MatrixRows q_rows(const BwdParams& params, const BwdWork& work) const {
    return matrix_rows<__half>(params.q, params.q_stride, work.batch_q, work.q_row,
                               head(params, work), work.used_q, params.head_dim);
  }
  __device__ __forceinline__ MatrixRows dout_rows(const BwdParams& params,
                                                  const BwdWork& work) const {
    return matrix_rows<__half>(params.dout, params.dout_stride, work.batch_q, work.q_row,
                               head(params, work), work.used_q, params.head_dim_v);
  }
  // The first threads take lse, the next ones delta, which lies behind it in a stage.
  __device__ __forceinline__ void load_row_values(const BwdParams& params, const BwdWork& work) {
    const uint32_t thread = fresh_thread_index();
    if (thread >= 2 * kValueThreads) return;
    const int64_t tile = work.first_tile + int64_t{at_.head} * params.query_tiles.m_slots + at_.m;
    const float* values = thread < kValueThreads ? params.lse_log2 : params.delta;
    row_values_ = ld_global_16(values + tile * Traits::kBlockM + thread % kValueThreads * 4);
  }

  // As StagedRows wants it.
  template <int kRows>
  struct Block {
    static constexpr int kThreads = Traits::kThreads, kBlockN = kRows;
    static constexpr int kHeadDim = Traits::kHeadDim, kRowBytes = 2 * kHeadDim;
    static constexpr int kChunks = kHeadDim / 8;
  };
  static constexpr bool kAhead = Traits::kHeadDim <= 192;
  static constexpr int kValueThreads = Traits::kBlockM / 4;
  static_assert(2 * kValueThreads <= Traits::kThreads, "a thread has four values at most");

  StagedRows<Block<Traits::kBlockM>> q_, dout_;
  uint4 row_values_;
  Cursor at_;
  bool asked_;
};

}  // namespace flash_ext::fa1
