// What the library says about itself, as JSON text: one wording for both doors.
#pragma once

#include <string>

#include "core/problem.h"

namespace flash_ext {

std::string backends_json();
std::string build_info_json();

// What fwd or bwd would do with this problem, and why each other backend was passed over.
std::string plan_json(const Problem& problem, const std::string& version);

}  // namespace flash_ext
