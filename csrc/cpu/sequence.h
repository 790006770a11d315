// Where each sequence lies in memory, and the order in which threads take its tiles.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/backend.h"

namespace flash_ext::cpu {

// Rows [row, row + length) of the tensor belong to the sequence, the first `used` of them count.
struct Rows {
  int64_t row, length, used;
};

struct Sequence {
  int batch;
  Rows q, k;
};

// Packed tensors may hold rows before the first and behind the last sequence. Two sequences without
// used rows stand for them, so that the loops which clear padding clear those too.
inline int sequence_count(const Problem& problem) {
  return problem.batch + (problem.packed_q || problem.packed_k ? 2 : 0);
}

inline Rows rows_of(int index, int batch, int64_t seqlen, int64_t total, const int32_t* cu_seqlens,
                    const int32_t* seqused) {
  if (cu_seqlens == nullptr) {
    if (index >= batch) return {0, 0, 0};
    return {0, seqlen, seqused ? std::clamp<int64_t>(seqused[index], 0, seqlen) : seqlen};
  }
  if (index == batch) return {0, cu_seqlens[0], 0};
  if (index > batch) return {cu_seqlens[batch], total - cu_seqlens[batch], 0};
  const int64_t length = int64_t{cu_seqlens[index + 1]} - cu_seqlens[index];
  const int64_t used = seqused ? std::clamp<int64_t>(seqused[index], 0, length) : length;
  return {cu_seqlens[index], length, used};
}

// Tensors: FwdTensors or BwdTensors.
template <class Tensors>
Sequence sequence(const Problem& problem, const Tensors& tensors, int index) {
  const Problem& p = problem;
  return {index,
          rows_of(index, p.batch, p.seqlen_q, p.total_q,
                  p.packed_q ? tensors.cu_seqlens_q : nullptr, tensors.seqused_q),
          rows_of(index, p.batch, p.seqlen_k, p.total_k,
                  p.packed_k ? tensors.cu_seqlens_k : nullptr, tensors.seqused_k)};
}

// The first row of a sequence in a tensor of type T, for one head.
template <class T, class Pointer>
T* row_pointer(Pointer* data, const Strides& strides, bool packed, int batch, int64_t row,
               int head) {
  return static_cast<T*>(data) + (packed ? 0 : batch * strides.batch) + row * strides.row +
         head * strides.head;
}

// The same in lse and its gradient: (batch, nheads, seqlen_q) or (nheads, total_q).
inline int64_t lse_index(const Problem& p, const Sequence& sequence, int head) {
  if (p.packed_q) return head * p.total_q + sequence.q.row;
  return (int64_t{sequence.batch} * p.nheads + head) * p.seqlen_q;
}

inline int max_workers(const Problem& problem) {
  const int threads = std::max(1, problem.device.sm_count);
  return problem.max_ctas > 0 ? std::min(threads, problem.max_ctas) : threads;
}

// Calls work(worker) once for each of `workers` workers, on the caller's threads.
template <class Work>
void run_workers(const Call& call, int workers, Work&& work) {
  const auto body = [](int64_t begin, int64_t end, void* context) {
    for (int64_t worker = begin; worker < end; ++worker) {
      (*static_cast<Work*>(context))(static_cast<int>(worker));
    }
  };
  call.parallel_for(0, workers, 1, body, &work);
}

// Work tiles in one row over all sequences. A worker takes the next number from the shared counter
// and walks on to the sequence that holds it; numbers only grow, so the walk is short.
template <class Tensors, class CountTiles>
class TileQueue {
 public:
  TileQueue(const Problem& problem, const Tensors& tensors, std::atomic<int64_t>* next,
            CountTiles count_tiles)
      : problem_(problem), tensors_(tensors), next_(next), count_tiles_(count_tiles) {}

  // The sequence of the next tile and the tile's number in it; false when none is left.
  bool take(Sequence* sequence, int64_t* tile) {
    const int64_t taken = next_->fetch_add(1, std::memory_order_relaxed);
    while (index_ < sequence_count(problem_)) {
      *sequence = cpu::sequence(problem_, tensors_, index_);
      const int64_t tiles = count_tiles_(*sequence);
      if (taken < first_ + tiles) {
        *tile = taken - first_;
        return true;
      }
      first_ += tiles;
      ++index_;
    }
    return false;
  }

 private:
  const Problem& problem_;
  const Tensors& tensors_;
  std::atomic<int64_t>* next_;
  CountTiles count_tiles_;
  int index_ = 0;
  int64_t first_ = 0;  // number of the first tile of sequence index_
};

// Hands out the workspace piece by piece; with a null base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + 255) / 256 * 256;
    return piece;
  }
  uint64_t used() const { return used_; }

 private:
  uintptr_t base_;
  uint64_t used_ = 0;
};

}  // namespace flash_ext::cpu
