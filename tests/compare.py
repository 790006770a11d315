"""Hold results against the float64 reference, by the error that plain PyTorch makes in the same dtype.

The rule, for every row of out and of each gradient: its largest error is at most twice the largest error of
the baseline in the same block of 64 rows, plus four roundings of the block's largest value; and for every
head the error as a Frobenius norm is at most 1.25 times the baseline's. A failure names the worst element.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable

import torch
from torch import Tensor

import flash_ext  # noqa: F401  (loads the operators)
from flash_ext import reference

SEED = int(os.environ.get("FLASH_EXT_TEST_SEED", random.SystemRandom().randrange(2**31)))
BLOCK = 64
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# One rounding of a result. The float64 baseline is the reference itself: there 1e-13 covers every sum.
ROUNDING = {dtype: torch.finfo(dtype).eps for dtype in DTYPES} | {torch.float64: 1e-13}
Results = dict[str, Tensor]


def fwd(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    return torch.ops.flash_ext.fwd(q, k, v, **options)


def in_dtype(dtype: torch.dtype) -> Callable:
    def attention(q, k, v, **options):
        return reference.attention(q, k, v, dtype=dtype, **options)

    return attention


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def run(
    function: Callable,
    inputs: dict[str, Tensor],
    options: dict,
    dout: Tensor | None = None,
    d_lse: Tensor | None = None,
) -> Results:
    """out and lse of function(q, k, v, **options), and with dout or d_lse the gradients.

    `inputs` holds q, k, v and perhaps sinks; they keep their strides.
    """
    leaves = {
        name: x.detach().requires_grad_(dout is not None or d_lse is not None) for name, x in inputs.items()
    }
    out, lse = function(
        leaves["q"], leaves["k"], leaves["v"], **options, **{n: leaves[n] for n in leaves if n == "sinks"}
    )
    results = {"out": out.detach(), "lse": lse.detach()}
    used = [(y, dy.to(y.dtype)) for y, dy in ((out, dout), (lse, d_lse)) if dy is not None]
    if used:
        outputs, grad_outputs = zip(*used, strict=True)
        gradients = torch.autograd.grad(outputs, list(leaves.values()), grad_outputs, materialize_grads=True)
        results |= {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return results


class Expected:
    """What a call must give, and how far plain PyTorch is from it: made once, for every call of the same inputs."""

    def __init__(
        self,
        inputs: dict[str, Tensor],
        options: dict,
        dout: Tensor | None = None,
        d_lse: Tensor | None = None,
    ) -> None:
        self.inputs, self.options, self.gradients = inputs, options, (dout, d_lse)
        dtype = inputs["q"].dtype
        self.want = run(in_dtype(torch.float64), inputs, options, dout, d_lse)
        self.baseline = run(in_dtype(dtype), inputs, options, dout, d_lse)
        if dtype.itemsize == 2:  # what is accumulated in float32 is held to float32
            self.baseline["lse"] = run(in_dtype(torch.float32), inputs, options)["lse"]
        self.floors = floors_of(inputs, options, self.want, dout)

    def hold(self, function: Callable, **more) -> Results:
        """Run `function`, with more options, and fail where it is further away than the rule allows. Returns its results."""
        q = self.inputs["q"]
        packed_q, packed_k = (f"cu_seqlens_{x}" in self.options for x in "qk")
        got = run(function, self.inputs, self.options | more, *self.gradients)
        assert got["out"].dtype == q.dtype and got["out"].is_contiguous()
        assert got["lse"].dtype == accumulator(q.dtype) and got["lse"].is_contiguous()
        for name, tensor in got.items():
            want = self.want[name]
            assert tensor.shape == want.shape, f"{name}: {tuple(tensor.shape)}, not {tuple(want.shape)}"
            is_packed = packed_k if name in ("d_k", "d_v") else packed_q
            views = (per_head(name, x, is_packed) for x in (tensor, want, self.baseline[name]))
            assert_within(name, *views, rounding=ROUNDING[tensor.dtype], floor=self.floors.get(name, 0.0))
        return got


def check(
    inputs: dict[str, Tensor],
    options: dict,
    dout: Tensor | None = None,
    d_lse: Tensor | None = None,
    function: Callable = fwd,
) -> Results:
    """One call of `function`, held against what is expected of it."""
    return Expected(inputs, options, dout, d_lse).hold(function)


def floors_of(
    inputs: dict[str, Tensor], options: dict, want: Results, dout: Tensor | None
) -> dict[str, float]:
    """Errors that are no fault even where the baseline happens to have none, from the size of what is summed.

    A score's rounding is relative to |q||k|; out and dv are sums of terms of either sign, in float32 at least.
    P is rounded to the inputs' type before it meets V: of n equal ones the errors add up to 0.3 / sqrt(n) roundings
    of v, and where a row of out has a few columns only, the baseline may have been lucky in all of a block.
    mma.sync kernels begin the sum of a score at minus a reference, which lies 8 powers of two above the largest
    score, and tensor cores cut off what each addition rounds, every 8 columns: half a digit, always down.
    In dS = P (dP - delta) the difference may vanish (a single key), and delta comes from the rounded out.
    """
    largest = {n: float(x.abs().nan_to_num(0.0).max()) if x.numel() else 0.0 for n, x in inputs.items()}
    dtype = inputs["q"].dtype
    fine, coarse = ROUNDING[accumulator(dtype)], ROUNDING[dtype]
    scale = options.get("softmax_scale") or inputs["q"].shape[-1] ** -0.5
    score = scale * longest_row(inputs["q"]) * longest_row(inputs["k"])
    noise = fine * (2 + score / 2)  # relative, of a probability
    few_columns = inputs["v"].shape[-1] < 8
    p_rounding = 0.3 * coarse / max(1, keys_of(inputs, options)) ** 0.5 if few_columns else 0.0
    floors = {"out": (noise + p_rounding) * largest["v"], "lse": 2 * fine * score}
    if dtype.itemsize == 2:
        floors["lse"] += fine * 8 * math.log(2) * (1 + inputs["q"].shape[-1] / 32)
    if dout is not None:
        seen = want["lse"].transpose(-1, -2) > -math.inf
        dout = torch.where(seen[..., None], dout.double(), 0.0)
        delta = (dout * want["out"]).abs().sum(-1)
        rows = max(delta.numel(), 1) ** 0.5  # of independent errors, one a row, in a sum over rows
        d_score = noise * longest_row(dout) * longest_row(inputs["v"])
        d_score += coarse * float(delta.max()) if delta.numel() else 0.0
        floors["d_v"] = noise * rows * float(dout.abs().max()) if dout.numel() else 0.0
        floors["d_q"] = d_score * scale * largest["k"]
        floors["d_k"] = d_score * scale * largest["q"] * rows
        if "sinks" in inputs:  # its terms: of every row the sink's probability times delta
            of_sink = (inputs["sinks"].double()[:, None] - want["lse"].double()).exp().transpose(-1, -2)
            terms = torch.where(seen, of_sink * delta, 0.0)
            floors["d_sinks"] = (coarse + noise) * float(terms.norm()) if terms.numel() else 0.0
    return floors


def keys_of(inputs: dict[str, Tensor], options: dict) -> int:
    """Keys of the longest sequence, of those that are there."""
    starts = options.get("cu_seqlens_k")
    return inputs["k"].shape[-3] if starts is None else int(starts.diff().max())


def longest_row(x: Tensor) -> float:
    return float(x.double().nan_to_num(0.0).norm(dim=-1).max()) if x.numel() else 0.0


def per_head(name: str, x: Tensor, packed: bool) -> Tensor:
    """(batch, head, row, column), whatever the tensor is; packed rows are one batch."""
    x = x.double()
    if name == "d_sinks":
        return x[None, :, None, None]
    if name == "lse":
        return (x[None] if packed else x)[..., None]
    return (x[None] if packed else x).transpose(1, 2)


def assert_within(
    name: str, got: Tensor, want: Tensor, baseline: Tensor, rounding: float, floor: float = 0.0
) -> None:
    """The rule of this module, on (batch, head, row, column) tensors in float64."""
    if got.numel() == 0:
        return
    finite = torch.isfinite(want)
    same = torch.where(finite, torch.isfinite(got), (got == want) | (got.isnan() & want.isnan()))
    if not same.all():
        fail(name, "finite in one and not in the other", got, want, ~same)
    zero = torch.zeros((), dtype=torch.float64, device=got.device)
    want_finite = torch.where(finite, want, zero)
    error, allowed = (torch.where(finite, (x - want).abs(), zero) for x in (got, baseline))
    of_block = blockwise_max(allowed), blockwise_max(want_finite.abs())
    limit = 2 * of_block[0] + 4 * rounding * of_block[1] + floor + 1e-30
    if (error > limit).any():
        fail(name, "beyond twice the baseline's error", got, want, error > limit, limit)
    norm, base_norm, size = (x.square().sum((2, 3)).sqrt() for x in (error, allowed, want_finite))
    limit = 1.25 * base_norm + 2 * rounding * size + floor * math.sqrt(got[0, 0].numel()) + 1e-30
    if (norm > limit).any():
        b, h = (norm > limit).nonzero()[0].tolist()
        raise AssertionError(
            f"{name}: batch {b}, head {h}: error norm {norm[b, h]:.3e} is beyond 1.25 x the baseline's, "
            f"{base_norm[b, h]:.3e}; allowed {limit[b, h]:.3e}"
        )


def blockwise_max(x: Tensor) -> Tensor:
    """For every element the largest value in its (batch, head) and block of 64 rows, as (batch, head, row, 1)."""
    batch, heads, rows, _ = x.shape
    blocks = math.ceil(rows / BLOCK)
    padded = x.new_zeros(batch, heads, blocks * BLOCK)
    padded[..., :rows] = x.amax(-1)
    most = padded.view(batch, heads, blocks, BLOCK).amax(-1, keepdim=True)
    return most.expand(-1, -1, -1, BLOCK).reshape(batch, heads, -1)[..., :rows, None]


def fail(name: str, why: str, got: Tensor, want: Tensor, where: Tensor, limit: Tensor | None = None) -> None:
    """Name the worst of the elements at `where`."""
    error = torch.where(where, (got - want).abs().nan_to_num(math.inf, math.inf), -1.0)
    b, h, row, column = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    raise AssertionError(
        f"{name}: {int(where.sum())} of {where.numel()} elements {why}; worst at batch {b}, head {h}, row {row}, "
        f"column {column}: got {got[b, h, row, column]:.9g}, expected {want[b, h, row, column]:.9g}"
        + ("" if limit is None else f", allowed error {limit[b, h, row, 0]:.3g}")
    )
