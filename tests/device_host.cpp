// The device layer's plain functions, held against brute force on the host. Built and run by
// test_cuda_host.py; prints how many cases it tried.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <vector>

#include "device/tile_scheduler.cuh"

using namespace flash_ext::device;

#define CHECK(condition)                                   \
  if (!(condition)) {                                      \
    std::printf("line %d: %s\n", __LINE__, #condition);    \
    std::exit(1);                                          \
  }

template <int kBlockN>
int check_block_range(std::mt19937& random) {
  auto pick = [&](int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); };
  const int seqlen_q = pick(1, 300), seqlen_k = pick(0, 300);
  const Visible visible{seqlen_k, random() % 2 ? seqlen_k - seqlen_q : 0, pick(-1, 80), pick(-1, 80)};
  const int m_begin = pick(0, seqlen_q - 1), m_end = pick(m_begin + 1, seqlen_q);
  const BlockRange range = block_range<kBlockN>(visible, m_begin, m_end);
  for (int n = 0; n <= seqlen_k / kBlockN + 1; ++n) {
    bool any = false, all = true;
    for (int i = m_begin; i < m_end; ++i) {
      for (int j = n * kBlockN; j < (n + 1) * kBlockN; ++j) {
        const int shifted = i + visible.offset;
        const bool left = visible.window_left < 0 || j >= shifted - visible.window_left;
        const bool right = visible.window_right < 0 || j <= shifted + visible.window_right;
        const bool sees = j < seqlen_k && left && right;
        CHECK(sees == (j >= visible.begin(i) && j < visible.end(i)));
        any |= sees;
        all &= sees;
      }
    }
    const bool inside = n >= range.min && n < range.max;
    const bool unmasked = inside && n >= range.full_min && n < range.full_max;
    CHECK(!any || inside);    // no visible key is left out
    CHECK(!unmasked || all);  // and no hidden one is taken without the mask
    if (inside && all) CHECK(unmasked);
  }
  return 1;
}

template <int kBlockM>
int check_packed_rows(std::mt19937& random) {
  const int batch = random() % 6;
  std::vector<int32_t> cu{static_cast<int32_t>(random() % 200)};
  for (int i = 0; i < batch; ++i) cu.push_back(cu.back() + random() % 3 * (random() % 300));
  const int64_t total = cu.back() + random() % 300;
  const PackedRows rows{cu.data(), batch, total};
  std::vector<int> written(total, 0);
  for (int slot = 0; slot < packed_slots(total, batch, kBlockM); ++slot) {
    const int s = rows.sequence_of<kBlockM>(slot);
    CHECK(s >= 0 && s <= batch + 1);
    const int64_t block = slot - rows.first_slot<kBlockM>(s);
    CHECK(block >= 0);
    for (int64_t r = block * kBlockM; r < (block + 1) * kBlockM; ++r) {
      if (r < rows.start(s + 1) - rows.start(s)) ++written[rows.start(s) + r];
    }
  }
  for (const int times : written) CHECK(times == 1);  // every row once, those outside sequences too
  return 1;
}

int check_scheduler(std::mt19937& random) {
  TileScheduler scheduler{};
  scheduler.m_slots = 1 + random() % 9;
  scheduler.lanes = 1 + random() % 9;
  scheduler.lanes_per_group = 1 + random() % scheduler.lanes;
  scheduler.longest_first = random() % 2;
  std::set<std::pair<int, int>> seen;
  for (uint32_t tile = 0; tile < scheduler.m_slots * scheduler.lanes; ++tile) {
    int lane, slot;
    scheduler.decode(tile, &lane, &slot);
    CHECK(lane >= 0 && lane < int(scheduler.lanes));
    CHECK(slot >= 0 && slot < int(scheduler.m_slots));
    CHECK(seen.emplace(lane, slot).second);
  }
  return 1;
}

int check_columns_below(std::mt19937& random) {
  const int column = static_cast<int>(random() % 300) - 20;
  uint32_t expected = 0;
  for (int bit = 0; bit < 32; ++bit) expected |= uint32_t{bit / 2 * 8 + bit % 2 < column} << bit;
  CHECK(columns_below(column) == expected);
  return 1;
}

int main(int, char** arguments) {
  std::mt19937 random(std::atoi(arguments[1]));
  int cases = 0;
  for (int i = 0; i < 2000; ++i) {
    cases += check_block_range<64>(random) + check_block_range<128>(random) + check_block_range<112>(random);
    cases += check_packed_rows<64>(random) + check_packed_rows<128>(random) + check_packed_rows<192>(random);
    cases += check_scheduler(random) + check_columns_below(random);
  }
  std::printf("%d cases\n", cases);
}
