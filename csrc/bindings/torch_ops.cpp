// The door for torch: torch.ops.flash_ext.* on torch's stable ABI (2.10 and later), so that one
// binary serves every torch. It turns tensors into views, asks core, and owns every allocation.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "bindings/torch_tensors.h"
#include "core/checks.h"
#include "core/device_info.h"
#include "core/registry.h"
#include "core/report.h"

// In libtorch_cuda, which a CPU-only torch does not have: weak, so that the door loads there too.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace flash_ext {
namespace {

// ---- arguments from torch's boxed stack -------------------------------------------------------

// Takes the arguments off the stack in the order of the schema. Everything is read before the
// first check can throw, so nothing leaks.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : stack_(stack) {}

  template <typename T>
  T next() {
    return torch::stable::detail::to<T>(stack_[position_++]);
  }

  std::optional<Tensor> next_tensor() { return next<std::optional<Tensor>>(); }

 private:
  StableIValue* stack_;
  int position_ = 0;
};

struct OpOptions {
  std::optional<Tensor> cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  std::optional<Tensor> alibi_slopes, sinks, rng_state;
  Options plain;  // the views are filled in by views()

  Options views() const {
    Options options = plain;
    options.cu_seqlens_q = view_of(cu_seqlens_q);
    options.cu_seqlens_k = view_of(cu_seqlens_k);
    options.seqused_q = view_of(seqused_q);
    options.seqused_k = view_of(seqused_k);
    options.alibi_slopes = view_of(alibi_slopes);
    options.sinks = view_of(sinks);
    options.rng_state = view_of(rng_state);
    return options;
  }
};

// The options that every operator has, in the order of kOptions below.
OpOptions next_options(Arguments& arguments) {
  OpOptions o;
  o.cu_seqlens_q = arguments.next_tensor();
  o.cu_seqlens_k = arguments.next_tensor();
  o.seqused_q = arguments.next_tensor();
  o.seqused_k = arguments.next_tensor();
  o.plain.max_seqlen_q = arguments.next<std::optional<int64_t>>();
  o.plain.max_seqlen_k = arguments.next<std::optional<int64_t>>();
  o.plain.softmax_scale = arguments.next<std::optional<double>>();
  o.plain.causal = arguments.next<bool>();
  o.plain.window_left = arguments.next<int64_t>();
  o.plain.window_right = arguments.next<int64_t>();
  o.plain.softcap = arguments.next<double>();
  o.alibi_slopes = arguments.next_tensor();
  o.sinks = arguments.next_tensor();
  o.plain.dropout_p = arguments.next<double>();
  o.rng_state = arguments.next_tensor();
  o.plain.top_left = arguments.next<bool>();
  o.plain.deterministic = arguments.next<bool>();
  return o;
}

// ---- running a backend ------------------------------------------------------------------------

void torch_parallel(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context) {
  torch_parallel_for(begin, end, grain, body, context);
}

Device device_of(const TensorView& q) {
  if (q.device_type == DeviceType::kCuda) return cuda_device(q.device_index);
  return cpu_device(static_cast<int>(torch::stable::get_num_threads()));
}

void* current_stream(const Device& device) {
  if (device.type != static_cast<int32_t>(DeviceType::kCuda)) return nullptr;
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream ||
      aoti_torch_get_current_cuda_stream(device.ordinal, &stream) != 0) {
    throw Error(ErrorKind::kRuntime, "this torch has no CUDA: its current stream cannot be read");
  }
  return stream;
}

// Chooses a backend, gives it the workspace it plans for, and runs it.
template <typename Tensors>
void run(const Problem& problem, const Tensors& tensors, const Tensor& like,
         const std::string& version,
         Status (*Backend::*entry)(const Problem*, const Tensors*, const Call*)) {
  const Backend& backend = select_backend(problem, version);
  Plan plan{};
  throw_unless_ok(backend.plan(&problem, &plan), backend.name);
  constexpr uintptr_t kAlign = 256;
  Call call{current_stream(problem.device), nullptr, plan.workspace_bytes, torch_parallel};
  std::optional<Tensor> workspace;
  if (plan.workspace_bytes > 0) {
    const int64_t bytes = static_cast<int64_t>(plan.workspace_bytes + kAlign);
    workspace = empty_beside(like, &bytes, 1, ScalarType::Byte);
    call.workspace = reinterpret_cast<void*>(
        (reinterpret_cast<uintptr_t>(workspace->data_ptr()) + kAlign - 1) / kAlign * kAlign);
  }
  throw_unless_ok((backend.*entry)(&problem, &tensors, &call), backend.name);
}

template <typename T>
const T* data_of(const TensorView& view) {
  return static_cast<const T*>(view.data);
}

// The pointers that forward and backward share.
template <typename Tensors>
void fill_pointers(const Inputs& in, const Options& o, Tensors& t) {
  t.q = in.q.data, t.k = in.k.data, t.v = in.v.data;
  t.cu_seqlens_q = data_of<int32_t>(o.cu_seqlens_q);
  t.cu_seqlens_k = data_of<int32_t>(o.cu_seqlens_k);
  t.seqused_q = data_of<int32_t>(o.seqused_q);
  t.seqused_k = data_of<int32_t>(o.seqused_k);
  t.alibi_slopes = data_of<float>(o.alibi_slopes);
  t.sinks = o.sinks.data;
  t.rng_state = data_of<int64_t>(o.rng_state);
}

// ---- the operators ----------------------------------------------------------------------------

constexpr const char* kOptions =
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? "
    "seqused_k=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float? softmax_scale=None, bool "
    "causal=False, "
    "int window_left=-1, int window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, "
    "float dropout_p=0.0, Tensor? rng_state=None, bool top_left=False, "
    "bool deterministic=False, str? version=None";

void fwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor q = arguments.next<Tensor>(), k = arguments.next<Tensor>(), v = arguments.next<Tensor>();
  const OpOptions op_options = next_options(arguments);
  const auto version = arguments.next<std::optional<std::string>>();

  q = readable(q), k = readable(k), v = readable(v);
  Inputs inputs{view_of(q), view_of(k), view_of(v)};
  Options options = op_options.views();
  Problem problem = check_forward(inputs, options);
  const int64_t head_dim_v = problem.head_dim_v;
  if (needs_padding(problem, inputs.q)) {
    options.softmax_scale = problem.softmax_scale;  // of the caller's head_dim
    q = pad_columns(q), k = pad_columns(k), v = pad_columns(v);
    inputs = {view_of(q), view_of(k), view_of(v)};
    problem = check_forward(inputs, options);
  }
  const OutputShapes shapes = output_shapes(problem);
  const Tensor out = empty_beside(q, shapes.out, shapes.out_ndim, std::nullopt);
  const Tensor lse = empty_beside(q, shapes.lse, shapes.lse_ndim, accumulator_type(q));
  if (inputs.q.has_data) {
    const Device device = device_of(inputs.q);
    problem.device = device;
    if (!can_run(problem, version.value_or(""))) {
      // A copy may be what it takes: a tensor map cannot step through every stride.
      q = torch::stable::contiguous(q), k = torch::stable::contiguous(k);
      v = torch::stable::contiguous(v);
      inputs = {view_of(q), view_of(k), view_of(v)};
      problem = check_forward(inputs, options);
      problem.device = device;
    }
    FwdTensors tensors{};
    fill_pointers(inputs, options, tensors);
    tensors.out = out.data_ptr(), tensors.lse = lse.data_ptr();
    run(problem, tensors, q, version.value_or(""), &Backend::fwd);
  }
  stack[0] = torch::stable::detail::from(drop_columns(out, head_dim_v));
  stack[1] = torch::stable::detail::from(lse);
}

// The arguments that bwd and bwd_out share, and the work: gradients are allocated unless given.
struct Backward {
  Tensor dout;
  std::optional<Tensor> d_lse;
  Tensor q, k, v, out, lse;
  std::optional<Tensor> dq, dk, dv;
  OpOptions op_options;
  std::string version;
  std::optional<Tensor> d_sink;
  bool copied = false;  // q, k and v, for a backend that cannot take their strides

  void run_backend();
  void run_padded();
};

Backward next_backward(Arguments& arguments, bool gradients_given) {
  Backward b{arguments.next<Tensor>(),
             arguments.next_tensor(),
             arguments.next<Tensor>(),
             arguments.next<Tensor>(),
             arguments.next<Tensor>(),
             arguments.next<Tensor>(),
             arguments.next<Tensor>(),
             {},
             {},
             {},
             {},
             "",
             {}};
  if (gradients_given) {
    b.dq = arguments.next<Tensor>(), b.dk = arguments.next<Tensor>(),
    b.dv = arguments.next<Tensor>();
  }
  b.op_options = next_options(arguments);
  b.version = arguments.next<std::optional<std::string>>().value_or("");
  return b;
}

void Backward::run_backend() {
  q = readable(q), k = readable(k), v = readable(v), out = readable(out), dout = readable(dout);
  lse = torch::stable::contiguous(lse);
  if (d_lse) d_lse = torch::stable::contiguous(*d_lse);
  const Inputs inputs{view_of(q), view_of(k), view_of(v)};
  const Saved saved{view_of(dout), view_of(d_lse), view_of(out), view_of(lse)};
  const Options options = op_options.views();
  Problem problem = check_backward(inputs, saved, options);
  if (dq) {
    problem.dq = check_gradient("dq", view_of(*dq), inputs.q);
    problem.dk = check_gradient("dk", view_of(*dk), inputs.k);
    problem.dv = check_gradient("dv", view_of(*dv), inputs.v);
  }
  if (needs_padding(problem, inputs.q)) {
    op_options.plain.softmax_scale = problem.softmax_scale;  // of the caller's head_dim
    return run_padded();
  }
  if (inputs.q.has_data) {
    problem.device = device_of(inputs.q);
    if (!copied && !can_run(problem, version)) {
      // A copy may be what it takes: a tensor map cannot step through every stride.
      copied = true;
      q = torch::stable::contiguous(q), k = torch::stable::contiguous(k);
      v = torch::stable::contiguous(v);
      return run_backend();
    }
  }
  if (!dq) {
    dq = empty_beside(q, inputs.q.sizes, inputs.q.ndim, std::nullopt);
    dk = empty_beside(k, inputs.k.sizes, inputs.k.ndim, std::nullopt);
    dv = empty_beside(v, inputs.v.sizes, inputs.v.ndim, std::nullopt);
  }
  const int64_t sinks = problem.has_sinks ? problem.nheads : 0;
  d_sink = empty_beside(q, &sinks, 1, accumulator_type(q));
  if (!inputs.q.has_data) return;
  BwdTensors tensors{};
  fill_pointers(inputs, options, tensors);
  tensors.dout = saved.dout.data, tensors.d_lse = saved.d_lse.data;
  tensors.out = saved.out.data, tensors.lse = saved.lse.data;
  tensors.dq = dq->data_ptr(), tensors.dk = dk->data_ptr(), tensors.dv = dv->data_ptr();
  if (problem.has_sinks) tensors.d_sink = d_sink->data_ptr();
  run(problem, tensors, q, version, &Backend::bwd);
}

// Pads every input, runs, and hands the gradients back without the added columns.
void Backward::run_padded() {
  Backward padded{pad_columns(dout),
                  d_lse,
                  pad_columns(q),
                  pad_columns(k),
                  pad_columns(v),
                  pad_columns(out),
                  lse,
                  {},
                  {},
                  {},
                  op_options,
                  version,
                  {}};
  padded.run_backend();
  d_sink = padded.d_sink;
  auto hand_back = [](std::optional<Tensor>& gradient, const Tensor& whole, const Tensor& input) {
    const Tensor part = drop_columns(whole, input.size(input.dim() - 1));
    if (gradient) {
      torch::stable::copy_(*gradient, part);
    } else {
      gradient = part;
    }
  };
  hand_back(dq, *padded.dq, q);
  hand_back(dk, *padded.dk, k);
  hand_back(dv, *padded.dv, v);
}

void bwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Backward backward = next_backward(arguments, false);
  backward.run_backend();
  stack[0] = torch::stable::detail::from(*backward.dq);
  stack[1] = torch::stable::detail::from(*backward.dk);
  stack[2] = torch::stable::detail::from(*backward.dv);
  stack[3] = torch::stable::detail::from(*backward.d_sink);
}

void bwd_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Backward backward = next_backward(arguments, true);
  backward.run_backend();
  stack[0] = torch::stable::detail::from(*backward.d_sink);
}

void plan(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor q = readable(arguments.next<Tensor>());
  const Tensor k = readable(arguments.next<Tensor>());
  const Tensor v = readable(arguments.next<Tensor>());
  const OpOptions op_options = next_options(arguments);
  const std::string version = arguments.next<std::optional<std::string>>().value_or("");
  const bool backward = arguments.next<bool>();
  const auto device_name = arguments.next<std::optional<std::string>>();

  const Inputs inputs{view_of(q), view_of(k), view_of(v)};
  Problem problem = check_forward(inputs, op_options.views());
  if (backward) describe_backward(problem);
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  problem.device = device_name ? device_by_name(*device_name, threads) : device_of(inputs.q);
  if (problem.device.type == static_cast<int32_t>(DeviceType::kCuda)) {
    problem.head_dim = padded_columns(problem.head_dim);
    problem.head_dim_v = padded_columns(problem.head_dim_v);
  }
  stack[0] = torch::stable::detail::from(plan_json(problem, version));
}

void backends(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(backends_json());
}

void build_info(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(build_info_json());
}

}  // namespace
}  // namespace flash_ext

STABLE_TORCH_LIBRARY(flash_ext, m) {
  const std::string inputs = "Tensor q, Tensor k, Tensor v, ", options = flash_ext::kOptions;
  const std::string saved =
      "Tensor dout, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, ";
  const std::string gradients = "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, ";
  m.def(("fwd(" + inputs + options + ") -> (Tensor out, Tensor lse)").c_str());
  m.def(
      ("bwd(" + saved + options + ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_sink)").c_str());
  m.def(("bwd_out(" + saved + gradients + options + ") -> Tensor d_sink").c_str());
  m.def(("plan(" + inputs + options + ", bool backward=False, str? device=None) -> str").c_str());
  m.def("backends() -> str");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CPU, m) {
  m.impl("fwd", flash_ext::fwd);
  m.impl("bwd", flash_ext::bwd);
  m.impl("bwd_out", flash_ext::bwd_out);
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
  m.impl("fwd", flash_ext::fwd);
  m.impl("bwd", flash_ext::bwd);
  m.impl("bwd_out", flash_ext::bwd_out);
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, Meta, m) {
  m.impl("fwd", flash_ext::fwd);
  m.impl("bwd", flash_ext::bwd);
  m.impl("bwd_out", flash_ext::bwd_out);
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CompositeExplicitAutograd, m) {
  m.impl("plan", flash_ext::plan);
  m.impl("backends", flash_ext::backends);
  m.impl("build_info", flash_ext::build_info);
}
