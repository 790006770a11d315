#include "core/build_info.h"

#ifndef FLASH_EXT_VERSION
#define FLASH_EXT_VERSION "unknown"
#endif
#ifndef FLASH_EXT_COMMIT
#define FLASH_EXT_COMMIT "unknown"
#endif
#ifndef FLASH_EXT_ARCHS
#define FLASH_EXT_ARCHS "none"
#endif

namespace flash_ext {

const char* const kVersion = FLASH_EXT_VERSION;
const char* const kCommit = FLASH_EXT_COMMIT;
#ifdef __clang__
const char* const kCompiler = "clang " __clang_version__;
#else
const char* const kCompiler = "gcc " __VERSION__;
#endif
const char* const kArchs = FLASH_EXT_ARCHS;

}  // namespace flash_ext
