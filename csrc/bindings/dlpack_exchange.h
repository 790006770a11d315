// Tensors in and out of Python through __dlpack__: NumPy, CuPy, JAX, torch, without importing any.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "bindings/dlpack.h"
#include "core/error.h"
#include "core/tensor_view.h"

namespace flash_ext {

namespace py = pybind11;

// A borrowed tensor; holds the producer's memory until it is destroyed.
class Borrowed {
 public:
  Borrowed() = default;

  // Takes any object with __dlpack__; None gives a view that was not given. stream: the CUDA stream
  // on which the caller will read it.
  Borrowed(const char* name, const py::object& object, const py::object& stream,
           bool writable = false);

  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
  py::object owner_;  // what keeps the memory alive
};

// Memory of ours that Python reads and writes through __dlpack__ or the buffer protocol.
class Array : public std::enable_shared_from_this<Array> {
 public:
  Array(std::vector<int64_t> shape, DType dtype);

  void* data() { return data_.get(); }
  TensorView view();
  py::object to_dlpack(const py::object& max_version);
  py::buffer_info buffer();
  py::tuple shape() const;
  const char* dtype_name() const;

 private:
  std::vector<int64_t> shape_, strides_;
  DType dtype_;
  std::shared_ptr<void> data_;
};

}  // namespace flash_ext
