// How Volta's operands lie, held on the host against what m8n8k4 does and against the banks of shared
// memory. Built and run by test_cuda_host.py; prints how many accesses it tried.
#include <cstdio>
#include <cstdlib>
#include <set>

#include "fa1/volta_lanes.cuh"

using namespace flash_ext::fa1;

#define CHECK(condition)                                   \
  if (!(condition)) {                                      \
    std::printf("line %d: %s\n", __LINE__, #condition);    \
    std::exit(1);                                          \
  }

// The instruction: lane l of quad-pair p has row r of A, column r of B (row r % 4 of B by rows), and
// C's i-th value.
int lane_of(int pair, int r) { return 4 * pair + r % 4 + r / 4 * 16; }
int c_row(int lane, int i) { return lane % 2 + i / 2 % 2 * 2 + lane / 16 * 4; }
int c_column(int lane, int i) { return i % 2 + lane / 2 % 2 * 2 + i / 4 * 4; }

void check_products() {
  std::set<std::pair<int, int>> seen;
  for (int lane = 0; lane < 32; ++lane) {
    const int pair = lane / 4 % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = VoltaLanes::row(lane) + i / 2 % 2 * 8,
                column = 2 * VoltaLanes::column_pair(lane) + i % 2 + i / 4 * 8;
      CHECK(row == VoltaLanes::a_row(lane_of(pair, c_row(lane, i))));
      CHECK(column == VoltaLanes::b_column(lane_of(pair, c_column(lane, i))));
      CHECK(seen.emplace(row, column).second);
    }
    for (const int next : {VoltaLanes::kNextPair, VoltaLanes::kNextTwoPairs}) {
      CHECK(VoltaLanes::row(lane ^ next) == VoltaLanes::row(lane));
    }
    CHECK(VoltaLanes::column_pair(lane ^ 2) == (VoltaLanes::column_pair(lane) ^ 1));
    CHECK(VoltaLanes::column_pair(lane ^ 4) == (VoltaLanes::column_pair(lane) ^ 2));
    // P's keys of step k that a lane has are those whose V it reads: b_row of the lanes of its
    // quad-pair, in their order, are the columns of C.
    for (int r = 0; r < 4; ++r) {
      CHECK(VoltaLanes::b_row(lane_of(pair, r)) == VoltaLanes::b_column(lane_of(pair, r)) % 8);
    }
  }
  CHECK(seen.size() == 256);
}

// An access of a warp is served 128 bytes at a time: 16 bytes of 8 lanes, or 8 bytes of 16. They must
// meet all banks, or the same address.
template <int kBytes = 16, typename Address>
int check_banks(Address address) {
  constexpr int kLanes = 128 / kBytes;
  for (int first = 0; first < 32; first += kLanes) {
    std::set<uint32_t> addresses, groups;
    for (int lane = first; lane < first + kLanes; ++lane) {
      CHECK(address(lane) % kBytes == 0);
      addresses.insert(address(lane));
      groups.insert(address(lane) / kBytes % kLanes);
    }
    CHECK(groups.size() == addresses.size());
  }
  return 1;
}

template <int kColumns>
struct Tile {
  static constexpr int kRowBytes = 2 * kColumns, kChunks = kColumns / 8;
};

template <int kHeadDim>
int check_reads() {
  using Traits = Tile<kHeadDim>;
  using At = VoltaAddress<Traits>;
  using Rows = Swizzle<Traits>;
  int reads = 0;
  for (int d = 0; d < Traits::kChunks; ++d) {
    reads += check_banks([&](int lane) { return Rows::step(At::a(lane), d); });
    reads += check_banks([&](int lane) { return Rows::step(At::b(lane), d); });
    for (const bool other : {false, true}) {
      if (d % 4 == 0) reads += check_banks([&](int lane) { return At::b_rows(lane, d, other); });
    }
    for (int four = 0; four < 16 && d % 2 == 0; four += 4) {
      reads += check_banks<8>(
          [&](int lane) { return RowsOfA<Traits>::down(At::four_rows(lane, d), four); });
    }
    for (int lane = 0; lane < 32; ++lane) {  // and they find what was put there
      const int row = VoltaLanes::a_row(lane), key = VoltaLanes::b_column(lane);
      CHECK(Rows::step(At::a(lane), d) == RowsOfA<Traits>::offset(row, d));
      CHECK(Rows::step(At::b(lane), d) == Rows::offset(key, d));
      for (int four = 0; four < 16 && d % 2 == 0; four += 4) {
        CHECK(RowsOfA<Traits>::down(At::four_rows(lane, d), four) ==
              RowsOfA<Traits>::offset(four + lane % 4, d + lane / 16) + lane / 4 % 2 * 8);
      }
      if (d % 4) continue;
      const int chunk = d + VoltaLanes::b_chunk(lane), b_row = VoltaLanes::b_row(lane);
      CHECK(Rows::step(At::b_rows(lane, 0, false), d) + 8 * Traits::kRowBytes ==
            Rows::offset(b_row + 8, chunk));
      CHECK(Rows::step(At::b_rows(lane, 0, true), d) == Rows::offset(b_row ^ 4, chunk));
    }
  }
  for (int row = 0; row < 16; ++row) {  // rows that threads store side by side
    for (int chunk = 0; chunk < Traits::kChunks; chunk += Rows::kGroup) {
      auto at = [&](int lane) { return row + lane / Rows::kGroup; };
      reads += check_banks([&](int l) { return Rows::offset(at(l), chunk + l % Rows::kGroup); });
      if (row + 32 / Rows::kGroup > 16 || row % 2) continue;
      reads += check_banks([&](int l) {
        return RowsOfA<Traits>::offset(at(l), chunk + l % Rows::kGroup);
      });
    }
  }
  return reads;
}

// dS^T goes to shared memory with its 16 queries in the order that makes dQ's rows g and g + 8.
int check_ds() {
  using Ds = Tile<32>;
  int accesses = 0;
  for (int n = 0; n < 2; ++n) {
    accesses += check_banks([&](int lane) {
      return Swizzle<Ds>::step(RowsOfA<Ds>::offset(VoltaLanes::a_row(lane), lane / 4 % 2), 2 * n);
    });
    for (int four = 0; four < 16; four += 4) {
      accesses += check_banks<8>([&](int lane) {
        return RowsOfA<Ds>::down(VoltaAddress<Ds>::four_columns(lane, 2 * n), four);
      });
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      // Of A's rows the one that makes this value of C: in which chunk, which 8 bytes, which of four.
      const int r = c_row(lane, i), chunk = r / 4, half = lane / 8 % 2, slot = r % 4;
      // A lane with that half of the columns stored steps 0, 2, 0, 2: columns {0, 1} of each, then
      // {2, 3}.
      const int stored = 4 * chunk + slot / 2 * 8 + 2 * half + slot % 2;
      CHECK(stored == VoltaLanes::row(lane) + i / 2 % 2 * 8);
    }
  }
  return accesses;
}

int main() {
  check_products();
  const int accesses = check_reads<32>() + check_reads<64>() + check_reads<96>() +
                       check_reads<128>() + check_reads<192>() + check_reads<256>() + check_ds();
  std::printf("%d accesses\n", accesses);
}
