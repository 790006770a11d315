"""Inputs whose numbers are hard: outliers, rising maxima, ties, scores and values near the end of the range."""

import functools

import bed
import compare
import pytest
import torch

SEQLEN_Q, SEQLEN_K, BLOCK = 300, 1100, 64


def rising(q, k, v, step: float):
    """The largest score grows by about `step` powers of two from one block of keys to the next."""
    scale = q.shape[-1] ** -0.5
    q[..., 0] = 1
    block = torch.arange(SEQLEN_K, device=k.device) // BLOCK
    k[..., 0] = (step * 0.693 / scale * block)[:, None].to(k.dtype)


def falling(q, k, v, step: float):
    rising(q, k, v, step)
    k[..., 0] = k[..., 0].flip(1)


def outliers(q, k, v):
    for x in (q, k, v):
        x += torch.randn_like(x) * 10 * (torch.rand(x.shape, device=x.device) < 0.01)


def equal_scores(q, k, v, score: float):
    """Every query gives every key the same score."""
    q[:], k[:] = 1, 0
    k[..., :8] = score * q.shape[-1] ** 0.5 / 8


def one_row_far_up(q, k, v):
    q[:, 17] = 3e4**0.5
    k[:, 5] = 3e4**0.5 * q.shape[-1] ** -0.5


def near_65504(q, k, v):
    v[:] = torch.where(v > 0, 6e4, -6e4)
    q *= 100
    k *= 100


HARD = {
    "outliers": outliers,
    "maxima rise by 7.9": functools.partial(rising, step=7.9),
    "maxima rise by 8.1": functools.partial(rising, step=8.1),
    "maxima fall by 8.1": functools.partial(falling, step=8.1),
    "equal scores": functools.partial(equal_scores, score=1.0),
    "equal scores far up": functools.partial(equal_scores, score=3001.0),
    "equal scores far down": functools.partial(equal_scores, score=-3001.0),
    "one row far up": one_row_far_up,
    "values near 65504": near_65504,
}


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
@pytest.mark.parametrize("name", HARD)
def test_hard_numbers(name, kernel):
    q, k, v = bed.qkv(kernel, batch=1, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K)
    HARD[name](q, k, v)
    dout = None
    if name in ("outliers", "equal scores", "equal scores far down"):
        dout = torch.randn(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    kernel.check({"q": q, "k": k, "v": v}, {}, dout)


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_ties_over_many_blocks(kernel):
    """With equal scores every key counts the same, however often the running maximum was compared."""
    q, k, v = bed.qkv(kernel, batch=1, seqlen_q=64, seqlen_k=32768, nheads=2, nheads_k=1)
    equal_scores(q, k, v, score=3001.0)
    v[:] = torch.linspace(-1, 1, v.shape[1], device=v.device)[:, None, None]
    out, _ = kernel.forward(q, k, v)
    assert float(out.abs().max()) < 1e-3


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_sinks_far_from_the_scores(kernel):
    """However low or high a sink is, the scores keep all their digits."""
    q, k, v = bed.qkv(kernel, batch=1, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K)
    sinks = torch.tensor([-1e30, -1e5, 12.0, 1e4], device=bed.DEVICE)
    kernel.check({"q": q, "k": k, "v": v, "sinks": sinks}, {"causal": True})


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_huge_scores(kernel):
    """Scores of some 1e8 (float16: 1e6) leave one key to each query; where two are as good as equal, either."""
    q, k, v = bed.qkv(kernel, batch=1, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K)
    size = 1e4 if kernel.dtype == torch.bfloat16 else 1e3
    q, k = q * size, k * size
    out, lse = kernel.forward(q, k, v)
    want, want_lse = compare.in_dtype(torch.float64)(q, k, v)
    assert torch.allclose(lse.double(), want_lse, rtol=1e-5, atol=0)
    keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bihd,bjhd->bihj", q.double(), keys) * q.shape[-1] ** -0.5
    best = scores.topk(2).values
    is_clear = best[..., 0] - best[..., 1] > 20 + 1e-5 * best[..., 0].abs()
    assert is_clear.double().mean() > 0.99
    error = torch.where(is_clear[..., None], (out - want).abs(), 0.0)
    assert float(error.max()) <= 0.02 * float(v.abs().max())


@pytest.mark.parametrize("kernel", [k for k in bed.KERNELS if k.dtype == torch.bfloat16], ids=str)
def test_nothing_is_nan_while_scores_are_finite(kernel):
    """Beyond some 1e9 the rounding of a score exceeds the exponents of float32: a row may become 0, never NaN."""
    q, k, v = bed.qkv(kernel, batch=1, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K)
    out, lse = kernel.forward(q * 1e12, k * 1e12, v)
    assert torch.isfinite(out).all() and not lse.isnan().any()
