// C[m][n] (+)= sum over k of A[m][k] B[k][n], for operands that lie in the first and second level
// cache. A small tile of C stays in registers for the whole sum: each step loads kTileColumns
// vectors of B once and broadcasts kTileRows words of A.
#pragma once

#include <algorithm>

#include "cpu/operand.h"

namespace flash_ext::cpu {

// 16 accumulators of 32 registers, or 8 of 16: enough to hide the latency of a multiply-add on two
// ports, few enough to stay in registers.
constexpr int kTileRows = kVectorBytes == 64 ? 8 : 4;
constexpr int kTileColumns = 2;

// Whether A is stored [m][k] (natural) or [k][m] (interleaved).
enum class Left { kNatural, kInterleaved };

template <class Element>
struct Matrix {
  Element* data;
  int64_t pitch;  // from row to row
};

template <class T>
struct Product {
  Matrix<const Word<T>> a;  // [rows][steps] or [steps][rows]
  Matrix<const Word<T>> b;  // [steps][columns]
  Matrix<Acc<T>> c;         // [rows][columns]
  int rows, columns;        // columns: a multiple of a vector
  int steps;                // words to sum over
};

// What becomes of the old C. Added last, so that a long sum is a sum of the blocks' sums: its error
// grows with the square root of a block's length plus that of the number of blocks.
enum class Result { kReplace, kAdd };

template <class T, Left kLeft, Result kResult, int kRows, int kColumns>
FLASH_EXT_INLINE void multiply_tile(const Product<T>& p, int row, int column) {
  using Op = Operand<T>;
  constexpr int kLanes = kWidth<Acc<T>>;
  constexpr bool kNatural = kLeft == Left::kNatural;
  const Word<T>* a = p.a.data + (kNatural ? row * p.a.pitch : row);
  const Word<T>* b = p.b.data + column;
  Vec<Acc<T>> sum[kRows][kColumns] = {};
  for (int k = 0; k < p.steps; ++k) {
    typename Op::Vector right[kColumns];
#pragma GCC unroll 16
    for (int j = 0; j < kColumns; ++j) right[j] = Op::load_words(b + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Word<T> left = kNatural ? a[i * p.a.pitch] : a[i];
#pragma GCC unroll 16
      for (int j = 0; j < kColumns; ++j) sum[i][j] = Op::multiply_add(left, right[j], sum[i][j]);
    }
    a += kNatural ? 1 : p.a.pitch;
    b += p.b.pitch;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    Acc<T>* c = p.c.data + (row + i) * p.c.pitch + column;
#pragma GCC unroll 16
    for (int j = 0; j < kColumns; ++j, c += kLanes) {
      store<Acc<T>>(c, kResult == Result::kAdd ? load<Acc<T>>(c) + sum[i][j] : sum[i][j]);
    }
  }
}

// All rows from `row` on; those that fill no tile in tiles of half the height.
template <class T, Left kLeft, Result kResult, int kRows, int kColumns>
FLASH_EXT_INLINE void multiply_rows(const Product<T>& p, int row, int column) {
  for (; row + kRows <= p.rows; row += kRows) {
    multiply_tile<T, kLeft, kResult, kRows, kColumns>(p, row, column);
  }
  if constexpr (kRows > 1) {
    if (row < p.rows) multiply_rows<T, kLeft, kResult, kRows / 2, kColumns>(p, row, column);
  }
}

template <class T, Left kLeft, Result kResult>
__attribute__((noinline)) void multiply(const Product<T>& product) {
  const Product<T> p = product;  // a copy, which no store through C can change
  constexpr int kLanes = kWidth<Acc<T>>;
  int column = 0;
  for (; column + kTileColumns * kLanes <= p.columns; column += kTileColumns * kLanes) {
    multiply_rows<T, kLeft, kResult, kTileRows, kTileColumns>(p, 0, column);
  }
  for (; column < p.columns; column += kLanes) {
    multiply_rows<T, kLeft, kResult, kTileRows, 1>(p, 0, column);
  }
}

}  // namespace flash_ext::cpu
