// Which tensors a tensor map can describe.
#pragma once

#include "device/host.h"
#include "device/tensor_map.h"

namespace flash_ext::fa3 {

// Of a padded or packed tensor.
struct Extent {
  int64_t rows;  // of a batch, or all when packed
  int heads, batch;
};

inline Extent queries(const Problem& p) {
  const int64_t rows = p.packed_q ? p.total_q : device::padded_length(false, p.total_q, p.batch);
  return {rows, p.nheads, p.packed_q ? 1 : p.batch};
}
inline Extent keys(const Problem& p) {
  const int64_t rows = p.packed_k ? p.total_k : device::padded_length(false, p.total_k, p.batch);
  return {rows, p.nheads_k, p.packed_k ? 1 : p.batch};
}

inline bool mappable(const Strides& stride, const Extent& of) {
  const bool is_empty = of.rows * of.heads * of.batch == 0;  // nobody loads it
  return is_empty || device::can_map(stride, of.rows, of.heads, of.batch);
}

inline Status maps_why_not(const Problem& p) {
  if (mappable(p.q, queries(p)) && mappable(p.k, keys(p)) && mappable(p.v, keys(p)))
    return ok_status();
  return device::unsupported(
      "no tensor map steps through q, k or v: a stride of 0, or a batch stride that is no multiple "
      "of the row or head stride");
}

}  // namespace flash_ext::fa3
