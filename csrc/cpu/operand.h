// How values enter a matrix product. A product sums over k; its operands are arrays of words, and a
// word holds kPack consecutive k: one number, or two bfloat16 where the machine multiplies pairs.
// Three layouts serve every product of the forward and the backward:
//   natural     word [row][k / kPack]        k runs along the source's rows
//   interleaved word [row / kPack][column]   k runs down the source's columns
//   transposed  word [k / kPack][row]        natural, turned: the rows become a vector's lanes
// Packing widens, fills up with zeros, and never reads past a source row: what lies there may be
// NaN.
#pragma once

#include <algorithm>

#include "cpu/simd.h"

namespace flash_ext::cpu {

template <class A>
struct PlainOperand {
  using Accumulator = A;
  using Word = A;
  using Vector = Vec<A>;
  static constexpr int kPack = 1;

  static FLASH_EXT_INLINE Vec<A> multiply_add(Word a, Vector b, Vec<A> c) { return a * b + c; }
  static FLASH_EXT_INLINE Vector load_words(const Word* from) { return load<A>(from); }
};

#ifdef __AVX512BF16__
struct BFloat16Pairs {
  using Accumulator = float;
  using Word = int32_t;
  using Vector = __m512i;
  static constexpr int kPack = 2;

  static FLASH_EXT_INLINE Vec<float> multiply_add(Word a, Vector b, Vec<float> c) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
  }
  static FLASH_EXT_INLINE Vector load_words(const Word* from) { return _mm512_loadu_si512(from); }
};
#endif

template <class T>
struct OperandOf {
  using Type = PlainOperand<Acc<T>>;
};
#ifdef __AVX512BF16__
template <>
struct OperandOf<BFloat16> {
  using Type = BFloat16Pairs;
};
#endif
template <class T>
using Operand = typename OperandOf<T>::Type;
template <class T>
using Word = typename Operand<T>::Word;
template <class T>
constexpr int kPack = Operand<T>::kPack;

constexpr int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// The word of one or two numbers.
template <class T>
FLASH_EXT_INLINE Word<T> make_word(T low, T high) {
  if constexpr (kPack<T> == 2) {
    return static_cast<Word<T>>(uint32_t{high.bits} << 16 | low.bits);
  } else {
    return widen(low);
  }
}

// A matrix in memory: rows of columns numbers, stride apart.
template <class T>
struct Source {
  const T* data;
  int64_t stride;
  int rows, columns;
};

// to: word [padded_rows][pitch].
template <class T>
void pack_natural(Source<T> from, Word<T>* to, int pitch, int padded_rows) {
  const int whole = from.columns / kPack<T>;
  for (int r = 0; r < from.rows; ++r, to += pitch) {
    const T* row = from.data + r * from.stride;
    int k = 0;
    if constexpr (kPack<T> == 2) {
      std::memcpy(to, row, whole * sizeof(*to));
      k = whole;
    } else {
      for (; k + kWidth<Acc<T>> <= whole; k += kWidth<Acc<T>>)
        store<Acc<T>>(to + k, load_wide(row + k));
      for (; k < whole; ++k) to[k] = widen(row[k]);
    }
    if (from.columns % kPack<T>) to[k++] = make_word<T>(row[from.columns - 1], T{});
    for (; k < pitch; ++k) to[k] = Word<T>{};
  }
  std::fill_n(to, int64_t{padded_rows - from.rows} * pitch, Word<T>{});
}

#ifdef __AVX512BF16__
inline void pack_interleaved_pairs(Source<BFloat16> from, int32_t* to, int pitch, int padded_rows) {
  for (int r = 0; r < from.rows; r += 2, to += pitch) {
    const BFloat16* low = from.data + r * from.stride;
    const BFloat16* high = low + from.stride;
    const bool has_high = r + 1 < from.rows;
    int c = 0;
    for (; c + 16 <= from.columns; c += 16) {
      const IntVec<float> low_bits = load_wide_bits(&low[c].bits);
      const IntVec<float> high_bits = has_high ? load_wide_bits(&high[c].bits) : IntVec<float>{};
      const IntVec<float> words = high_bits << 16 | low_bits;
      std::memcpy(to + c, &words, sizeof(words));
    }
    for (; c < from.columns; ++c) {
      to[c] = make_word<BFloat16>(low[c], has_high ? high[c] : BFloat16{});
    }
    for (; c < pitch; ++c) to[c] = 0;
  }
  std::fill_n(to, int64_t{padded_rows / 2 - (from.rows + 1) / 2} * pitch, 0);
}
#endif

// to: word [padded_rows / kPack][pitch].
template <class T>
void pack_interleaved(Source<T> from, Word<T>* to, int pitch, int padded_rows) {
#ifdef __AVX512BF16__
  if constexpr (kPack<T> == 2) return pack_interleaved_pairs(from, to, pitch, padded_rows);
#endif
  if constexpr (kPack<T> == 1) pack_natural(from, to, pitch, padded_rows);
}

// to: word [ceil(columns / kPack)][pitch], `lanes` of it: those past the source's rows become
// zeros. Lanes in groups, so that neither side runs through the cache.
template <class T>
void pack_transposed(Source<T> from, Word<T>* to, int lanes, int pitch) {
  constexpr int kGroup = 16;
  const int steps = (from.columns + kPack<T> - 1) / kPack<T>;
  const int whole = from.columns / kPack<T>;
  for (int first = 0; first < lanes; first += kGroup) {
    const int exist = std::clamp(from.rows - first, 0, kGroup);
    const T* rows = from.data + first * from.stride;
    for (int k = 0; k < steps; ++k) {
      Word<T>* words = to + int64_t{k} * pitch + first;
      for (int lane = 0; lane < exist; ++lane) {
        const T* at = rows + lane * from.stride + k * kPack<T>;
        words[lane] = make_word<T>(at[0], k < whole ? at[kPack<T> - 1] : T{});
      }
      std::fill(words + exist, words + kGroup, Word<T>{});
    }
  }
}

// Scores [rows][pitch] between two products, of which the first `lanes` columns count.
template <class A>
struct Scores {
  const A* data;
  int pitch;
  int rows, lanes;
};

// As they are, or rounded to pairs at words. Natural: word [row][pitch / kPack], k runs along the
// lanes.
template <class T>
FLASH_EXT_INLINE const Word<T>* scores_natural(const Scores<Acc<T>>& from,
                                               [[maybe_unused]] Word<T>* words) {
#ifdef __AVX512BF16__
  if constexpr (kPack<T> == 2) {
    for (int r = 0; r < from.rows; ++r) {
      for (int lane = 0; lane < from.lanes; lane += 16) {
        const int at = r * from.pitch + lane;
        const __m256bh rounded = _mm512_cvtneps_pbh(load<float>(from.data + at));
        std::memcpy(words + at / 2, &rounded, sizeof(rounded));
      }
    }
    return words;
  }
#endif
  if constexpr (kPack<T> == 1) return from.data;
}

// Interleaved: word [row / kPack][pitch], k runs down the rows; an odd last row is paired with
// zeros.
template <class T>
FLASH_EXT_INLINE const Word<T>* scores_interleaved(const Scores<Acc<T>>& from,
                                                   [[maybe_unused]] Word<T>* words) {
#ifdef __AVX512BF16__
  if constexpr (kPack<T> == 2) {
    // Takes 16-bit number i from the lower row, then i from the upper one.
    const __m512i zip = _mm512_add_epi32(
        _mm512_set1_epi32(0x00100000),
        _mm512_mullo_epi32(_mm512_set1_epi32(0x00010001),
                           _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)));
    for (int r = 0; r < from.rows; r += 2) {
      for (int lane = 0; lane < from.lanes; lane += 16) {
        const float* low = from.data + r * from.pitch + lane;
        const Vec<float> high = r + 1 < from.rows ? load<float>(low + from.pitch) : Vec<float>{};
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, load<float>(low));
        _mm512_storeu_si512(words + r / 2 * from.pitch + lane, _mm512_permutexvar_epi16(zip, both));
      }
    }
    return words;
  }
#endif
  if constexpr (kPack<T> == 1) return from.data;
}

// A row of an output from one lane of its transpose, scaled.
template <class T>
void write_lane(const Acc<T>* from, int pitch, Acc<T> scale, T* to, int columns) {
  for (int i = 0; i < columns; i += kWidth<Acc<T>>) {
    Acc<T> row[kWidth<Acc<T>>] = {};
    const int count = std::min(kWidth<Acc<T>>, columns - i);
    for (int c = 0; c < count; ++c) row[c] = from[(i + c) * pitch];
    store_narrow(to + i, scale == 0 ? Vec<Acc<T>>{} : load<Acc<T>>(row) * scale, count);
  }
}

// Sum over i of x[i] * y[i].
template <class T>
Acc<T> dot(const T* x, const T* y, int count) {
  Vec<Acc<T>> sums{};
  int i = 0;
  for (; i + kWidth<Acc<T>> <= count; i += kWidth<Acc<T>>)
    sums += load_wide(x + i) * load_wide(y + i);
  Acc<T> sum = 0;
  for (int lane = 0; lane < kWidth<Acc<T>>; ++lane) sum += sums[lane];
  for (; i < count; ++i) sum += widen(x[i]) * widen(y[i]);
  return sum;
}

}  // namespace flash_ext::cpu
