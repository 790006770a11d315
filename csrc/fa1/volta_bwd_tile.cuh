// The pieces of the Volta backward's main kernel: scores and their gradients, dQ, and how dK and dV
// leave it.
#pragma once

#include "device/bwd_modify.cuh"
#include "device/bwd_rows_params.h"
#include "device/mma_bwd_work.cuh"
#include "fa1/staged_block.cuh"
#include "fa1/volta_bwd_cut.h"
#include "fa1/volta_mma.cuh"

namespace flash_ext::fa1 {

using namespace device;

template <typename Cut>
struct VoltaBwdTraits : Cut {
  using Element = __half;
  static constexpr int kRowBytes = 2 * Cut::kHeadDim, kChunks = Cut::kHeadDim / 8;
  static constexpr int kTiles = Cut::kWarpKeys / 16;    // of 16 keys, of a warp
  static constexpr int kScoreCount = Cut::kBlockM / 2;  // values of a tile of scores in a lane
  static constexpr int kGradCount = Cut::kColumns / 2;  // and of a tile of dK or dV
  static constexpr int kApart = 4 * Cut::kParts;        // chunks between those of one part
};

// dS^T in shared memory.
struct DsTile {
  static constexpr int kRowBytes = 64, kChunks = 4;
};

template <typename Traits>
using KeyScores = float[Traits::kTiles][Traits::kScoreCount];

// ---- loads ------------------------------------------------------------------------------------

// A block of queries on its way: Q, dO, lse and delta, which lie one behind the other in a stage.
template <typename Traits>
class StagedQueries {
 public:
  // Asks for a block, if it is one.
  __device__ __forceinline__ void load(const BwdParams& params, const BwdWork& work, Cursor at) {
    if (at.head >= params.heads_per_kv) return;
    const int head = work.keys.head * params.heads_per_kv + at.head, m = at.m * Traits::kBlockM;
    q_.load(matrix_rows<__half>(params.q, params.q_stride, work.batch_q, work.q_row, head,
                                work.used_q, params.head_dim),
            m);
    dout_.load(matrix_rows<__half>(params.dout, params.dout_stride, work.batch_q, work.q_row, head,
                                   work.used_q, params.head_dim_v),
               m);
    const uint32_t thread = fresh_thread_index();
    if (thread >= 2 * kValueThreads) return;
    const int64_t tile = work.first_tile + int64_t{at.head} * params.query_tiles.m_slots + at.m;
    const float* values = thread < kValueThreads ? params.lse_log2 : params.delta;
    values_ = ld_global_16(values + tile * Traits::kBlockM + thread % kValueThreads * 4);
  }

  __device__ __forceinline__ void store(uint32_t stage) const {
    q_.store(stage);
    dout_.store(stage + Traits::kQBytes);
    const uint32_t thread = fresh_thread_index();
    if (thread < 2 * kValueThreads)
      st_shared_16(stage + 2 * Traits::kQBytes + 16 * thread, values_);
  }

 private:
  struct Block {  // as StagedRows wants it
    static constexpr int kThreads = Traits::kThreads, kBlockN = Traits::kBlockM;
    static constexpr int kHeadDim = Traits::kHeadDim, kRowBytes = Traits::kRowBytes;
    static constexpr int kChunks = Traits::kChunks;
  };
  static constexpr int kValueThreads = Traits::kBlockM / 4;

  StagedRows<Block> q_, dout_;
  uint4 values_;
};

// ---- scores -----------------------------------------------------------------------------------

// Which queries see a key, for apply_mask on S^T. Key rows past the end see none.
struct VisibleQueries {
  Visible keys;
  FLASH_EXT_HOST_DEVICE int begin(int j) const {
    const int first = j - keys.offset - keys.window_right;
    return j >= keys.seqlen_k ? 1 << 30 : keys.window_right < 0 || first < 0 ? 0 : first;
  }
  FLASH_EXT_HOST_DEVICE int end(int j) const {
    return keys.window_left < 0 ? 1 << 30 : j - keys.offset + keys.window_left + 1;
  }
};

// Scores become probabilities. lse: this lane's first value in shared memory.
template <typename Traits>
__device__ __forceinline__ void exponentials(KeyScores<Traits>& s, uint32_t lse, float scale_log2) {
#pragma unroll
  for (int n = 0; n < Traits::kBlockM / 8; ++n) {
    const float2 l = ld_shared_floats(lse + 32 * n);
#pragma unroll
    for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
      for (int i = 4 * n; i < 4 * n + 4; i += 2) {
        s[m][i] = exp2_approx(fmaf(s[m][i], scale_log2, -l.x));
        s[m][i + 1] = exp2_approx(fmaf(s[m][i + 1], scale_log2, -l.y));
      }
    }
  }
}

// dP becomes dS = P (dP - delta); of modified scores dp is dP - delta already. delta: this lane's
// first value in shared memory.
template <typename Traits>
__device__ __forceinline__ void score_gradients(const KeyScores<Traits>& p, KeyScores<Traits>& dp,
                                                uint32_t delta) {
#pragma unroll
  for (int n = 0; n < Traits::kBlockM / 8; ++n) {
    const float2 d = Traits::kModified ? float2{} : ld_shared_floats(delta + 32 * n);
#pragma unroll
    for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
      for (int i = 4 * n; i < 4 * n + 4; i += 2) {
        dp[m][i] = p[m][i] * (dp[m][i] - d.x);
        dp[m][i + 1] = p[m][i + 1] * (dp[m][i + 1] - d.y);
      }
    }
  }
}

// A fragments of 16 queries of a warp's P^T or dS^T.
template <typename Traits>
__device__ __forceinline__ void take_fragments(const KeyScores<Traits>& x, int n,
                                               uint32_t (&a)[Traits::kTiles][4][2]) {
#pragma unroll
  for (int m = 0; m < Traits::kTiles; ++m) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      packed[i] = pack<__half>(x[m][8 * n + 2 * i], x[m][8 * n + 2 * i + 1]);
    relay(packed, a[m]);
  }
}

// The warp's S and dP of modified scores become what the softmax saw, and dP - delta through
// softcap. Returns the bits of probabilities that were kept, of each tile.
template <typename Traits>
__device__ __forceinline__ void modify_scores(KeyScores<Traits>& s, KeyScores<Traits>& dp,
                                              const Modifier& modifier, TilePlace at,
                                              uint32_t delta, uint32_t (&kept)[Traits::kTiles]) {
  float2 d[Traits::kBlockM / 8];
#pragma unroll
  for (int n = 0; n < Traits::kBlockM / 8; ++n) d[n] = ld_shared_floats(delta + 32 * n);
#pragma unroll
  for (int m = 0; m < Traits::kTiles; ++m) {
    kept[m] = static_cast<uint32_t>(modify_gradients<true, VoltaLanes>(
        s[m], dp[m], modifier, {at.query, at.key + 16 * m, at.offset},
        [&](int j) { return make_float4(d[j].x, d[j].y, d[j].x, d[j].y); }));
  }
}

// ---- dQ ---------------------------------------------------------------------------------------

// Adds 16 rows and this warp's columns of dQ = dS K to their sum in global memory. ds, k: this
// lane's VoltaAddress four_columns and four_rows.
template <typename Traits>
__device__ __forceinline__ void multiply_dq(float (&dq)[Traits::kDqTiles][8], uint32_t ds,
                                            uint32_t k) {
  constexpr int kStep = Traits::kApart * (Traits::kDqWarpsD / 2);  // chunks between its tiles
#pragma unroll 1
  for (int key = 0; key < Traits::kBlockN; key += 16) {
#pragma unroll
    for (int four = 0; four < 16; four += 4) {
      const uint2 a = ld_shared_8(RowsOfA<DsTile>::down(ds, four));
#pragma unroll
      for (int i = 0; i < Traits::kDqTiles; ++i) {
        const uint32_t from = Swizzle<Traits>::step(RowsOfA<Traits>::down(k, four), kStep * i);
        mma_884_a_columns(dq[i], a, ld_shared_8(from));
      }
    }
    ds += 16 * DsTile::kRowBytes, k += 16 * Traits::kRowBytes;
  }
}

// chunk: of this warp's first column; to: the tile's dQ.
template <typename Traits>
__device__ __forceinline__ void add_dq(float* to, const float (&dq)[Traits::kDqTiles][8],
                                       int row_block, int chunk) {
  const int lane = threadIdx.x % 32;
  const int place = 4 * VoltaLanes::row(lane) + VoltaLanes::column_pair(lane);
#pragma unroll
  for (int i = 0; i < Traits::kDqTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = chunk + Traits::kApart * (Traits::kDqWarpsD / 2) * i + h;
      float* sum = to + dq_index<Traits::kBlockM, false>(at / 8, row_block, at % 8, place, 0);
#pragma unroll
      for (int value = 0; value < 4; ++value) atomicAdd(sum + 32 * value, dq[i][4 * h + value]);
    }
  }
}

// ---- the end of a tile ------------------------------------------------------------------------

// This warp's rows of dK or dV, times scale, from rows at base on. chunk: of the part's first
// columns.
template <typename Traits>
__device__ __forceinline__ void write_gradient(
    void* base, const Strides& stride, const RowTile& keys,
    const float (&acc)[Traits::kTiles][Traits::kGradCount], float scale, int first_row, int chunk,
    int dim) {
  auto* rows = head_rows<__half*>(base, stride, keys.batch, keys.first_row, keys.head);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Traits::kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + VoltaLanes::row(lane);
#pragma unroll
      for (int k = 0; k < Traits::kColumns / 32; ++k) {
        uint32_t words[4];
        gather_row(&acc[m][16 * k + 2 * half], scale, words);
        const int column = 8 * (chunk + Traits::kApart * k + gathered_chunk());
        if (row < keys.rows && column < dim) st_global_16(rows + row * stride.row + column, words);
      }
    }
  }
}

}  // namespace flash_ext::fa1
