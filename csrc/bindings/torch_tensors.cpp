#include "bindings/torch_tensors.h"

namespace flash_ext {
namespace {

constexpr int64_t kChunk = 8;

DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Int:
      return DType::kInt32;
    case ScalarType::Long:
      return DType::kInt64;
    default:
      return DType::kOther;
  }
}

std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(type);
  }
}

}  // namespace

TensorView view_of(const Tensor& tensor) {
  TensorView view;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  view.ndim = static_cast<int>(sizes.size());
  for (int i = 0; i < view.ndim && i < kMaxDims; ++i) {
    view.sizes[i] = sizes[i];
    view.strides[i] = strides[i];
  }
  view.dtype = dtype_of(tensor.scalar_type());
  view.dtype_name = dtype_name(tensor.scalar_type());
  const torch::stable::Device device = tensor.device();
  view.device_index = device.index();
  switch (device.type()) {
    case torch::headeronly::DeviceType::CPU:
      view.device_index = 0;
      break;
    case torch::headeronly::DeviceType::CUDA:
      view.device_type = DeviceType::kCuda;
      view.device_name = "cuda:" + std::to_string(device.index());
      break;
    default:
      view.device_type = DeviceType::kOther;
      view.has_data = device.type() != torch::headeronly::DeviceType::Meta;
      view.device_name = view.has_data ? "another device" : "meta";
      break;
  }
  if (view.has_data) view.data = tensor.data_ptr();
  return view;
}

TensorView view_of(const std::optional<Tensor>& tensor) {
  return tensor ? view_of(*tensor) : TensorView{};
}

Tensor readable(const Tensor& tensor) {
  if (usable_in_place(view_of(tensor))) return tensor;
  const Tensor copy = torch::stable::contiguous(tensor);
  return usable_in_place(view_of(copy)) ? copy : torch::stable::clone(copy);
}

Tensor empty_beside(const Tensor& like, const int64_t* sizes, int ndim,
                    std::optional<ScalarType> dtype) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes, ndim),
                                  dtype);
}

int32_t padded_columns(int64_t columns) {
  return static_cast<int32_t>((columns + kChunk - 1) / kChunk * kChunk);
}

Tensor pad_columns(const Tensor& tensor) {
  const int64_t columns = tensor.size(tensor.dim() - 1), more = padded_columns(columns) - columns;
  return more == 0 ? tensor : torch::stable::pad(tensor, {0, more});
}

Tensor drop_columns(const Tensor& tensor, int64_t columns) {
  if (tensor.size(tensor.dim() - 1) == columns) return tensor;
  Tensor padded = tensor;
  return torch::stable::contiguous(torch::stable::narrow(padded, tensor.dim() - 1, 0, columns));
}

bool needs_padding(const Problem& problem, const TensorView& q) {
  return q.device_type == DeviceType::kCuda &&
         (problem.head_dim % kChunk || problem.head_dim_v % kChunk);
}

ScalarType accumulator_type(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

}  // namespace flash_ext
