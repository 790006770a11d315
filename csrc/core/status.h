// What crosses the border of a backend instead of an exception: a code and a sentence.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

namespace flash_ext {

enum class Code : int32_t {
  kOk = 0,
  kUnsupported = 1,  // the problem is valid, this backend cannot do it
  kInvalid = 2,      // the arguments break a rule
  kCudaError = 3,    // text names the error, the kernel and the line
};

struct Status {
  int32_t code;
  char text[504];  // one sentence, without the "flash_ext: " prefix; empty when ok

  bool ok() const { return code == static_cast<int32_t>(Code::kOk); }
};

inline Status ok_status() { return Status{}; }

__attribute__((format(printf, 2, 3))) inline Status make_status(Code code, const char* format,
                                                                ...) {
  Status status{};
  status.code = static_cast<int32_t>(code);
  va_list args;
  va_start(args, format);
  vsnprintf(status.text, sizeof(status.text), format, args);
  va_end(args);
  return status;
}

}  // namespace flash_ext
