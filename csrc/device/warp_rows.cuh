// What a warp of an mma.sync forward does with its rows' scores between the two products: modify,
// mask, keep below the reference, exponentials. Accumulators lie as mma.cuh has them.
//
// Traits: Element, Lanes (of its accumulators), kModified, kBlockM, kSharers (warps that have the
// same rows, neighbours), kWarpRows, kMTiles (16 rows each), kStepN (keys of one step), and of them
// a warp's kNTiles (8 keys each), kDTiles (8 columns of O each).
#pragma once

#include "device/lazy_softmax.cuh"
#include "device/mask.cuh"
#include "device/modify.cuh"
#include "device/ptx.cuh"
#include "device/softmax.cuh"

namespace flash_ext::device {

// What a warp keeps of its rows.
template <typename Traits>
struct WarpRows {
  float o[Traits::kMTiles][4 * Traits::kDTiles];
  LazySoftmax<typename Traits::Lanes> softmax[Traits::kMTiles];
  bool all_set;  // all rows of the warp have a reference
};

template <typename Traits>
using Scores = float[Traits::kMTiles][4 * Traits::kNTiles];

// Of this thread: which rows of the tile its warp has, and as which of those that share them.
template <typename Traits>
struct Place {
  int group, sharer, lane;

  __device__ __forceinline__ Place() {
    const uint32_t thread = fresh_thread_index(), warp = thread / 32;
    group = warp / Traits::kSharers, sharer = warp % Traits::kSharers, lane = thread % 32;
  }
  __device__ __forceinline__ int first_row() const { return group * Traits::kWarpRows; }
};

// The warp's first row in its sequence; from one lane, so that the compiler sees that it is the
// same for all: branches on it then need no reconvergence.
template <typename Traits>
__device__ __forceinline__ int warp_row(const Work& work) {
  const int first_row = __shfl_sync(0xffffffffu, Place<Traits>().first_row(), 0);
  return work.m_block * Traits::kBlockM + first_row;
}
// This lane's first row.
template <typename Traits>
__device__ __forceinline__ int lane_row(const Work& work) {
  const Place<Traits> place;
  return work.m_block * Traits::kBlockM + place.first_row() + Traits::Lanes::row(place.lane);
}

// How the warp's rows see the keys of a step.
enum class View { kNone, kPart, kWhole };

template <typename Traits>
__device__ __forceinline__ View view(const Work& work, int n_begin) {
  const int first = warp_row<Traits>(work), last = first + Traits::kWarpRows - 1;
  const int n_end = n_begin + Traits::kStepN;
  const Visible& visible = work.visible;
  if (n_begin >= visible.end(last) || n_end <= visible.begin(first)) return View::kNone;
  return n_begin >= visible.begin(last) && n_end <= visible.end(first) ? View::kWhole : View::kPart;
}

// Q K^T becomes modified scores, relative to the reference.
template <typename Traits>
__device__ __forceinline__ void modify(Scores<Traits>& s, const WarpRows<Traits>& rows,
                                       const Work& work, const Modifier& modifier, int n_begin) {
  const int row = lane_row<Traits>(work);
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) {
    modify_scores<typename Traits::Lanes>(s[m], modifier, work.visible, row + 16 * m, n_begin);
    rows.softmax[m].subtract(s[m]);
  }
}

template <typename Traits>
__device__ __forceinline__ void mask(Scores<Traits>& s, const Work& work, int n_begin) {
  const int row = lane_row<Traits>(work);
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m)
    apply_mask<typename Traits::Lanes>(s[m], work.visible, row + 16 * m, n_begin);
}

// What warps that share rows have to agree on; here, a warp that has its rows for itself.
struct Alone {
  uint32_t smem;  // of the kernel, for those that trade through it

  __device__ __forceinline__ void barrier() const { __syncwarp(); }
  __device__ __forceinline__ bool any(bool vote) const { return __any_sync(0xffffffffu, vote); }
  // Combines a value of each of this lane's rows of 16 with those of the other warps. m: which 16.
  template <typename Combine>
  __device__ __forceinline__ void combine(int m, float (&values)[2], Combine combine) const {}
};

// Takes references that scores have passed, or that are not set yet, above them.
template <typename Traits, typename Sharers = Alone>
__device__ __forceinline__ void keep_below_reference(Scores<Traits>& s, WarpRows<Traits>& rows,
                                                     float scale_log2, float slack,
                                                     Sharers sharers = {}) {
  bool passes = !rows.all_set;
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) passes |= rows.softmax[m].passes(s[m]);
  if (!sharers.any(passes)) return;
  bool all_set = true;
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) {
    float most[2], rescale[2];
    rows.softmax[m].maxima(s[m], most);
    sharers.combine(m, most, [](float a, float b) { return fmaxf(a, b); });
    all_set &= rows.softmax[m].raise(s[m], most, scale_log2, slack, rescale);
    rescale_rows(rows.o[m], rescale);
  }
  rows.all_set = __all_sync(0xffffffffu, all_set);
}

// P = exp(S) of the warp's 16 keys from 16 k on, as A fragments. n_begin: its first key.
template <typename Traits>
__device__ __forceinline__ void exponentiate(Scores<Traits>& s, WarpRows<Traits>& rows,
                                             const Work& work, const Modifier& modifier,
                                             int n_begin, int k, float scale_log2,
                                             uint32_t (&p)[Traits::kMTiles][4]) {
#pragma unroll
  for (int m = 0; m < Traits::kMTiles; ++m) {
    float* s16 = &s[m][8 * k];
    rows.softmax[m].exponentiate(s16, scale_log2);
    if constexpr (Traits::kModified) {
      if (modifier.drop_below != 0)
        drop<typename Traits::Lanes>(s16, modifier, lane_row<Traits>(work) + 16 * m,
                                     n_begin + 16 * k);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      p[m][i] = pack<typename Traits::Element>(s16[2 * i], s16[2 * i + 1]);
  }
}

}  // namespace flash_ext::device
