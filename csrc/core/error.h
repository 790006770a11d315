// The one exception of core and the doors. A backend never throws: it returns a Status.
#pragma once

#include <stdexcept>
#include <string>

#include "core/status.h"

namespace flash_ext {

enum class ErrorKind {
  kType,         // wrong dtype or kind of object: TypeError in Python
  kValue,        // a broken rule: ValueError
  kUnsupported,  // valid, but nothing here can do it: NotImplementedError
  kRuntime,      // it failed while running: RuntimeError
};

// what() is "flash_ext: " and one sentence that names the argument, the rule, expected and got.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& sentence)
      : std::runtime_error("flash_ext: " + sentence), kind_(kind) {}

  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

inline void throw_unless_ok(const Status& status, const char* backend) {
  if (status.ok()) return;
  ErrorKind kind = ErrorKind::kRuntime;
  if (status.code == static_cast<int32_t>(Code::kUnsupported)) kind = ErrorKind::kUnsupported;
  if (status.code == static_cast<int32_t>(Code::kInvalid)) kind = ErrorKind::kValue;
  throw Error(kind, std::string(backend) + ": " + status.text);
}

}  // namespace flash_ext
