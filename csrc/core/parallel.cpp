#include "core/parallel.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace flash_ext {

int hardware_threads() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
  return std::max(1u, std::thread::hardware_concurrency());
}

void parallel_for(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context) {
  const int64_t items = end - begin;
  if (items <= 0) return;
  const int64_t least = std::max<int64_t>(1, grain);
  const int64_t pieces = std::min<int64_t>(hardware_threads(), (items + least - 1) / least);
  const int64_t size = (items + pieces - 1) / pieces;
  std::vector<std::thread> threads;
  for (int64_t at = begin + size; at < end; at += size) {
    threads.emplace_back(body, at, std::min(end, at + size), context);
  }
  body(begin, std::min(end, begin + size), context);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace flash_ext
