// How Volta's operands lie, held on the host against what m8n8k4 does and against the banks of shared
// memory. Built and run by test_cuda_host.py; prints how many reads it tried.
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

// A warp's access of 16 bytes a lane is served eight lanes at a time: they must meet all 32 banks,
// or the same address.
template <typename Address>
int check_banks(Address address) {
  for (int first = 0; first < 32; first += 8) {
    std::set<uint32_t> addresses, groups;
    for (int lane = first; lane < first + 8; ++lane) {
      CHECK(address(lane) % 16 == 0);
      addresses.insert(address(lane));
      groups.insert(address(lane) / 16 % 8);
    }
    CHECK(groups.size() == addresses.size());
  }
  return 1;
}

template <int kHeadDim>
struct Tile {
  static constexpr int kRowBytes = 2 * kHeadDim, kChunks = kHeadDim / 8;
};

template <int kHeadDim>
int check_reads() {
  using Traits = Tile<kHeadDim>;
  using At = VoltaAddress<Traits>;
  using Rows = Swizzle<Traits>;
  int reads = 0;
  for (int d = 0; d < Traits::kChunks; ++d) {
    reads += check_banks([&](int lane) { return Rows::step(At::q(lane), d); });
    reads += check_banks([&](int lane) { return Rows::step(At::k(lane), d); });
    if (d % 4 == 0) {
      for (const bool other : {false, true})
        reads += check_banks([&](int lane) { return Rows::step(At::v(lane, other), d); });
    }
    for (int lane = 0; lane < 32; ++lane) {  // and they find what was put there
      const int row = VoltaLanes::a_row(lane), key = VoltaLanes::b_column(lane);
      CHECK(Rows::step(At::q(lane), d) == QuerySwizzle<Traits>::offset(row, d));
      CHECK(Rows::step(At::k(lane), d) == Rows::offset(key, d));
      if (d % 4 == 0) {
        const int chunk = d + VoltaLanes::b_chunk(lane), v_key = VoltaLanes::b_row(lane);
        CHECK(Rows::step(At::v(lane, false), d) + 8 * Traits::kRowBytes ==
              Rows::offset(v_key + 8, chunk));
        CHECK(Rows::step(At::v(lane, true), d) == Rows::offset(v_key ^ 4, chunk));
      }
    }
  }
  for (int row = 0; row < 16; ++row) {  // rows that threads store side by side
    for (int chunk = 0; chunk < Traits::kChunks; chunk += Rows::kGroup) {
      auto at = [&](int lane) { return row + lane / Rows::kGroup; };
      reads += check_banks([&](int l) { return Rows::offset(at(l), chunk + l % Rows::kGroup); });
      if (row + 32 / Rows::kGroup > 16 || row % 2) continue;
      reads += check_banks([&](int l) {
        return QuerySwizzle<Traits>::offset(at(l), chunk + l % Rows::kGroup);
      });
    }
  }
  return reads;
}

int main() {
  check_products();
  const int reads = check_reads<32>() + check_reads<64>() + check_reads<96>() + check_reads<128>() +
                    check_reads<192>() + check_reads<256>();
  std::printf("%d accesses\n", reads);
}
