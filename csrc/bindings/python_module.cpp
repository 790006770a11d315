// The door without torch: flash_ext._C, for any array that speaks DLPack. The same checks, the same
// backends and the same texts as the torch door.
#include <pybind11/pybind11.h>

#include <cstdlib>
#include <map>

#include "bindings/dlpack_exchange.h"
#include "core/checks.h"
#include "core/device_info.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/report.h"

namespace flash_ext {
namespace {

// Keyword arguments, taken by name; whatever is left at the end is an error.
class Keywords {
 public:
  Keywords(const char* function, const py::kwargs& kwargs)
      : function_(function), rest_(kwargs.attr("copy")()) {}

  py::object take(const char* name) { return rest_.attr("pop")(name, py::none()); }

  template <typename T>
  std::optional<T> take_optional(const char* name, const char* kind) {
    const py::object value = take(name);
    if (value.is_none()) return std::nullopt;
    try {
      return value.cast<T>();
    } catch (const py::cast_error&) {
      throw Error(ErrorKind::kType, std::string(name) + " must be " + kind + ", got " +
                                        Py_TYPE(value.ptr())->tp_name);
    }
  }

  template <typename T>
  T take_or(const char* name, const char* kind, T otherwise) {
    return take_optional<T>(name, kind).value_or(otherwise);
  }

  void done() const {
    for (const auto& item : rest_) {
      throw Error(ErrorKind::kType, std::string(function_) + " has no argument " +
                                        py::str(item.first).cast<std::string>());
    }
  }

 private:
  const char* function_;
  py::dict rest_;
};

// One call's arguments: the arrays are held until it is over.
struct Arguments {
  Borrowed q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks,
      rng_state;
  Options options;
  std::string version;
  py::object stream;
  int threads;

  Inputs inputs() const { return {q.view(), k.view(), v.view()}; }
};

Arguments take_arguments(const py::object& q, const py::object& k, const py::object& v,
                         Keywords& keywords) {
  Arguments a;
  a.stream = keywords.take("stream");
  const py::object dlpack_stream =
      a.stream.is_none() ? py::int_(1) : a.stream;  // 1: the default stream
  auto borrow = [&](const char* name) {
    return Borrowed(name, keywords.take(name), dlpack_stream);
  };
  a.q = Borrowed("q", q, dlpack_stream);
  a.k = Borrowed("k", k, dlpack_stream);
  a.v = Borrowed("v", v, dlpack_stream);
  for (auto [name, view] : {std::pair<const char*, const TensorView&>{"q", a.q.view()},
                            {"k", a.k.view()},
                            {"v", a.v.view()}}) {
    if (!view.given())
      throw Error(ErrorKind::kType, std::string(name) + " must be an array, got None");
  }
  a.cu_seqlens_q = borrow("cu_seqlens_q");
  a.cu_seqlens_k = borrow("cu_seqlens_k");
  a.seqused_q = borrow("seqused_q");
  a.seqused_k = borrow("seqused_k");
  a.alibi_slopes = borrow("alibi_slopes");
  a.sinks = borrow("sinks");
  a.rng_state = borrow("rng_state");
  Options& o = a.options;
  o.cu_seqlens_q = a.cu_seqlens_q.view(), o.cu_seqlens_k = a.cu_seqlens_k.view();
  o.seqused_q = a.seqused_q.view(), o.seqused_k = a.seqused_k.view();
  o.alibi_slopes = a.alibi_slopes.view(), o.sinks = a.sinks.view(),
  o.rng_state = a.rng_state.view();
  o.max_seqlen_q = keywords.take_optional<int64_t>("max_seqlen_q", "an int");
  o.max_seqlen_k = keywords.take_optional<int64_t>("max_seqlen_k", "an int");
  o.softmax_scale = keywords.take_optional<double>("softmax_scale", "a float");
  o.causal = keywords.take_or<bool>("causal", "a bool", false);
  o.window_left = keywords.take_or<int64_t>("window_left", "an int", -1);
  o.window_right = keywords.take_or<int64_t>("window_right", "an int", -1);
  o.softcap = keywords.take_or<double>("softcap", "a float", 0.0);
  o.dropout_p = keywords.take_or<double>("dropout_p", "a float", 0.0);
  o.top_left = keywords.take_or<bool>("top_left", "a bool", false);
  o.deterministic = keywords.take_or<bool>("deterministic", "a bool", false);
  a.version = keywords.take_or<std::string>("version", "a str", "");
  a.threads = hardware_threads();
  return a;
}

Device device_of(const Arguments& a) {
  const TensorView& q = a.q.view();
  return q.device_type == DeviceType::kCuda ? cuda_device(q.device_index) : cpu_device(a.threads);
}

// Runs a backend with a workspace of its own.
template <typename Tensors>
void run(const Problem& problem, const Tensors& tensors, const Arguments& a,
         Status (*Backend::*entry)(const Problem*, const Tensors*, const Call*)) {
  const Backend& backend = select_backend(problem, a.version);
  Plan plan{};
  throw_unless_ok(backend.plan(&problem, &plan), backend.name);
  void* stream = a.stream.is_none() ? nullptr : reinterpret_cast<void*>(a.stream.cast<uintptr_t>());
  Call call{stream, nullptr, plan.workspace_bytes, parallel_for};
  py::gil_scoped_release release;
  if (plan.workspace_bytes > 0) {
    throw_unless_ok(backend.alloc(&problem.device, plan.workspace_bytes, stream, &call.workspace),
                    backend.name);
  }
  const Status status = (backend.*entry)(&problem, &tensors, &call);
  if (call.workspace) backend.free(&problem.device, call.workspace, stream);
  throw_unless_ok(status, backend.name);
}

template <typename Tensors>
void fill_pointers(const Arguments& a, Tensors& t) {
  t.q = a.q.view().data, t.k = a.k.view().data, t.v = a.v.view().data;
  t.cu_seqlens_q = static_cast<const int32_t*>(a.cu_seqlens_q.view().data);
  t.cu_seqlens_k = static_cast<const int32_t*>(a.cu_seqlens_k.view().data);
  t.seqused_q = static_cast<const int32_t*>(a.seqused_q.view().data);
  t.seqused_k = static_cast<const int32_t*>(a.seqused_k.view().data);
  t.alibi_slopes = static_cast<const float*>(a.alibi_slopes.view().data);
  t.sinks = a.sinks.view().data;
  t.rng_state = static_cast<const int64_t*>(a.rng_state.view().data);
}

// An output: the caller's array, or a new one on the CPU.
struct Output {
  Borrowed borrowed;
  py::object object;
  TensorView view;
};

Output make_output(const char* name, const py::object& given, const Arguments& a,
                   const int64_t* sizes, int ndim, DType dtype) {
  Output output;
  if (!given.is_none()) {
    output.borrowed = Borrowed(name, given, a.stream.is_none() ? py::int_(1) : a.stream, true);
    output.object = given;
    output.view = output.borrowed.view();
    return output;
  }
  if (a.q.view().device_type != DeviceType::kCpu) {
    throw Error(
        ErrorKind::kValue,
        std::string(name) + " must be given on a GPU: this door does not allocate there, got None");
  }
  auto array = std::make_shared<Array>(std::vector<int64_t>(sizes, sizes + ndim), dtype);
  output.view = array->view();
  output.object = py::cast(array);
  return output;
}

py::tuple fwd(const py::object& q, const py::object& k, const py::object& v,
              const py::kwargs& kwargs) {
  Keywords keywords("fwd", kwargs);
  const py::object out_given = keywords.take("out"), lse_given = keywords.take("lse");
  const Arguments a = take_arguments(q, k, v, keywords);
  keywords.done();
  Problem problem = check_forward(a.inputs(), a.options);
  const OutputShapes shapes = output_shapes(problem);
  const DType dtype = a.q.view().dtype;
  Output out = make_output("out", out_given, a, shapes.out, shapes.out_ndim, dtype);
  Output lse =
      make_output("lse", lse_given, a, shapes.lse, shapes.lse_ndim, accumulator_dtype(dtype));
  check_outputs(a.q.view(), out.view, lse.view, problem);
  problem.device = device_of(a);
  FwdTensors tensors{};
  fill_pointers(a, tensors);
  tensors.out = out.view.data, tensors.lse = lse.view.data;
  run(problem, tensors, a, &Backend::fwd);
  return py::make_tuple(out.object, lse.object);
}

py::tuple bwd(const py::object& dout, const py::object& d_lse, const py::object& q,
              const py::object& k, const py::object& v, const py::object& out,
              const py::object& lse, const py::kwargs& kwargs) {
  Keywords keywords("bwd", kwargs);
  const py::object dq_given = keywords.take("dq"), dk_given = keywords.take("dk"),
                   dv_given = keywords.take("dv");
  const py::object d_sink_given = keywords.take("d_sink");
  const Arguments a = take_arguments(q, k, v, keywords);
  keywords.done();
  const py::object stream = a.stream.is_none() ? py::int_(1) : a.stream;
  const Borrowed dout_in("dout", dout, stream), d_lse_in("d_lse", d_lse, stream),
      out_in("out", out, stream), lse_in("lse", lse, stream);
  const Inputs inputs = a.inputs();
  Problem problem = check_backward(
      inputs, {dout_in.view(), d_lse_in.view(), out_in.view(), lse_in.view()}, a.options);
  const DType dtype = inputs.q.dtype;
  Output dq = make_output("dq", dq_given, a, inputs.q.sizes, inputs.q.ndim, dtype);
  Output dk = make_output("dk", dk_given, a, inputs.k.sizes, inputs.k.ndim, dtype);
  Output dv = make_output("dv", dv_given, a, inputs.v.sizes, inputs.v.ndim, dtype);
  problem.dq = check_gradient("dq", dq.view, inputs.q);
  problem.dk = check_gradient("dk", dk.view, inputs.k);
  problem.dv = check_gradient("dv", dv.view, inputs.v);
  const int64_t sinks = problem.has_sinks ? problem.nheads : 0;
  Output d_sink = make_output("d_sink", d_sink_given, a, &sinks, 1, accumulator_dtype(dtype));
  if (problem.has_sinks && !d_sink_given.is_none())
    check_gradient("d_sink", d_sink.view, a.sinks.view());
  problem.device = device_of(a);
  BwdTensors tensors{};
  fill_pointers(a, tensors);
  tensors.dout = dout_in.view().data, tensors.d_lse = d_lse_in.view().data;
  tensors.out = out_in.view().data, tensors.lse = lse_in.view().data;
  tensors.dq = dq.view.data, tensors.dk = dk.view.data, tensors.dv = dv.view.data;
  if (problem.has_sinks) tensors.d_sink = d_sink.view.data;
  run(problem, tensors, a, &Backend::bwd);
  return py::make_tuple(dq.object, dk.object, dv.object, d_sink.object);
}

// The problem that plan and why_not talk about; device=None is q's.
Problem described(const char* function, const py::object& q, const py::object& k,
                  const py::object& v, const py::kwargs& kwargs, std::string* version) {
  Keywords keywords(function, kwargs);
  const bool backward = keywords.take_or<bool>("backward", "a bool", false);
  const auto device = keywords.take_optional<std::string>("device", "a str");
  const Arguments a = take_arguments(q, k, v, keywords);
  keywords.done();
  Problem problem = check_forward(a.inputs(), a.options);
  if (backward) describe_backward(problem);
  problem.device = device ? device_by_name(*device, a.threads) : device_of(a);
  *version = a.version;
  return problem;
}

py::object from_json(const std::string& text) {
  return py::module_::import("json").attr("loads")(text);
}

py::object plan(const py::object& q, const py::object& k, const py::object& v,
                const py::kwargs& kwargs) {
  std::string version;
  const Problem problem = described("plan", q, k, v, kwargs, &version);
  return from_json(plan_json(problem, version));
}

py::object why_not_backend(const std::string& backend, const py::object& q, const py::object& k,
                           const py::object& v, const py::kwargs& kwargs) {
  std::string version;
  const std::string reason = why_not(backend, described("why_not", q, k, v, kwargs, &version));
  return reason.empty() ? py::object(py::none()) : py::object(py::str(reason));
}

void raise(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kType:
      PyErr_SetString(PyExc_TypeError, error.what());
      break;
    case ErrorKind::kValue:
      PyErr_SetString(PyExc_ValueError, error.what());
      break;
    case ErrorKind::kUnsupported:
      PyErr_SetString(PyExc_NotImplementedError, error.what());
      break;
    case ErrorKind::kRuntime:
      PyErr_SetString(PyExc_RuntimeError, error.what());
      break;
  }
}

constexpr const char* kFwdDoc = R"(fwd(q, k, v, **options) -> (out, lse)

Exact attention on arrays that speak DLPack (NumPy, CuPy, JAX, torch), without torch.

q (batch, seqlen_q, nheads, head_dim), k (batch, seqlen_k, nheads_k, head_dim), v (batch, seqlen_k,
nheads_k, head_dim_v); packed (total, nheads, head_dim) with cu_seqlens_q / cu_seqlens_k. float16,
bfloat16, float32 or float64 on the CPU; the last dimension contiguous.
Options, all by keyword: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k (int32 arrays), max_seqlen_q,
max_seqlen_k, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes (float32),
sinks (float32, nheads), dropout_p, rng_state (int64, 2), top_left, version, stream, and out= and
lse= to write into (required on a GPU).
Returns out (dtype of q) and lse (float32; float64 for float64 inputs) as arrays with __dlpack__.
Raises TypeError, ValueError or NotImplementedError with the argument, the rule, expected and got.)";

constexpr const char* kBwdDoc =
    R"(bwd(dout, d_lse, q, k, v, out, lse, **options) -> (dq, dk, dv, d_sink)

Gradients of fwd; takes its options, deterministic, and dq=, dk=, dv=, d_sink= to write into (required
on a GPU). d_lse may be None. d_sink has no elements without sinks.)";

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(_C, m) {
  using namespace flash_ext;
  m.doc() = "flash_ext without torch: attention on DLPack arrays, and what this build can do.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });
  py::class_<Array, std::shared_ptr<Array>>(
      m, "Array", py::buffer_protocol(),
      "An output: read it through __dlpack__ or the buffer protocol.")
      .def_buffer(&Array::buffer)
      .def_property_readonly("shape", &Array::shape)
      .def_property_readonly("dtype", &Array::dtype_name)
      .def("__dlpack__",
           [](Array& self, const py::kwargs& kwargs) {
             return self.to_dlpack(kwargs.contains("max_version")
                                       ? py::object(kwargs["max_version"])
                                       : py::object(py::none()));
           })
      .def("__dlpack_device__",
           [](const Array&) { return py::make_tuple(static_cast<int>(dlpack::kCpu), 0); })
      .def("__repr__", [](const Array& self) {
        return "flash_ext._C.Array(shape=" + py::repr(self.shape()).cast<std::string>() +
               ", dtype=" + self.dtype_name() + ")";
      });
  m.def("fwd", &fwd, py::arg("q"), py::arg("k"), py::arg("v"), kFwdDoc);
  m.def("bwd", &bwd, py::arg("dout"), py::arg("d_lse"), py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("out"), py::arg("lse"), kBwdDoc);
  m.def("plan", &plan, py::arg("q"), py::arg("k"), py::arg("v"),
        "plan(q, k, v, **options) -> dict: what fwd (backward=True: bwd) would do, and why other "
        "backends were passed over.");
  m.def(
      "why_not", &why_not_backend, py::arg("backend"), py::arg("q"), py::arg("k"), py::arg("v"),
      "why_not(backend, q, k, v, **options) -> str or None: why a backend cannot run the problem.");
  m.def(
      "backends", [] { return from_json(backends_json()); },
      "Backends, driver and GPUs of this machine, as a dict.");
  m.def(
      "build_info", [] { return from_json(build_info_json()); },
      "How this module was built, as a dict.");
}
