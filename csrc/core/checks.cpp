#include "core/checks.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/rules.h"

namespace flash_ext {
namespace {

constexpr const char* kPaddedOut = "(batch, seqlen_q, nheads, head_dim_v)";
constexpr const char* kPackedOut = "(total_q, nheads, head_dim_v)";
constexpr const char* kPaddedLse = "(batch, nheads, seqlen_q)";
constexpr const char* kPackedLse = "(nheads, total_q)";

Strides strides_of(const TensorView& t) {
  // A dimension of size 1 is never stepped over, so its stride may be anything: call it 0.
  auto stride = [&](int i) { return t.sizes[i] == 1 ? 0 : t.strides[i]; };
  if (t.ndim == 4) return {stride(0), stride(1), stride(2)};
  return {0, stride(0), stride(1)};
}

Strides contiguous_strides(bool packed, int64_t rows, int64_t nheads, int64_t dim) {
  return {packed ? 0 : rows * nheads * dim, nheads * dim, dim};
}

int64_t rows_per_batch(bool packed, int64_t total, int64_t batch) {
  return packed || batch == 0 ? total : total / batch;
}

const char* rank_text(const char* name, bool packed) {
  if (name[0] == 'q') {
    return packed ? "q must be 3-dimensional (total_q, nheads, head_dim) when cu_seqlens_q is given"
                  : "q must be 4-dimensional (batch, seqlen_q, nheads, head_dim)";
  }
  if (name[0] == 'k') {
    return packed
               ? "k must be 3-dimensional (total_k, nheads_k, head_dim) when cu_seqlens_k is given"
               : "k must be 4-dimensional (batch, seqlen_k, nheads_k, head_dim)";
  }
  return packed
             ? "v must be 3-dimensional (total_k, nheads_k, head_dim_v) when cu_seqlens_k is given"
             : "v must be 4-dimensional (batch, seqlen_k, nheads_k, head_dim_v)";
}

void check_rank(const char* name, const TensorView& t, bool packed) {
  if (t.ndim == (packed ? 3 : 4)) return;
  value_error(std::string(rank_text(name, packed)) + ", got shape " + shape_text(t));
}

void check_dtypes_and_devices(const Inputs& in) {
  if (in.q.dtype > DType::kFloat64) {
    type_error("q must be float16, bfloat16, float32 or float64, got " + in.q.dtype_name);
  }
  if (in.q.device_type == DeviceType::kOther && in.q.has_data) {
    value_error("q must be on the CPU or a CUDA device, got " + in.q.device_name);
  }
  if (in.q.device_type == DeviceType::kCuda &&
      (in.q.dtype == DType::kFloat32 || in.q.dtype == DType::kFloat64)) {
    throw Error(ErrorKind::kUnsupported,
                "q must be bfloat16 or float16 on a GPU, got " + in.q.dtype_name +
                    ": convert to bfloat16, or use torch's scaled_dot_product_attention (SDPA)");
  }
  for (auto [name, t] : {std::pair<const char*, const TensorView&>{"k", in.k}, {"v", in.v}}) {
    check_like_q(name, t, in.q);
  }
}

void fill_shapes(const Inputs& in, const Options& o, Problem& p) {
  p.packed_q = o.cu_seqlens_q.given();
  p.packed_k = o.cu_seqlens_k.given();
  check_rank("q", in.q, p.packed_q);
  check_rank("k", in.k, p.packed_k);
  check_rank("v", in.v, p.packed_k);
  const int q0 = p.packed_q ? 0 : 1, k0 = p.packed_k ? 0 : 1;  // the dimension of the rows
  const int64_t nheads = in.q.sizes[q0 + 1], nheads_k = in.k.sizes[k0 + 1];
  const int64_t head_dim = in.q.sizes[q0 + 2], head_dim_v = in.v.sizes[k0 + 2];
  const int64_t batch = p.packed_q ? in.k.sizes[0] : in.q.sizes[0];

  const int64_t rows_k = in.k.sizes[k0];
  if (p.packed_k) {
    const int64_t want_k[] = {rows_k, nheads_k, head_dim},
                  want_v[] = {rows_k, nheads_k, head_dim_v};
    check_shape("k", "(total_k, nheads_k, head_dim)", in.k, 3, want_k);
    check_shape("v", "(total_k, nheads_k, head_dim_v)", in.v, 3, want_v);
  } else {
    const int64_t want_k[] = {batch, rows_k, nheads_k, head_dim};
    const int64_t want_v[] = {batch, rows_k, nheads_k, head_dim_v};
    check_shape("k", "(batch, seqlen_k, nheads_k, head_dim)", in.k, 4, want_k);
    check_shape("v", "(batch, seqlen_k, nheads_k, head_dim_v)", in.v, 4, want_v);
  }
  if (nheads_k == 0 ? nheads != 0 : nheads % nheads_k != 0) {
    value_error("nheads of q must be a multiple of nheads_k of k and v, got " +
                std::to_string(nheads) + " and " + std::to_string(nheads_k));
  }
  for (auto [name, dim] :
       {std::pair<const char*, int64_t>{"head_dim", head_dim}, {"head_dim_v", head_dim_v}}) {
    if (dim < 1 || dim > 256) {
      value_error(std::string(name) + " must be 1 to 256, got " + std::to_string(dim));
    }
  }
  p.nheads = checked_int32("nheads", nheads);
  p.nheads_k = checked_int32("nheads_k", nheads_k);
  p.head_dim = static_cast<int32_t>(head_dim);
  p.head_dim_v = static_cast<int32_t>(head_dim_v);
  p.total_q = p.packed_q ? in.q.sizes[0] : in.q.sizes[0] * in.q.sizes[1];
  p.total_k = p.packed_k ? in.k.sizes[0] : in.k.sizes[0] * in.k.sizes[1];
  p.seqlen_q = in.q.sizes[q0];
  p.seqlen_k = rows_k;
  checked_int32("seqlen_q", p.seqlen_q);
  checked_int32("seqlen_k", p.seqlen_k);
}

void fill_batch(const Inputs& in, const Options& o, Problem& p) {
  if (p.packed_q && (o.cu_seqlens_q.ndim != 1 || o.cu_seqlens_q.sizes[0] < 1)) {
    value_error("cu_seqlens_q must have shape (batch + 1,), got " + shape_text(o.cu_seqlens_q));
  }
  const int64_t batch = !p.packed_q   ? in.q.sizes[0]
                        : !p.packed_k ? in.k.sizes[0]
                                      : o.cu_seqlens_q.sizes[0] - 1;
  p.batch = checked_int32("batch", batch);
  const int64_t cu[] = {batch + 1}, one[] = {batch};
  if (p.packed_q) {
    check_vector("cu_seqlens_q", "(batch + 1,)", o.cu_seqlens_q, in.q, DType::kInt32, "int32", 1,
                 cu);
  }
  if (p.packed_k) {
    check_vector("cu_seqlens_k", "(batch + 1,)", o.cu_seqlens_k, in.q, DType::kInt32, "int32", 1,
                 cu);
  }
  if (o.seqused_q.given()) {
    check_vector("seqused_q", "(batch,)", o.seqused_q, in.q, DType::kInt32, "int32", 1, one);
  }
  if (o.seqused_k.given()) {
    check_vector("seqused_k", "(batch,)", o.seqused_k, in.q, DType::kInt32, "int32", 1, one);
  }
  p.has_seqused_q = o.seqused_q.given();
  p.has_seqused_k = o.seqused_k.given();
  for (auto [name, hint] :
       {std::pair<const char*, const std::optional<int64_t>&>{"max_seqlen_q", o.max_seqlen_q},
        {"max_seqlen_k", o.max_seqlen_k}}) {
    if (hint && *hint < 0)
      value_error(std::string(name) + " must be >= 0, got " + std::to_string(*hint));
  }
  if (p.packed_q && o.max_seqlen_q) p.seqlen_q = std::min(p.total_q, *o.max_seqlen_q);
  if (p.packed_k && o.max_seqlen_k) p.seqlen_k = std::min(p.total_k, *o.max_seqlen_k);
}

void fill_scores(const Inputs& in, const Options& o, Problem& p) {
  for (auto [name, window] : {std::pair<const char*, int64_t>{"window_left", o.window_left},
                              {"window_right", o.window_right}}) {
    if (window < -1) {
      value_error(std::string(name) + " must be >= 0, or -1 for unlimited, got " +
                  std::to_string(window));
    }
  }
  p.window_left = o.window_left;
  p.window_right = o.causal ? 0 : o.window_right;
  p.top_left = o.top_left;
  p.softmax_scale =
      o.softmax_scale ? *o.softmax_scale : 1.0 / std::sqrt(static_cast<double>(p.head_dim));
  if (!std::isfinite(p.softmax_scale) || p.softmax_scale <= 0) {
    value_error("softmax_scale must be finite and > 0, got " + number_text(p.softmax_scale));
  }
  p.softcap = o.softcap;
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    value_error("softcap must be finite and >= 0 (0: off), got " + number_text(p.softcap));
  }
  if (o.alibi_slopes.given()) {
    const int64_t per_head[] = {p.nheads}, per_batch[] = {p.batch, p.nheads};
    const bool two = o.alibi_slopes.ndim == 2;
    check_vector("alibi_slopes", two ? "(batch, nheads)" : "(nheads,)", o.alibi_slopes, in.q,
                 DType::kFloat32, "float32", two ? 2 : 1, two ? per_batch : per_head);
    p.has_alibi = two ? 2 : 1;
  }
  if (o.sinks.given()) {
    const bool wide = in.q.dtype == DType::kFloat64;
    const int64_t want[] = {p.nheads};
    check_vector("sinks", "(nheads,)", o.sinks, in.q, accumulator_dtype(in.q.dtype),
                 wide ? "float64 when q is float64" : "float32", 1, want);
    p.has_sinks = 1;
  }
  if (!(o.dropout_p >= 0 && o.dropout_p < 1)) {
    value_error("dropout_p must be in [0, 1), got " + number_text(o.dropout_p));
  }
  p.dropout_threshold = static_cast<int32_t>(std::lround(65536.0 * o.dropout_p));
  if (p.dropout_threshold > 65535) p.dropout_threshold = 65535;
  if (p.dropout_threshold > 0 && !o.rng_state.given()) {
    value_error(
        "rng_state must be given when dropout_p > 0: an int64 tensor of shape (2,) with seed and "
        "offset, got None");
  }
  if (o.rng_state.given()) {
    const int64_t want[] = {2};
    check_vector("rng_state", "(2,)", o.rng_state, in.q, DType::kInt64, "int64", 1, want);
  }
}

int64_t longest(const TensorView& cu_seqlens) {
  const auto* cu = static_cast<const int32_t*>(cu_seqlens.data);
  int64_t most = 0;
  for (int64_t i = 1; i < cu_seqlens.sizes[0]; ++i)
    most = std::max<int64_t>(most, cu[i] - cu[i - 1]);
  return most;
}

void check_values_on_cpu(const Inputs& in, const Options& o, Problem& p) {
  if (in.q.device_type != DeviceType::kCpu || !in.q.has_data) return;
  if (p.packed_q) check_cu_seqlens("cu_seqlens_q", o.cu_seqlens_q, p.total_q);
  if (p.packed_k) check_cu_seqlens("cu_seqlens_k", o.cu_seqlens_k, p.total_k);
  if (p.has_seqused_q) check_seqused("seqused_q", o.seqused_q, o.cu_seqlens_q, p.seqlen_q);
  if (p.has_seqused_k) check_seqused("seqused_k", o.seqused_k, o.cu_seqlens_k, p.seqlen_k);
  if (p.packed_q) p.seqlen_q = longest(o.cu_seqlens_q);
  if (p.packed_k) p.seqlen_k = longest(o.cu_seqlens_k);
}

// Tests force a tile of the backend's table, or few CTAs that each work on many tiles.
int32_t test_setting(const char* variable) {
  const char* text = std::getenv(variable);
  return text ? std::atoi(text) : 0;
}

}  // namespace

Problem check_forward(const Inputs& in, const Options& o) {
  Problem p{};
  p.pass = static_cast<int32_t>(Pass::kForward);
  p.dtype = static_cast<int32_t>(in.q.dtype);
  check_dtypes_and_devices(in);
  fill_shapes(in, o, p);
  fill_batch(in, o, p);
  for (auto [name, t] :
       {std::pair<const char*, const TensorView&>{"q", in.q}, {"k", in.k}, {"v", in.v}}) {
    check_last_stride(name, t);
  }
  fill_scores(in, o, p);
  check_values_on_cpu(in, o, p);
  p.deterministic = o.deterministic;
  p.max_ctas = test_setting("FLASH_EXT_MAX_CTAS");
  p.tile = test_setting("FLASH_EXT_TILE");
  p.q = strides_of(in.q);
  p.k = strides_of(in.k);
  p.v = strides_of(in.v);
  p.out = contiguous_strides(p.packed_q, in.q.sizes[p.packed_q ? 0 : 1], p.nheads, p.head_dim_v);
  return p;
}

void check_outputs(const TensorView& q, const TensorView& out, const TensorView& lse, Problem& p) {
  const OutputShapes shapes = output_shapes(p);
  const bool wide = q.dtype == DType::kFloat64;
  check_like_q("out", out, q);
  check_shape("out", p.packed_q ? kPackedOut : kPaddedOut, out, shapes.out_ndim, shapes.out);
  if (p.pass == static_cast<int32_t>(Pass::kForward)) {
    check_contiguous("out", out);  // it is written
  } else {
    check_last_stride("out", out);
  }
  check_vector("lse", p.packed_q ? kPackedLse : kPaddedLse, lse, q, accumulator_dtype(q.dtype),
               wide ? "float64 when q is float64" : "float32", shapes.lse_ndim, shapes.lse);
  p.out = strides_of(out);
}

Problem check_backward(const Inputs& in, const Saved& saved, const Options& o) {
  Problem p = check_forward(in, o);
  describe_backward(p);
  check_outputs(in.q, saved.out, saved.lse, p);
  const OutputShapes shapes = output_shapes(p);
  check_like_q("dout", saved.dout, in.q);
  check_shape("dout", p.packed_q ? kPackedOut : kPaddedOut, saved.dout, shapes.out_ndim,
              shapes.out);
  check_last_stride("dout", saved.dout);
  if (saved.d_lse.given()) {
    const bool wide = in.q.dtype == DType::kFloat64;
    check_vector("d_lse", p.packed_q ? kPackedLse : kPaddedLse, saved.d_lse, in.q,
                 accumulator_dtype(in.q.dtype), wide ? "float64 when q is float64" : "float32",
                 shapes.lse_ndim, shapes.lse);
  }
  p.has_d_lse = saved.d_lse.given();
  p.dout = strides_of(saved.dout);
  return p;
}

void describe_backward(Problem& p) {
  p.pass = static_cast<int32_t>(Pass::kBackward);
  const int64_t rows_q = rows_per_batch(p.packed_q, p.total_q, p.batch);
  const int64_t rows_k = rows_per_batch(p.packed_k, p.total_k, p.batch);
  p.dout = p.out;
  p.dq = contiguous_strides(p.packed_q, rows_q, p.nheads, p.head_dim);
  p.dk = contiguous_strides(p.packed_k, rows_k, p.nheads_k, p.head_dim);
  p.dv = contiguous_strides(p.packed_k, rows_k, p.nheads_k, p.head_dim_v);
}

Strides check_gradient(const char* name, const TensorView& gradient, const TensorView& input) {
  if (gradient.dtype != input.dtype) {
    type_error(std::string(name) + " must have the dtype of its input, " + input.dtype_name +
               ", got " + gradient.dtype_name);
  }
  check_device(name, gradient, input);
  check_shape(name, "of its input", gradient, input.ndim, input.sizes);
  check_last_stride(name, gradient);
  for (int i = 0; i < gradient.ndim; ++i) {
    if (gradient.sizes[i] > 1 && gradient.strides[i] == 0) {
      value_error(std::string(name) + " must not overlap itself, got strides " +
                  list_text(gradient.strides, gradient.ndim));
    }
  }
  return strides_of(gradient);
}

OutputShapes output_shapes(const Problem& p) {
  OutputShapes shapes{};
  if (p.packed_q) {
    shapes.out_ndim = 3, shapes.lse_ndim = 2;
    shapes.out[0] = p.total_q, shapes.out[1] = p.nheads, shapes.out[2] = p.head_dim_v;
    shapes.lse[0] = p.nheads, shapes.lse[1] = p.total_q;
    return shapes;
  }
  const int64_t seqlen_q = p.batch ? p.total_q / p.batch : p.seqlen_q;
  shapes.out_ndim = 4, shapes.lse_ndim = 3;
  shapes.out[0] = p.batch, shapes.out[1] = seqlen_q, shapes.out[2] = p.nheads,
  shapes.out[3] = p.head_dim_v;
  shapes.lse[0] = p.batch, shapes.lse[1] = p.nheads, shapes.lse[2] = seqlen_q;
  return shapes;
}

}  // namespace flash_ext
