// Which keys a query sees: causal, window and length in one rule, for kernels, tests and planning.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flash_ext::device {

// Query i sees key j iff begin(i) <= j < end(i). Lengths and windows are below 2^28, so int32
// holds.
struct Visible {
  int seqlen_k;      // used keys
  int offset;        // seqlen_k - seqlen_q (bottom-right) or 0 (top-left)
  int window_left;   // -1: unlimited
  int window_right;  // -1: unlimited; causal: 0

  FLASH_EXT_HOST_DEVICE int begin(int i) const {
    const int first = i + offset - window_left;
    return window_left < 0 || first < 0 ? 0 : first;
  }
  FLASH_EXT_HOST_DEVICE int end(int i) const {
    const int last = i + offset + window_right + 1;
    return window_right < 0 || last > seqlen_k ? seqlen_k : last;
  }
};

// The blocks of kBlockN keys that rows [m_begin, m_end) see: [min, max), and among them those that
// every row sees whole: [full_min, full_max). Blocks outside the second range need the mask.
struct BlockRange {
  int min, max, full_min, full_max;
};

template <int kBlockN>
FLASH_EXT_HOST_DEVICE BlockRange block_range(const Visible& visible, int m_begin, int m_end) {
  const int first = visible.begin(m_begin), last = visible.end(m_end - 1);  // the union of all rows
  if (first >= last) return {0, 0, 0, 0};
  BlockRange range;
  range.min = first / kBlockN;
  range.max = (last + kBlockN - 1) / kBlockN;
  // The intersection of all rows: the last row begins last, the first row ends first.
  const int begin = visible.begin(m_end - 1), end = visible.end(m_begin);
  range.full_min = (begin + kBlockN - 1) / kBlockN;
  range.full_max = end <= 0 ? 0 : end / kBlockN;
  return range;
}

// Of a lane's columns 8 j + {0, 1} of a row (bits 2 j and 2 j + 1, 32 in a word), those below
// `column`.
FLASH_EXT_HOST_DEVICE uint32_t columns_below(int column) {
  const int count = column <= 0 ? 0 : column / 8 * 2 + (column % 8 < 2 ? column % 8 : 2);
  return count >= 32 ? ~0u : (1u << count) - 1;
}

}  // namespace flash_ext::device
