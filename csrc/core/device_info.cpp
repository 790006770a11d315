#include "core/device_info.h"

#include <dlfcn.h>

#include "core/error.h"

namespace flash_ext {
namespace {

// From cuda.h: CUdevice_attribute.
constexpr int kMultiprocessorCount = 16;
constexpr int kL2CacheSize = 38;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;
constexpr int kMaxSharedMemoryOptin = 97;

Driver load_driver() {
  Driver driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    driver.problem = "no NVIDIA driver (libcuda.so.1 cannot be loaded)";
    return driver;
  }
  auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
  auto get_version = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  auto get_count = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
  auto get_name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(library, "cuDeviceGetName"));
  auto get_attribute =
      reinterpret_cast<int (*)(int*, int, int)>(dlsym(library, "cuDeviceGetAttribute"));
  if (!init || !get_version || !get_count || !get_name || !get_attribute) {
    driver.problem = "libcuda.so.1 lacks functions of the CUDA driver";
    return driver;
  }
  const int error = init(0);
  get_version(&driver.version);
  int count = 0;
  if (error != 0 || get_count(&count) != 0) {
    driver.problem =
        "the NVIDIA driver does not start (cuInit gives error " + std::to_string(error) + ")";
    return driver;
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    auto attribute = [&](int which) {
      int value = 0;
      get_attribute(&value, which, ordinal);
      return value;
    };
    char name[128] = "";
    get_name(name, sizeof(name), ordinal);
    Device device{};
    device.type = static_cast<int32_t>(DeviceType::kCuda);
    device.ordinal = ordinal;
    device.cc = 10 * attribute(kComputeCapabilityMajor) + attribute(kComputeCapabilityMinor);
    device.sm_count = attribute(kMultiprocessorCount);
    device.smem_optin = attribute(kMaxSharedMemoryOptin);
    device.l2_bytes = attribute(kL2CacheSize);
    driver.gpus.push_back({device, name});
  }
  if (count == 0) driver.problem = "the NVIDIA driver finds no GPU";
  return driver;
}

struct KnownCard {
  const char* name;
  int cc, sm_count, smem_kib, l2_mib;
};

// One typical card of each compute capability, to plan for a card that is not here.
constexpr KnownCard kKnownCards[] = {
    {"sm_70", 70, 80, 96, 6},       {"sm_75", 75, 40, 64, 4},     {"sm_80", 80, 108, 163, 40},
    {"sm_86", 86, 84, 99, 6},       {"sm_89", 89, 142, 99, 96},   {"sm_90", 90, 132, 227, 50},
    {"sm_100", 100, 148, 227, 126}, {"sm_120", 120, 170, 99, 96},
};

}  // namespace

const Driver& cuda_driver() {
  static const Driver driver = load_driver();
  return driver;
}

Device cpu_device(int threads) {
  Device device{};
  device.type = static_cast<int32_t>(DeviceType::kCpu);
  device.sm_count = threads < 1 ? 1 : threads;
  return device;
}

Device cuda_device(int ordinal) {
  const Driver& driver = cuda_driver();
  for (const Driver::Gpu& gpu : driver.gpus) {
    if (gpu.device.ordinal == ordinal) return gpu.device;
  }
  const std::string why = driver.problem.empty()
                              ? "there are " + std::to_string(driver.gpus.size()) + " GPUs"
                              : driver.problem;
  throw Error(ErrorKind::kRuntime, "GPU " + std::to_string(ordinal) + " cannot be used: " + why);
}

Device device_by_name(const std::string& name, int cpu_threads) {
  if (name == "cpu") return cpu_device(cpu_threads);
  if (name == "cuda") return cuda_device(0);
  if (name.rfind("cuda:", 0) == 0 && name.size() > 5 && name.size() < 8 &&
      name.find_first_not_of("0123456789", 5) == std::string::npos) {
    return cuda_device(std::stoi(name.substr(5)));
  }
  std::string known;
  for (const KnownCard& card : kKnownCards) {
    if (name == card.name) {
      return {static_cast<int32_t>(DeviceType::kCuda),
              0,
              card.cc,
              card.sm_count,
              card.smem_kib << 10,
              card.l2_mib << 20};
    }
    known += std::string(", ") + card.name;
  }
  throw Error(ErrorKind::kValue,
              "device must be one of cpu, cuda, cuda:N" + known + ", got " + name);
}

}  // namespace flash_ext
