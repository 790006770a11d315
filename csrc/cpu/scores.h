// What happens to a block of scores S^T [keys][lanes] between the two products: softcap, ALiBi,
// mask, dropout. A key is a row, a query is a lane of a vector, so all of it is arithmetic between
// whole vectors.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/philox.h"
#include "cpu/sequence.h"
#include "cpu/simd.h"

namespace flash_ext::cpu {

struct Range {
  int64_t begin, end;
};

// Which keys a query sees: those in its window, aligned at the bottom right or the top left.
class Mask {
 public:
  Mask(const Problem& p, const Sequence& s)
      : offset_(p.top_left ? 0 : s.k.used - s.q.used),
        left_(p.window_left < 0 ? kUnlimited : std::min(p.window_left, kUnlimited)),
        right_(p.window_right < 0 ? kUnlimited : std::min(p.window_right, kUnlimited)),
        seqlen_k_(s.k.used) {}

  int64_t offset() const { return offset_; }
  Range visible(int64_t i) const {
    return {std::max<int64_t>(0, i + offset_ - left_),
            std::min(seqlen_k_, i + offset_ + right_ + 1)};
  }
  // Seen by at least one of the queries [first, last], and by all of them.
  Range visible_to_any(int64_t first, int64_t last) const {
    return {visible(first).begin, visible(last).end};
  }
  Range visible_to_all(int64_t first, int64_t last) const {
    return {visible(last).begin, visible(first).end};
  }
  // The queries that see at least one of the keys [first, last].
  Range queries_of(int64_t first, int64_t last) const {
    return {first - offset_ - right_, last - offset_ + left_ + 1};
  }

 private:
  static constexpr int64_t kUnlimited = int64_t{1} << 60;
  int64_t offset_, left_, right_, seqlen_k_;
};

// Queries [i, i + rows) against keys [j, j + keys); lanes past rows hold nothing.
template <class A>
struct ScoreBlock {
  A* scores;  // [keys][pitch], the first `lanes` of it
  int pitch, lanes;
  int64_t i, j;
  int rows, keys;
};

// -inf where the query does not see the key. Only keys outside `open` are looked at.
template <class A>
void mask_scores(const ScoreBlock<A>& block, const Mask& mask, Range open) {
  constexpr int kLanes = kWidth<A>;
  const A infinity = std::numeric_limits<A>::infinity();
  const int open_begin = static_cast<int>(std::clamp<int64_t>(open.begin - block.j, 0, block.keys));
  const int open_end =
      static_cast<int>(std::clamp<int64_t>(open.end - block.j, open_begin, block.keys));
  for (int lane = 0; lane < block.lanes; lane += kLanes) {
    IntVec<A> begin{}, end{};
    for (int l = 0; l < kLanes && lane + l < block.rows; ++l) {
      const Range visible = mask.visible(block.i + lane + l);
      begin[l] = std::clamp<int64_t>(visible.begin - block.j, 0, block.keys);
      end[l] = std::clamp<int64_t>(visible.end - block.j, 0, block.keys);
    }
    for (int key = 0; key < block.keys; ++key) {
      if (key == open_begin) key = open_end;
      if (key == block.keys) break;
      A* s = block.scores + key * block.pitch + lane;
      const IntVec<A> seen = (begin <= key) & (end > key);
      store<A>(s, seen ? load<A>(s) : splat<A>(-infinity));
    }
  }
}

template <class A>
struct ScoreChange {
  A scale;         // softmax scale
  A softcap;       // 0: off
  A slope;         // 0: off
  int64_t offset;  // of the diagonal
};

template <class A, class Tensors>
ScoreChange<A> score_change(const Problem& p, const Tensors& tensors, int batch, int head,
                            int64_t offset) {
  const float slope =
      p.has_alibi ? tensors.alibi_slopes[p.has_alibi == 2 ? int64_t{batch} * p.nheads + head : head]
                  : 0;
  return {static_cast<A>(p.softmax_scale), static_cast<A>(p.softcap), slope, offset};
}

// s = softcap * tanh(s * scale / softcap) - slope * |i + offset - j|. derivative, when given,
// receives d(softcap * tanh(x / softcap)) / dx = 1 - tanh^2.
template <class A>
void change_scores(const ScoreBlock<A>& block, const ScoreChange<A>& change, A* derivative) {
  constexpr int kLanes = kWidth<A>;
  for (int key = 0; key < block.keys; ++key) {
    for (int lane = 0; lane < block.lanes; lane += kLanes) {
      A* at = block.scores + key * block.pitch + lane;
      Vec<A> s = load<A>(at) * change.scale;
      if (change.softcap > 0) {
        const Vec<A> t = tanh<A>(s / change.softcap);
        if (derivative) store<A>(derivative + (at - block.scores), A{1} - t * t);
        s = t * change.softcap;
      }
      if (change.slope != 0) {
        const A first = static_cast<A>(block.i + lane + change.offset - block.j - key);
        const Vec<A> distance = lane_numbers<A>() + first;
        s -= change.slope * maximum<A>(distance, -distance);
      }
      store<A>(at, s);
    }
  }
}

// What dropout needs: the same for every block of a head.
template <class A>
struct Dropout {
  uint32_t threshold = 0;  // 0: off
  uint64_t seed = 0;
  int64_t offset = 0;
  int64_t head = 0;  // counted through the batch
  A kept_scale = 1;
};

template <class A, class Tensors>
Dropout<A> dropout_of(const Problem& p, const Tensors& tensors, int batch, int head) {
  if (p.dropout_threshold == 0) return {};
  return {static_cast<uint32_t>(p.dropout_threshold), static_cast<uint64_t>(tensors.rng_state[0]),
          tensors.rng_state[1], int64_t{batch} * p.nheads + head,
          static_cast<A>(1 / (1 - p.dropout_threshold / 65536.0))};
}

// keep [keys][pitch]: 0 where the score is dropped, else the scale of those kept. block.i, block.j
// and block.lanes are multiples of 16, block.scores is not touched.
template <class A>
void draw_dropout(const ScoreBlock<A>& block, const Dropout<A>& dropout, A* keep) {
  const Integer<A> threshold = dropout.threshold;
  for (int j = 0; j < block.keys; j += kPhiloxBlock) {
    const int keys = std::min(kPhiloxBlock, block.keys - j);
    for (int i = 0; i < block.lanes; i += kPhiloxBlock) {
      uint32_t drawn[4][kPhiloxSlots];
      for (int slot = 0; slot < kPhiloxSlots; ++slot) {
        const PhiloxWords words = philox4x32_7(
            dropout.seed,
            philox_counter(block.i + i, block.j + j, slot, dropout.head, dropout.offset));
        for (int w = 0; w < 4; ++w) drawn[w][slot] = words.word[w];
      }
      Integer<A> bits[kPhiloxBlock / 2][kPhiloxBlock];  // [pair of keys][query]
      for (int slot = 0; slot < kPhiloxSlots; ++slot) {
        for (int w = 0; w < 4; ++w) {
          bits[philox_column(slot, w) / 2][philox_row(slot, w)] = drawn[w][slot];
        }
      }
      for (int key = 0; key < keys; ++key) {
        A* to = keep + (j + key) * block.pitch + i;
        for (int lane = 0; lane < kPhiloxBlock; lane += kWidth<A>) {
          IntVec<A> word;
          std::memcpy(&word, &bits[key / 2][lane], sizeof(word));
          const IntVec<A> drop = (word >> key % 2 * 16 & 0xffff) < threshold;
          store<A>(to + lane, drop ? Vec<A>{} : splat<A>(dropout.kept_scale));
        }
      }
    }
  }
}

}  // namespace flash_ext::cpu
