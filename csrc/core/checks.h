// Every rule about arguments, once, for both doors: arguments in, a Problem out, or an Error.
#pragma once

#include <optional>
#include <string>

#include "core/error.h"
#include "core/tensor_view.h"

namespace flash_ext {

// The options of fwd and bwd as the user gave them. A view with ndim = -1 was not given.
struct Options {
  TensorView cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  std::optional<int64_t> max_seqlen_q, max_seqlen_k;
  std::optional<double> softmax_scale;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0.0;
  TensorView alibi_slopes, sinks;
  double dropout_p = 0.0;
  TensorView rng_state;
  bool top_left = false;
  bool deterministic = false;
};

struct Inputs {
  TensorView q, k, v;
};

// What the backward gets beside the inputs.
struct Saved {
  TensorView dout, d_lse, out, lse;
};

// The dimensions an output has: (batch, seqlen_q, nheads, head_dim_v) or packed, and lse's.
struct OutputShapes {
  int out_ndim, lse_ndim;
  int64_t out[4], lse[3];
};

// Checks the inputs and options and describes the problem. Strides of out (contiguous) are filled
// in. Reads cu_seqlens and seqused when they are on the CPU.
Problem check_forward(const Inputs& inputs, const Options& options);

// Turns a forward problem into its backward with contiguous gradients.
void describe_backward(Problem& problem);

// The same checks for the backward; gradients are contiguous unless check_gradient says otherwise.
Problem check_backward(const Inputs& inputs, const Saved& saved, const Options& options);

// Checks out and lse that the caller allocated and fills in out's strides.
void check_outputs(const TensorView& q, const TensorView& out, const TensorView& lse,
                   Problem& problem);

// Checks a gradient that the caller allocated against its input and returns its strides.
Strides check_gradient(const char* name, const TensorView& gradient, const TensorView& input);

OutputShapes output_shapes(const Problem& problem);

}  // namespace flash_ext
