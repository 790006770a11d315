// Backward: the loop over heads of K and their chunks, and what follows it: dK and dV from their
// sums. backward_tile.h holds the work itself.
#include <iterator>

#include "cpu/attention.h"
#include "cpu/backward_tile.h"

namespace flash_ext::cpu {
namespace {

constexpr int kRowsOfASum = 128;  // of dK and dV, that one tile of the second loop adds up

template <class T>
struct Gradient {
  T* rows;
  int64_t stride;
  const Acc<T>* sums;    // of the first chunk, at the sequence's first key
  int64_t chunk_stride;  // to the sums of the next chunk
  int columns, pitch;
  Acc<T> scale;

  // Rows [begin, end): scale times the sum over the chunks, 0 past the used keys.
  void write(int64_t begin, int64_t end, int64_t used, int chunks) const {
    for (int64_t row = begin; row < end; ++row) {
      T* out = rows + row * stride;
      const Acc<T>* from = sums + row * pitch;
      for (int i = 0; i < columns; i += kWidth<Acc<T>>) {
        Vec<Acc<T>> sum{};
        for (int c = 0; c < chunks && row < used; ++c)
          sum += load<Acc<T>>(from + c * chunk_stride + i);
        store_narrow(out + i, sum * scale, std::min(kWidth<Acc<T>>, columns - i));
      }
    }
  }
};

template <class T>
class Backward {
 public:
  Backward(const Problem& problem, const BwdTensors& tensors, const Call& call)
      : p_(problem),
        t_(tensors),
        call_(call),
        cut_(problem),
        arena_(call.workspace),
        sums_(problem, cut_, arena_) {}

  void run() {
    add_tiles();
    if (cut_.chunks > 1) add_chunks();
    if (p_.has_sinks) write_d_sink();
  }

  // Bytes of the sums and of one worker's scratch.
  static uint64_t workspace_bytes(const Problem& p) {
    const Cut<T> cut(p);
    Arena sums(nullptr), scratch(nullptr);
    Sums<T>(p, cut, sums);
    BackwardScratch<T>(p, cut, scratch);
    return sums.used() + cut.workers * scratch.used();
  }

 private:
  void add_tiles();
  void add_chunks();
  void write_d_sink();
  void write_gradients(const Sequence& s, int head_k, int worker, int64_t begin, int64_t end) const;

  const Problem& p_;
  const BwdTensors& t_;
  const Call& call_;
  const Cut<T> cut_;
  Arena arena_;
  const Sums<T> sums_;
};

// Every tile of every head, each head of K or chunk of it in one worker's hands.
template <class T>
void Backward<T>::add_tiles() {
  Arena counter(nullptr);
  BackwardScratch<T>(p_, cut_, counter);
  const int64_t heads = int64_t{p_.nheads_k} * cut_.chunks;
  std::atomic<int64_t> next{0};
  run_workers(call_, cut_.workers, [&](int worker) {
    Arena arena(static_cast<char*>(call_.workspace) + arena_.used() + worker * counter.used());
    BackwardWorker<T> tiles(p_, t_, cut_, arena);
    TileQueue queue(p_, t_, &next, [=](const Sequence&) { return heads; });
    Sequence s;
    for (int64_t index; queue.take(&s, &index);) {
      const int head_k = static_cast<int>(index / cut_.chunks);
      const int chunk = static_cast<int>(index % cut_.chunks);
      const int64_t sum_row = cut_.first_sum_row(p_, s, head_k, chunk, worker);
      const int64_t item = s.batch * heads + index;
      tiles.run(s, head_k, chunk, sums_.dk + sum_row * cut_.dk_pitch,
                sums_.dv + sum_row * cut_.dv_pitch, sums_.d_sink + item * sums_.group);
      if (cut_.chunks == 1) write_gradients(s, head_k, worker, 0, s.k.length);
    }
  });
}

template <class T>
void Backward<T>::add_chunks() {
  const auto blocks = [](const Sequence& s) {
    return (s.k.length + kRowsOfASum - 1) / kRowsOfASum;
  };
  std::atomic<int64_t> next{0};
  run_workers(call_, cut_.workers, [&](int worker) {
    TileQueue queue(p_, t_, &next, [&](const Sequence& s) { return blocks(s) * p_.nheads_k; });
    Sequence s;
    for (int64_t index; queue.take(&s, &index);) {
      const int64_t begin = index % blocks(s) * kRowsOfASum;
      write_gradients(s, static_cast<int>(index / blocks(s)), worker, begin,
                      std::min(begin + kRowsOfASum, s.k.length));
    }
  });
}

template <class T>
void Backward<T>::write_gradients(const Sequence& s, int head_k, int worker, int64_t begin,
                                  int64_t end) const {
  const int64_t sum_row = cut_.first_sum_row(p_, s, head_k, 0, worker);
  const Gradient<T> dk = {row_pointer<T>(t_.dk, p_.dk, p_.packed_k, s.batch, s.k.row, head_k),
                          p_.dk.row,
                          sums_.dk + sum_row * cut_.dk_pitch,
                          cut_.sum_rows * cut_.dk_pitch,
                          p_.head_dim,
                          cut_.dk_pitch,
                          static_cast<Acc<T>>(p_.softmax_scale)};
  const Gradient<T> dv = {row_pointer<T>(t_.dv, p_.dv, p_.packed_k, s.batch, s.k.row, head_k),
                          p_.dv.row,
                          sums_.dv + sum_row * cut_.dv_pitch,
                          cut_.sum_rows * cut_.dv_pitch,
                          p_.head_dim_v,
                          cut_.dv_pitch,
                          Acc<T>{1}};
  dk.write(begin, end, s.k.used, cut_.chunks);
  dv.write(begin, end, s.k.used, cut_.chunks);
}

template <class T>
void Backward<T>::write_d_sink() {
  const int64_t heads = int64_t{p_.nheads_k} * cut_.chunks;
  for (int head = 0; head < p_.nheads; ++head) {
    const int head_k = head / sums_.group, member = head % sums_.group;
    double sum = 0;
    for (int64_t b = 0; b < sequence_count(p_); ++b) {
      for (int chunk = 0; chunk < cut_.chunks; ++chunk) {
        sum += sums_.d_sink[(b * heads + head_k * cut_.chunks + chunk) * sums_.group + member];
      }
    }
    static_cast<Acc<T>*>(t_.d_sink)[head] = static_cast<Acc<T>>(-sum);
  }
}

}  // namespace

Status plan_backward(const Problem& p, Plan* plan) {
  if (p.tile < 0 || p.tile > static_cast<int>(std::size(kBackwardTiles))) return no_such_tile(p);
  return with_element_type(p, [&](auto element) {
    using T = decltype(element);
    const Cut<T> cut(p);
    plan->workspace_bytes = Backward<T>::workspace_bytes(p);
    plan->tile_m = cut.tile.m;
    plan->tile_n = cut.tile.n;
    plan->grid = cut.items;
    plan->launches = cut.chunks > 1 ? 2 : 1;
    plan->stages = 1;
    std::snprintf(plan->why, sizeof(plan->why),
                  cut.chunks == 1
                      ? "%lld heads of k for %d threads, all queries of a head in one of them"
                      : "%lld heads of k do not keep %d threads busy: the queries of each are "
                        "dealt into %d chunks",
                  static_cast<long long>(p.batch) * p.nheads_k, max_workers(p), cut.chunks);
    return ok_status();
  });
}

Status backward(const Problem& p, const BwdTensors& tensors, const Call& call) {
  return with_element_type(p, [&](auto element) {
    Backward<decltype(element)>(p, tensors, call).run();
    return ok_status();
  });
}

}  // namespace flash_ext::cpu
