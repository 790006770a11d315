"""A cell is checked before it is timed, against attention written plainly, head by head."""

from dataclasses import dataclass
from operator import le

import torch


@dataclass(frozen=True)
class Expected:
    """The exact results of a cell, and how far plain attention in the cell's own dtype is from each."""

    results: tuple[torch.Tensor, ...]
    baseline_errors: tuple[float, ...]

    @property
    def baseline_error(self) -> float:
        return max(self.baseline_errors)


def expect(cell, q, k, v, dout) -> Expected:
    """float64 for float32 inputs on the CPU, float32 otherwise: always much finer than what is checked."""
    exact = torch.float64 if q.dtype == torch.float32 else torch.float32
    results = _plain(cell, q, k, v, dout, exact)
    baseline = _plain(cell, q, k, v, dout, q.dtype)
    return Expected(results, tuple(map(_error, baseline, results)))


def check(expected: Expected, results) -> tuple[float, bool]:
    """The largest error, and whether each result is within twice the baseline's error (and a little)."""
    errors = list(map(_error, results, expected.results))
    little = [1e-6 * float(result.abs().max()) for result in expected.results]
    limits = [2 * error + more for error, more in zip(expected.baseline_errors, little, strict=True)]
    return max(errors), all(map(le, errors, limits))  # a NaN is not <= anything


def _error(a, b) -> float:
    return float((a.detach().to(b.dtype) - b).abs().max())


def _plain(cell, q, k, v, dout, dtype):
    """The results of the pass in a dtype: (out,) or (dq, dk, dv)."""
    q, k, v, dout = (x.detach().to(dtype) for x in (q, k, v, dout))
    visible = _visible(cell, q.device)
    if cell.pass_ == "fwd":
        results = (q.new_empty(dout.shape),)
    else:
        results = (torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v))
    group = cell.nheads // cell.nheads_k
    for b in range(cell.batch):
        for h in range(cell.nheads):
            parts = q[b, :, h], k[b, :, h // group], v[b, :, h // group]
            if cell.pass_ == "fwd":
                results[0][b, :, h] = _head(*parts, visible)
                continue
            parts = [x.clone().requires_grad_() for x in parts]
            dq, dk, dv = torch.autograd.grad(_head(*parts, visible), parts, dout[b, :, h])
            results[0][b, :, h] = dq
            results[1][b, :, h // group] += dk
            results[2][b, :, h // group] += dv
    return results


def _head(q, k, v, visible):
    scores = q @ k.T * q.shape[-1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v


def _visible(cell, device):
    left, right = cell.window
    right = 0 if cell.causal else right
    if left < 0 and right < 0:
        return None
    i = torch.arange(cell.seqlen_q, device=device)[:, None] + cell.seqlen_k - cell.seqlen_q
    j = torch.arange(cell.seqlen_k, device=device)[None, :]
    return (j >= i - left if left >= 0 else j >= 0) & (j <= i + right if right >= 0 else j >= 0)
