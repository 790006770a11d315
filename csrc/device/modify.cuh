// Modified scores on an accumulator tile of 16 rows, as mma.sync and WGMMA lay them out: a lane l
// holds rows g = l / 4 and g + 8, columns 8 j + 2 (l % 4) + {0, 1}, as s[4 j + {0, 1}] and s[4 j +
// {2, 3}].
//
//   s = cap tanh(scale q.k / cap)   cap_scores       once S = Q K^T is there
//   s = s - slope |i + offset - j|  add_alibi        then the mask
//   P = 0 where it is dropped       drop             16 keys at a time, after exp: sums keep it
//
// Scores come out scaled: the softmax then runs with a scale of 1. Kept probabilities are scaled by
// kept_scale, once, at the end of a row. A tile may also be transposed (S^T = K Q^T: rows are keys,
// columns queries): the same functions serve it, with the distance negated and kTransposed.
#pragma once

#include "core/philox.h"
#include "device/mask.cuh"
#include "device/ptx.cuh"
#include "device/score_options.h"

namespace flash_ext::device {

constexpr float kLog2e = 1.4426950408889634f;

// The options of one sequence and head. Kept in shared memory, beside the Work of the tile.
struct Modifier {
  float scale;          // softmax_scale
  float cap;            // 0: off
  float scale_by_cap;   // softmax_scale / cap
  float slope;          // 0: off
  float kept_scale;     // 1 without dropout
  uint32_t drop_below;  // the threshold in the upper 16 bits; 0: off
  uint32_t offset, head;
  uint64_t seed;
};

// Params: FwdParams or BwdParams of a generation; work.sequence must be one.
template <typename Params>
__device__ __forceinline__ Modifier make_modifier(const Params& params, const Work& work) {
  const ScoreOptions& options = params.score_options;
  Modifier m{};
  m.scale = params.softmax_scale;
  m.cap = options.softcap;
  if (m.cap > 0.f) m.scale_by_cap = m.scale / m.cap;
  if (options.alibi_slopes) {
    m.slope = options.alibi_slopes[int64_t{work.sequence} * options.alibi_batch_stride + work.head];
  }
  m.kept_scale = 1.f / (1.f - options.dropout_threshold / 65536.f);
  m.drop_below = options.dropout_threshold << 16;
  m.head = work.sequence * params.nheads + work.head;
  if (options.rng_state) {
    m.seed = options.rng_state[0];
    m.offset = static_cast<uint32_t>(options.rng_state[1]);
  }
  return m;
}

// ---- softcap ----------------------------------------------------------------------------------

// tanh x = x + x x^2 p(x^2) up to |x| = kTanhSmall: minimax in the relative error, 2^-25.
constexpr float kTanhSmall = 0.75f;
__device__ __forceinline__ float tanh_small(float x) {
  const float y = x * x;
  const float p =
      fmaf(fmaf(fmaf(fmaf(-0.00476948929f, y, 0.0196649123f), y, -0.053390258f), y, 0.133265212f),
           y, -0.333330684f);
  return fmaf(p * y, x, x);
}

// Within 4 ulp. Beyond the polynomial's range by 1 - 2 / (e^2x + 1), which cancels below it.
__device__ __forceinline__ float tanh_accurate(float x) {
  const float by_exp = fmaf(-2.f, reciprocal_approx(exp2_approx(2.f * kLog2e * x) + 1.f), 1.f);
  return fabsf(x) < kTanhSmall ? tanh_small(x) : by_exp;
}

// Q K^T becomes scaled scores, capped if there is a cap. Scores are mostly small beside a cap: when
// all of a warp's are, cap tanh(scale s / cap) is a polynomial in s, without the two special
// functions that an element else takes beside its exponential.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], const Modifier& m) {
  if (m.cap > 0.f) {
    const float cap = m.cap, scale = m.scale_by_cap;
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) most = fmaxf(most, fabsf(s[i]));
    if (__all_sync(0xffffffffu, most * scale < kTanhSmall)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = cap * tanh_small(s[i] * scale);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = cap * tanh_accurate(s[i] * scale);
    }
  } else {
    const float scale = m.scale;
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= scale;
  }
}

// d cap_scores / d (scale q.k), from what cap_scores gave; inverse_cap: 1 / cap, 0 without one.
__device__ __forceinline__ float cap_derivative(float capped, float inverse_cap) {
  const float t = capped * inverse_cap;
  return fmaf(-t, t, 1.f);
}

// ---- ALiBi ------------------------------------------------------------------------------------

// distance: i + offset - j of s[0]. Transposed: its negative.
template <int kCount>
__device__ __forceinline__ void add_alibi(float (&s)[kCount], const Modifier& m, int distance) {
  const float slope = m.slope;
  if (slope == 0.f) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float first = static_cast<float>(distance + 8 * half);
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c)
        s[i + c] = fmaf(-slope, fabsf(first - (2 * (i - 2 * half) + c)), s[i + c]);
    }
  }
}

// Both, for a tile of queries from `row` on (this lane's first row) and keys from n_begin on.
template <typename Lanes = MmaLanes, int kCount>
__device__ __forceinline__ void modify_scores(float (&s)[kCount], const Modifier& m,
                                              const Visible& visible, int row, int n_begin) {
  cap_scores(s, m);
  add_alibi(s, m, row + visible.offset - n_begin - 2 * Lanes::column_pair(threadIdx.x % 32));
}

// ---- dropout ----------------------------------------------------------------------------------

// The random bits of this lane's 8 elements of the 16 x 16 block that holds query i and key j:
// element e of the block (s[8 n + e] of a tile) has half e % 2 of word e / 2. A plain tile's lane
// has the elements of one slot. A transposed tile's has one half of two slots' words: it draws one
// slot, and trades halves with the lane that drew the other.
template <bool kTransposed = false, typename Lanes = MmaLanes>
__device__ __forceinline__ PhiloxWords dropout_words(const Modifier& m, int i, int j) {
  const int lane = threadIdx.x % 32, row = Lanes::row(lane), pair = Lanes::column_pair(lane);
  const uint32_t query = i, key = j;  // unsigned: a block's number is then one shift
  if constexpr (!kTransposed) {
    return philox4x32_7(m.seed, philox_counter(query, key, 4 * row + pair, m.head, m.offset));
  } else {
    const bool odd = row & 1;  // this lane's key: it draws the odd query's slot, and needs halves 1
    const int slot = 4 * (2 * pair + odd) + row / 2;
    const PhiloxWords drawn =
        philox4x32_7(m.seed, philox_counter(query, key, slot, m.head, m.offset));
    uint32_t even_query[2], odd_query[2];  // halves of words 0, 1 and of words 2, 3
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t low = __byte_perm(drawn.word[2 * k], drawn.word[2 * k + 1], 0x5410),
                     high = __byte_perm(drawn.word[2 * k], drawn.word[2 * k + 1], 0x7632);
      const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? low : high, Lanes::kNextRow);
      even_query[k] = odd ? got : low;
      odd_query[k] = odd ? high : got;
    }
    // Word w of a slot is query + 8 (w % 2) and key + 8 (w / 2); transposed, rows are keys.
    return {{__byte_perm(even_query[0], odd_query[0], 0x5410),
             __byte_perm(even_query[1], odd_query[1], 0x5410),
             __byte_perm(even_query[0], odd_query[0], 0x7632),
             __byte_perm(even_query[1], odd_query[1], 0x7632)}};
  }
}

__device__ __forceinline__ bool is_dropped(const PhiloxWords& words, int element,
                                           const Modifier& m) {
  const uint32_t word = words.word[element / 2];
  return (element % 2 ? word : word << 16) < m.drop_below;
}

// Dropped ones of this lane's 8 probabilities of the block that holds query i and key j become 0,
// by a product: the units that select are the busy ones.
template <typename Lanes = MmaLanes>
__device__ __forceinline__ void drop(float* p, const Modifier& m, int i, int j) {
  const PhiloxWords words = dropout_words<false, Lanes>(m, i, j);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (is_dropped(words, e, m)) p[e] *= 0.f;
  }
}

}  // namespace flash_ext::device
