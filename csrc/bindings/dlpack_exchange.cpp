#include "bindings/dlpack_exchange.h"

#include <cstdlib>

namespace flash_ext {
namespace {

constexpr size_t kAlign = 64;

struct TypeName {
  DType dtype;
  dlpack::DataType type;
  const char* name;
  const char* format;  // of the buffer protocol; null: it has none
};

constexpr TypeName kTypes[] = {
    {DType::kFloat16, {dlpack::kFloat, 16, 1}, "float16", "e"},
    {DType::kBFloat16, {dlpack::kBfloat, 16, 1}, "bfloat16", nullptr},
    {DType::kFloat32, {dlpack::kFloat, 32, 1}, "float32", "f"},
    {DType::kFloat64, {dlpack::kFloat, 64, 1}, "float64", "d"},
    {DType::kInt32, {dlpack::kInt, 32, 1}, "int32", "i"},
    {DType::kInt64, {dlpack::kInt, 64, 1}, "int64", "q"},
};

const TypeName& type_of(DType dtype) {
  for (const TypeName& type : kTypes) {
    if (type.dtype == dtype) return type;
  }
  throw Error(ErrorKind::kType, "a dtype without a DLPack name");
}

std::string unknown_type_name(const dlpack::DataType& type) {
  const char* base = type.code == dlpack::kInt    ? "int"
                     : type.code == dlpack::kUInt ? "uint"
                                                  : "float";
  if (type.code == dlpack::kBool) return "bool";
  return base + std::to_string(type.bits);
}

TensorView view_of(const dlpack::Tensor& tensor) {
  TensorView view;
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.ndim = tensor.ndim;
  view.dtype_name = unknown_type_name(tensor.dtype);
  for (const TypeName& type : kTypes) {
    if (type.type.code != tensor.dtype.code || type.type.bits != tensor.dtype.bits) continue;
    if (tensor.dtype.lanes != 1) continue;
    view.dtype = type.dtype;
    view.dtype_name = type.name;
  }
  int64_t contiguous = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (i < kMaxDims) {
      view.sizes[i] = tensor.shape[i];
      view.strides[i] = tensor.strides ? tensor.strides[i] : contiguous;
    }
    contiguous *= tensor.shape[i];
  }
  view.device_index = 0;
  if (tensor.device.type == dlpack::kCuda || tensor.device.type == dlpack::kCudaManaged) {
    view.device_type = DeviceType::kCuda;
    view.device_index = tensor.device.index;
    view.device_name = "cuda:" + std::to_string(tensor.device.index);
  } else if (tensor.device.type != dlpack::kCpu && tensor.device.type != dlpack::kCudaHost) {
    view.device_type = DeviceType::kOther;
    view.device_name = "DLPack device type " + std::to_string(tensor.device.type);
  }
  return view;
}

// Asks for the versioned capsule first (it says when memory is read-only), then for the plain one.
py::object capsule_of(const char* name, const py::object& object, const py::object& stream) {
  if (PyCapsule_CheckExact(object.ptr())) return object;
  if (!py::hasattr(object, "__dlpack__")) {
    throw Error(ErrorKind::kType,
                std::string(name) +
                    " must be an array with __dlpack__ (NumPy, CuPy, JAX, torch), got " +
                    Py_TYPE(object.ptr())->tp_name);
  }
  py::dict keywords;
  const py::tuple device = object.attr("__dlpack_device__")();
  if (device[0].cast<int>() == dlpack::kCuda) keywords["stream"] = stream;
  try {
    py::dict versioned(**keywords);
    versioned["max_version"] = py::make_tuple(1, 0);
    return object.attr("__dlpack__")(**versioned);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return object.attr("__dlpack__")(**keywords);
}

// Consumes the capsule: whoever holds the returned object holds the memory.
template <typename Managed>
py::object take(PyObject* capsule, const char* name, const char* used_name, Managed** managed) {
  *managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  PyCapsule_SetName(capsule, used_name);
  return py::capsule(*managed, [](void* pointer) {
    auto* owned = static_cast<Managed*>(pointer);
    if (owned->deleter) owned->deleter(owned);
  });
}

template <typename Managed>
struct Exported {
  Managed managed;
  std::shared_ptr<Array> array;
};

// A capsule whose memory the consumer frees through deleter, or Python when nobody consumed it.
template <typename Managed>
py::object export_capsule(const std::shared_ptr<Array>& array, const dlpack::Tensor& tensor,
                          const char* name) {
  auto* exported = new Exported<Managed>{{}, array};
  exported->managed.tensor = tensor;
  exported->managed.manager_context = exported;
  exported->managed.deleter = [](Managed* managed) {
    delete static_cast<Exported<Managed>*>(managed->manager_context);
  };
  if constexpr (std::is_same_v<Managed, dlpack::ManagedTensorVersioned>)
    exported->managed.major = 1;
  PyObject* capsule = PyCapsule_New(&exported->managed, name, [](PyObject* object) {
    const char* current = PyCapsule_GetName(object);
    if (current && current[0] == 'u') return;  // "used_...": the consumer owns it now
    auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(object, current));
    managed->deleter(managed);
  });
  return py::reinterpret_steal<py::object>(capsule);
}

}  // namespace

Borrowed::Borrowed(const char* name, const py::object& object, const py::object& stream,
                   bool writable) {
  if (object.is_none()) return;
  const py::object capsule = capsule_of(name, object, stream);
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    dlpack::ManagedTensorVersioned* managed = nullptr;
    owner_ = take(capsule.ptr(), "dltensor_versioned", "used_dltensor_versioned", &managed);
    if (writable && (managed->flags & dlpack::kReadOnly)) {
      throw Error(ErrorKind::kValue,
                  std::string(name) + " must be writable, got a read-only array");
    }
    view_ = view_of(managed->tensor);
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    dlpack::ManagedTensor* managed = nullptr;
    owner_ = take(capsule.ptr(), "dltensor", "used_dltensor", &managed);
    view_ = view_of(managed->tensor);
  } else {
    throw Error(
        ErrorKind::kType,
        std::string(name) + " must give an unused DLPack capsule, got one that was consumed");
  }
}

Array::Array(std::vector<int64_t> shape, DType dtype)
    : shape_(std::move(shape)), strides_(shape_.size()), dtype_(dtype) {
  int64_t count = 1;
  for (size_t i = shape_.size(); i-- > 0;) {
    strides_[i] = count;
    count *= shape_[i];
  }
  const size_t bytes = (count * element_bytes(dtype) + kAlign) / kAlign * kAlign;
  void* memory = std::aligned_alloc(kAlign, bytes);
  if (!memory) throw std::bad_alloc();
  data_ = std::shared_ptr<void>(memory, std::free);
}

TensorView Array::view() {
  dlpack::Tensor tensor{data(),
                        {dlpack::kCpu, 0},
                        static_cast<int32_t>(shape_.size()),
                        type_of(dtype_).type,
                        shape_.data(),
                        strides_.data(),
                        0};
  return view_of(tensor);
}

py::object Array::to_dlpack(const py::object& max_version) {
  const dlpack::Tensor tensor{data(),
                              {dlpack::kCpu, 0},
                              static_cast<int32_t>(shape_.size()),
                              type_of(dtype_).type,
                              shape_.data(),
                              strides_.data(),
                              0};
  const bool versioned =
      !max_version.is_none() && max_version.cast<py::tuple>()[0].cast<int>() >= 1;
  if (versioned) {
    return export_capsule<dlpack::ManagedTensorVersioned>(shared_from_this(), tensor,
                                                          "dltensor_versioned");
  }
  return export_capsule<dlpack::ManagedTensor>(shared_from_this(), tensor, "dltensor");
}

py::buffer_info Array::buffer() {
  const TypeName& type = type_of(dtype_);
  if (!type.format)
    throw py::buffer_error("flash_ext: bfloat16 has no buffer format: use __dlpack__");
  const int64_t bytes = element_bytes(dtype_);
  std::vector<py::ssize_t> shape(shape_.begin(), shape_.end()), strides;
  for (const int64_t stride : strides_) strides.push_back(stride * bytes);
  return py::buffer_info(data(), bytes, type.format, static_cast<py::ssize_t>(shape.size()), shape,
                         strides);
}

py::tuple Array::shape() const {
  py::tuple shape(shape_.size());
  for (size_t i = 0; i < shape_.size(); ++i) shape[i] = shape_[i];
  return shape;
}

const char* Array::dtype_name() const { return type_of(dtype_).name; }

}  // namespace flash_ext
