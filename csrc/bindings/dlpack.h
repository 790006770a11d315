// The binary layout of the DLPack exchange protocol, version 1, as its specification gives it.
#pragma once

#include <cstdint>

namespace flash_ext::dlpack {

enum DeviceCode : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Device {
  int32_t type, index;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};

// Capsule "dltensor"; renamed "used_dltensor" by the consumer.
struct ManagedTensor {
  Tensor tensor;
  void* manager_context;
  void (*deleter)(ManagedTensor*);
};

// Capsule "dltensor_versioned"; renamed "used_dltensor_versioned".
struct ManagedTensorVersioned {
  uint32_t major, minor;
  void* manager_context;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor tensor;
};

constexpr uint64_t kReadOnly = 1;

}  // namespace flash_ext::dlpack
