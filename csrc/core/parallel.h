// A small parallel loop on std::thread, for callers without a thread pool of their own.
#pragma once

#include "core/backend.h"

namespace flash_ext {

// How many threads parallel_for uses: the cores that this process may run on.
int hardware_threads();

// Splits [begin, end) into at most hardware_threads() pieces of at least grain items, runs each on
// a thread of its own (the first on the caller's) and waits.
void parallel_for(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context);

}  // namespace flash_ext
