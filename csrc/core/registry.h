// Finds, loads and chooses backends. Each is a shared library beside this one, in lib/.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"

namespace flash_ext {

struct BackendEntry {
  std::string name;      // "cpu", "fa1", "fa2", "fa3"
  std::string file;      // the file's name, also when it is missing
  const Backend* table;  // null when it could not be loaded
  std::string reason;    // then: why not, one sentence
};

// In order of preference: fa3, fa2, fa1, cpu. Loaded on the first call.
const std::vector<BackendEntry>& backend_entries();

// Whether select_backend would find one.
bool can_run(const Problem& problem, const std::string& version);

// The first backend that can run the problem, or the one that version names ("": any). Throws an
// Error that lists everybody's reasons when there is none.
const Backend& select_backend(const Problem& problem, const std::string& version);

// Why the named backend cannot run the problem; empty when it can.
std::string why_not(const std::string& name, const Problem& problem);

// Why each backend other than the chosen one was passed over: (name, sentence).
std::vector<std::pair<std::string, std::string>> passed_over(const Problem& problem,
                                                             const std::string& version);

}  // namespace flash_ext
