// Where the row kernels of a backward keep things between the kernels, and what they are told.
#pragma once

#include <algorithm>

#include "core/tensors.h"
#include "device/bwd_rows_params.h"
#include "device/host.h"

namespace flash_ext::device {

// Parts of one workspace, each 256-byte aligned, in the order of the calls.
class WorkspaceParts {
 public:
  explicit WorkspaceParts(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    char* part = base_ + bytes_;
    bytes_ += (static_cast<uint64_t>(count) * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(part);
  }
  uint64_t bytes() const { return bytes_; }

 private:
  char* base_;
  uint64_t bytes_ = 0;
};

// Fills params in; the workspace parts from `parts` on. bucket: columns of a dQ tile.
inline void fill_bwd_rows(const Problem& p, const BwdTensors& t, int block_m, int bucket,
                          int64_t num_counters, bool copy_dout, WorkspaceParts& parts,
                          BwdRowsParams& params) {
  params.q = {{t.cu_seqlens_q, p.batch, p.total_q},
              t.seqused_q,
              padded_length(p.packed_q, p.total_q, p.batch),
              p.nheads};
  params.tiles = make_scheduler(p, block_m);
  params.tiles.longest_first = 0;
  params.out = t.out, params.dout = t.dout, params.dq = t.dq;
  params.out_stride = p.out, params.dout_stride = p.dout, params.dq_stride = p.dq;
  params.lse = static_cast<const float*>(t.lse);
  params.d_lse = static_cast<const float*>(t.d_lse);
  params.sinks = static_cast<const float*>(t.sinks);
  params.d_sink = static_cast<float*>(t.d_sink);
  params.batch = p.batch, params.head_dim = p.head_dim, params.head_dim_v = p.head_dim_v;
  params.softmax_scale = static_cast<float>(p.softmax_scale);
  const int64_t tiles = params.tiles.num_tiles;
  params.lse_log2 = parts.take<float>(tiles * block_m);
  params.delta = parts.take<float>(tiles * block_m);
  params.dq_sum = parts.take<float>(tiles * block_m * bucket);
  params.d_sink_parts = p.has_sinks ? parts.take<float>(tiles) : nullptr;
  params.counters = parts.take<uint32_t>(num_counters);
  params.num_counters = num_counters;
  params.copy_stride = {p.packed_q ? 0 : int64_t{params.q.seqlen} * p.nheads * p.head_dim_v,
                        int64_t{p.nheads} * p.head_dim_v, p.head_dim_v};
  params.dout_copy =
      copy_dout ? parts.take<uint16_t>(p.total_q * p.nheads * p.head_dim_v) : nullptr;
}

}  // namespace flash_ext::device
