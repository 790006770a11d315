// The host side of the backward, for the table in backend.cpp.
#pragma once

#include "device/bwd_host.h"

namespace flash_ext::fa2 {

// For problems on a card that fa2 was built for, against which common_why_not has nothing.
extern const device::BwdTable kBackward;

}  // namespace flash_ext::fa2
