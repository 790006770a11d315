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


_SEQUENCES = 64  # more than so many are not checked


def expect(cell, q, k, v, dout) -> Expected | None:
    """float64 for float32 inputs on the CPU, float32 otherwise: always much finer than what is checked.

    Nothing with dropout: which probabilities are dropped is each contender's own affair.
    """
    if cell.dropout_p > 0:
        return None
    exact = torch.float64 if q.dtype == torch.float32 else torch.float32
    results = _plain(cell, q, k, v, dout, exact)
    baseline = _plain(cell, q, k, v, dout, q.dtype)
    return Expected(results, tuple(map(_error, baseline, results)))


def check(expected: Expected | None, results) -> tuple[float | None, bool]:
    """The largest error, and whether each result is within twice the baseline's error (and a little)."""
    if expected is None:
        return None, True
    errors = list(map(_error, results, expected.results))
    little = [1e-6 * float(result.abs().max()) for result in expected.results]
    limits = [2 * error + more for error, more in zip(expected.baseline_errors, little, strict=True)]
    return max(errors), all(map(le, errors, limits))  # a NaN is not <= anything


def _error(a, b) -> float:
    """The largest difference in the sequences that b holds, the first ones of a."""
    return float((a.detach()[: len(b)].to(b.dtype) - b).abs().max())


def _plain(cell, q, k, v, dout, dtype):
    """The results of the pass in a dtype, for the first sequences: (out,) or (dq, dk, dv)."""
    lengths = cell.lengths[:_SEQUENCES]
    ends = [sum(length) if cell.is_packed else len(lengths) for length in zip(*lengths, strict=True)]
    q, dout = (x.detach()[: ends[0]].to(dtype) for x in (q, dout))
    k, v = (x.detach()[: ends[1]].to(dtype) for x in (k, v))
    if cell.pass_ == "fwd":
        results = (torch.empty_like(dout),)
    else:
        results = (torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v))
    group = cell.nheads // cell.nheads_k
    options = cell.option_tensors(q.device)
    for sequence, (rows_q, rows_k) in enumerate(_rows(cell, lengths)):
        visible, distance = _mask(cell, *lengths[sequence], q.device)
        for h in range(cell.nheads):
            at_q, at_k = (*rows_q, h), (*rows_k, h // group)
            sink = options["sinks"][h].to(dtype) if cell.sinks else None
            bias = options["alibi_slopes"][h].to(dtype) * distance if cell.alibi else None
            parts = q[at_q], k[at_k], v[at_k]
            if cell.pass_ == "fwd":
                results[0][at_q] = _head(*parts, visible, cell.softcap, bias, sink)
                continue
            parts = [x.clone().requires_grad_() for x in parts]
            out = _head(*parts, visible, cell.softcap, bias, sink)
            dq, dk, dv = torch.autograd.grad(out, parts, dout[at_q])
            results[0][at_q] = dq
            results[1][at_k] += dk
            results[2][at_k] += dv
    return results


def _rows(cell, lengths):
    """Where the queries and the keys of each sequence lie: indices of the leading dimensions."""
    start_q = start_k = 0
    for sequence, (length_q, length_k) in enumerate(lengths):
        if cell.is_packed:
            yield (slice(start_q, start_q + length_q),), (slice(start_k, start_k + length_k),)
        else:
            yield (sequence, slice(None)), (sequence, slice(None))
        start_q, start_k = start_q + length_q, start_k + length_k


def _head(q, k, v, visible, softcap, bias, sink):
    scores = q @ k.T * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores - bias
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sink is None:
        return scores.softmax(-1) @ v
    return torch.cat((scores, sink.expand(len(q), 1)), 1).softmax(-1)[:, :-1] @ v


def _mask(cell, seqlen_q, seqlen_k, device):
    """Which keys a query sees, None where it sees all; and how far away they are, for ALiBi."""
    left, right = cell.window
    right = 0 if cell.causal else right
    i = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=device)[None, :]
    visible = (j >= i - left if left >= 0 else j >= 0) & (j <= i + right if right >= 0 else j >= 0)
    return None if left < 0 and right < 0 else visible, (i - j).abs() if cell.alibi else None
