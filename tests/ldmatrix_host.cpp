// How rows of K and V lie in shared memory for ldmatrix, held on the host against its banks: what
// eight lanes read or store at once must meet all 32 of them. Built and run by test_cuda_host.py;
// prints how many accesses it tried.
#include <cstdio>
#include <cstdlib>
#include <set>

#include "device/matrix_rows.cuh"

using flash_ext::device::Swizzle;

int accesses = 0;

// An access of 16 bytes a lane, from the place of row(lane) and chunk(lane) `chunks` chunks on.
template <typename Rows, typename Row, typename Chunk>
void check(Row row, Chunk chunk, int chunks) {
  for (int first = 0; first < 32; first += 8) {
    std::set<uint32_t> groups;
    for (int lane = first; lane < first + 8; ++lane) {
      const uint32_t address = Rows::step(Rows::offset(row(lane), chunk(lane)), chunks);
      if (address != Rows::offset(row(lane), chunk(lane) + chunks) || address % 16 != 0) {
        std::printf("row %d, chunk %d + %d: %u\n", row(lane), chunk(lane), chunks, address);
        std::exit(1);
      }
      groups.insert(address / 16 % 8);
    }
    if (groups.size() != 8) {
      std::printf("lanes from %d on meet %zu groups of banks\n", first, groups.size());
      std::exit(1);
    }
  }
  ++accesses;
}

template <int kHeadDim>
struct Tile {
  static constexpr int kRowBytes = 2 * kHeadDim, kChunks = kHeadDim / 8;
};

template <int kHeadDim>
void check_tile() {
  using Traits = Tile<kHeadDim>;
  using Rows = Swizzle<Traits>;
  for (int d = 0; d < Traits::kChunks; d += 2) {
    // Q and V: rows, then chunks; K: chunks, then rows.
    check<Rows>([](int lane) { return lane % 16; }, [](int lane) { return lane / 16; }, d);
    check<Rows>([](int lane) { return lane % 8 + lane / 16 * 8; },
                [](int lane) { return lane / 8 % 2; }, d);
  }
  for (int row = 0; row < 8; row += 32 / Rows::kGroup) {  // what threads store side by side
    check<Rows>([&](int lane) { return row + lane / Rows::kGroup; },
                [](int lane) { return lane % Rows::kGroup; }, 0);
  }
}

int main() {
  check_tile<32>(), check_tile<64>(), check_tile<96>();
  check_tile<128>(), check_tile<192>(), check_tile<256>();
  std::printf("%d accesses\n", accesses);
}
