#include "core/registry.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/error.h"

namespace flash_ext {
namespace {

// The folder lib/: the torch door lies in it, the Python module beside it.
std::string library_folder() {
  static const char anchor = 0;
  Dl_info info{};
  dladdr(&anchor, &info);
  char* resolved = realpath(info.dli_fname, nullptr);
  std::string path = resolved ? resolved : info.dli_fname;
  free(resolved);
  path.resize(path.find_last_of('/'));
  const bool inside = path.size() >= 4 && path.compare(path.size() - 4, 4, "/lib") == 0;
  return inside ? path : path + "/lib";
}

std::string cpu_file(const std::string& folder) {
  auto built = [&](const char* file) { return access((folder + "/" + file).c_str(), F_OK) == 0; };
#if defined(__x86_64__)
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4 && __builtin_cpu_supports("avx512bf16") && built("cpu_avx512_bf16.so"))
    return "cpu_avx512_bf16.so";
  if (v4 && built("cpu_avx512.so")) return "cpu_avx512.so";
  if (v3) return "cpu_avx2.so";
#endif
  return "cpu_generic.so";
}

std::string missing_text(const std::string& name, const std::string& file) {
  if (name == "cpu") {
    return "lib/" + file +
           " is missing (x86-64 needs a CPU with AVX2): reinstall, or build from source";
  }
  const char* archs = name == "fa3" ? "90a" : name == "fa2" ? "80" : "75";
  return "not built: lib/" + file + " is missing (build with FLASH_EXT_CUDA_ARCHS=" + archs + ")";
}

BackendEntry load_backend(const std::string& name, const std::string& folder) {
  BackendEntry entry{name, name == "cpu" ? cpu_file(folder) : name + ".so", nullptr, ""};
  const std::string path = folder + "/" + entry.file;
  if (access(path.c_str(), F_OK) != 0) {
    entry.reason = missing_text(name, entry.file);
    return entry;
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* symbol = library ? dlsym(library, kBackendSymbol) : nullptr;
  if (!symbol) {
    entry.reason = "lib/" + entry.file + " does not load: " + dlerror();
    return entry;
  }
  const Backend* table = reinterpret_cast<GetBackend>(symbol)();
  const bool same = table->abi_version == kAbiVersion && table->problem_bytes == sizeof(Problem) &&
                    table->plan_bytes == sizeof(Plan) && table->fwd_bytes == sizeof(FwdTensors) &&
                    table->bwd_bytes == sizeof(BwdTensors) && table->call_bytes == sizeof(Call);
  if (!same) {
    entry.reason = "lib/" + entry.file + " was built for another version of flash_ext: rebuild it";
    return entry;
  }
  entry.table = table;
  return entry;
}

std::vector<BackendEntry> load_all() {
  const std::string folder = library_folder();
  std::vector<BackendEntry> entries;
  for (const char* name : {"fa3", "fa2", "fa1", "cpu"})
    entries.push_back(load_backend(name, folder));
  return entries;
}

Error unknown_backend(const std::string& name) {
  return Error(ErrorKind::kValue, "version must be one of fa3, fa2, fa1, cpu, got " + name);
}

// Empty when the backend can run the problem.
std::string why_not(const BackendEntry& entry, const Problem& problem) {
  if (!entry.table) return entry.reason;
  const Status status = entry.table->why_not(&problem);
  return status.ok() ? "" : status.text;
}

// Null when there is none.
const Backend* first_able(const Problem& problem, const std::string& version) {
  bool known = version.empty();
  for (const BackendEntry& entry : backend_entries()) {
    if (!version.empty() && entry.name != version) continue;
    known = true;
    if (entry.table && entry.table->why_not(&problem).ok()) return entry.table;
  }
  if (!known) throw unknown_backend(version);
  return nullptr;
}

}  // namespace

const std::vector<BackendEntry>& backend_entries() {
  static const std::vector<BackendEntry> entries = load_all();
  return entries;
}

std::string why_not(const std::string& name, const Problem& problem) {
  for (const BackendEntry& entry : backend_entries()) {
    if (entry.name == name) return why_not(entry, problem);
  }
  throw unknown_backend(name);
}

bool can_run(const Problem& problem, const std::string& version) {
  return first_able(problem, version) != nullptr;
}

const Backend& select_backend(const Problem& problem, const std::string& version) {
  if (const Backend* backend = first_able(problem, version)) return *backend;
  std::string reasons;
  for (const auto& [name, reason] : passed_over(problem, version)) {
    if (version.empty() || name == version) reasons += "; " + name + ": " + reason;
  }
  const std::string what = version.empty() ? "no backend can run this problem: "
                                           : "version=" + version + " cannot run this problem: ";
  throw Error(ErrorKind::kUnsupported, what + reasons.substr(2));
}

std::vector<std::pair<std::string, std::string>> passed_over(const Problem& problem,
                                                             const std::string& version) {
  std::vector<std::pair<std::string, std::string>> reasons;
  const char* chosen = nullptr;
  for (const BackendEntry& entry : backend_entries()) {
    std::string reason = why_not(entry, problem);
    if (!version.empty() && entry.name != version) reason = "version=" + version + " was asked for";
    if (reason.empty() && !chosen) {
      chosen = entry.table->name;
      continue;
    }
    if (reason.empty()) reason = std::string("could run it, but ") + chosen + " comes first";
    reasons.emplace_back(entry.name, reason);
  }
  return reasons;
}

}  // namespace flash_ext
