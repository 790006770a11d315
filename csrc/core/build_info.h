// How this door was built. The build passes the macros to build_info.cpp alone.
#pragma once

namespace flash_ext {

extern const char* const kVersion;
extern const char* const kCommit;
extern const char* const kCompiler;
extern const char* const kArchs;  // CUDA architectures of the backends built beside it

}  // namespace flash_ext
