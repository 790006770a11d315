#include "core/report.h"

#include "core/build_info.h"
#include "core/device_info.h"
#include "core/error.h"
#include "core/registry.h"

namespace flash_ext {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\', out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += ' ';
    } else {
      out += c;
    }
  }
  return out + '"';
}

// {"key": value, ...} where values are JSON already.
class Object {
 public:
  Object& add(const char* key, const std::string& json) {
    text_ += (text_.empty() ? "" : ", ") + quoted(key) + ": " + json;
    return *this;
  }
  Object& add_text(const char* key, const std::string& text) { return add(key, quoted(text)); }
  Object& add_number(const char* key, long long value) { return add(key, std::to_string(value)); }
  std::string json() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

}  // namespace

std::string backends_json() {
  std::string entries, gpus;
  for (const BackendEntry& entry : backend_entries()) {
    Object object;
    object.add_text("name", entry.name).add("loaded", entry.table ? "true" : "false");
    object.add_text("file", entry.file).add_text("build", entry.table ? entry.table->build : "");
    object.add_text("reason", entry.reason);
    entries += (entries.empty() ? "" : ", ") + object.json();
  }
  const Driver& driver = cuda_driver();
  for (const Driver::Gpu& gpu : driver.gpus) {
    Object object;
    object.add_number("ordinal", gpu.device.ordinal).add_text("name", gpu.name);
    object.add_number("cc", gpu.device.cc).add_number("sm_count", gpu.device.sm_count);
    object.add_number("smem_optin", gpu.device.smem_optin)
        .add_number("l2_bytes", gpu.device.l2_bytes);
    gpus += (gpus.empty() ? "" : ", ") + object.json();
  }
  Object object;
  object.add("backends", "[" + entries + "]").add_text("driver", driver.problem);
  object.add_number("driver_version", driver.version).add("devices", "[" + gpus + "]");
  return object.json();
}

std::string build_info_json() {
  Object object;
  object.add_text("version", kVersion).add_text("commit", kCommit);
  object.add_text("compiler", kCompiler).add_text("archs", kArchs);
  object.add_number("abi_version", kAbiVersion);
  return object.json();
}

std::string plan_json(const Problem& problem, const std::string& version) {
  const Backend& backend = select_backend(problem, version);
  Plan plan{};
  throw_unless_ok(backend.plan(&problem, &plan), backend.name);
  Object others;
  for (const auto& [name, reason] : passed_over(problem, version))
    others.add_text(name.c_str(), reason);
  Object object;
  object.add_text("backend", backend.name);
  object.add("tile", "[" + std::to_string(plan.tile_m) + ", " + std::to_string(plan.tile_n) + "]");
  object.add_number("grid", plan.grid).add_number("workspace_bytes", plan.workspace_bytes);
  object.add_number("smem_bytes", plan.smem).add_number("stages", plan.stages);
  object.add_number("launches", plan.launches).add_text("why", plan.why);
  object.add("passed_over", others.json());
  return object.json();
}

}  // namespace flash_ext
