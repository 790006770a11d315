"""The backward: gradients of q, k, v and sinks, through out and through lse, and how they may be asked for."""

import math

import pytest
import torch
from compare import DTYPES, accumulator, check, fwd, run
from strategies import Problem
from test_forward import OPTIONS, signs
from torch.autograd import gradcheck


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, dtype):
    check(*Problem(dtype=dtype, **options).tensors())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(options):
    small = {"lengths_q": (4, 2), "lengths_k": (2, 5), "head_dim": 3, "head_dim_v": 2}
    inputs, op_options, _, _ = Problem(**({"nheads_k": 1} | options | small), dtype=torch.float64).tensors()
    names = list(inputs)
    leaves = [x.nan_to_num(0.5).masked_fill(x == -math.inf, 0.2).requires_grad_() for x in inputs.values()]

    def function(*tensors):
        out, lse = fwd(**dict(zip(names, tensors, strict=True)), **op_options)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert gradcheck(function, leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", ["out", "lse"])
def test_one_of_out_and_lse(which, dtype):
    inputs, options, dout, d_lse = Problem(dtype=dtype, sinks=True, causal=True, lengths_k=(60, 40)).tensors()
    check(inputs, options, *((dout, None) if which == "out" else (None, d_lse)))


def test_lse_gradient_is_the_softmax():
    q, k, v = (torch.randn(1, n, 1, 16, dtype=torch.float64, requires_grad=True) for n in (6, 9, 9))
    _, lse = fwd(q, k, v, softmax_scale=1.0)
    (dq,) = torch.autograd.grad(lse.sum(), q)
    want = torch.softmax(q[0, :, 0] @ k[0, :, 0].T, -1) @ k[0, :, 0]
    torch.testing.assert_close(dq[0, :, 0], want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_needle(dtype):
    """With one-hot weights dv[j] is the sum of dout over the queries that found key j."""
    k = signs(130, 128)
    needle = torch.randint(0, 130, (200,))
    q, v = (k[needle] * 16).to(dtype)[None, :, None], torch.randn(1, 130, 1, 64).to(dtype).requires_grad_()
    dout = (torch.randint(-8, 9, (1, 200, 1, 64)) / 8).to(dtype)
    out, _ = fwd(q, k.to(dtype)[None, :, None], v, softmax_scale=0.5)
    (dv,) = torch.autograd.grad(out, v, dout)
    want = torch.zeros(130, 64, dtype=torch.float64).index_add(0, needle, dout[0, :, 0].double())
    torch.testing.assert_close(dv[0, :, 0].double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_expanded_dout(dtype):
    """out.sum() gives a gradient whose strides are all 0."""
    inputs, options, dout, _ = Problem(
        dtype=dtype, causal=True, lengths_q=(60, 60), lengths_k=(70, 70)
    ).tensors()
    ones = torch.ones((), dtype=dtype).expand(dout.shape)
    assert ones.stride() == (0, 0, 0, 0)
    check(inputs, options, ones)


def test_gradients_asked_for_one_by_one():
    inputs, options, dout, _ = Problem(sinks=True).tensors()
    everything = run(fwd, inputs, options, dout)
    for name in inputs:
        leaves = {n: x.detach().requires_grad_(n == name) for n, x in inputs.items()}
        out, _ = fwd(**leaves, **options)
        (got,) = torch.autograd.grad(out, leaves[name], dout)
        assert torch.equal(got, everything[f"d_{name}"])


def test_no_gradient_without_need():
    q = torch.randn(1, 4, 1, 8)
    out, lse = fwd(q, q, q)
    assert not out.requires_grad and not lse.requires_grad
    with torch.no_grad():
        out, _ = fwd(q.requires_grad_(), q, q)
    assert not out.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic(dtype):
    inputs, options, dout, _ = Problem(
        dtype=dtype, lengths_q=(300, 200), lengths_k=(250, 310), causal=True
    ).tensors()
    first = run(fwd, inputs, options | {"deterministic": True}, dout)
    for _ in range(5):
        again = run(fwd, inputs, options | {"deterministic": True}, dout)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_deterministic_algorithms_turn_it_on(monkeypatch):
    from flash_ext import ops

    seen = []
    backward_options = ops.backward_options
    monkeypatch.setattr(
        ops, "backward_options", lambda call: seen.append(call["deterministic"]) or backward_options(call)
    )
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode)
        try:
            fwd(q, q, q)[0].sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_written_into_given_tensors(dtype):
    """bwd_out writes where it is told, in any layout, what bwd returns, and nothing beside it."""
    inputs, options, dout, d_lse = Problem(
        dtype=dtype, causal=True, sinks=True, head_dim=24, head_dim_v=40
    ).tensors()
    sinks = inputs.pop("sinks")
    out, lse = fwd(**inputs, **options, sinks=sinks)
    saved = (dout, d_lse, *inputs.values(), out, lse)
    want = torch.ops.flash_ext.bwd(*saved, **options, sinks=sinks)
    room = [torch.full((*x.shape[:2], 3, *x.shape[2:]), 7.0, dtype=dtype) for x in inputs.values()]
    d_sink = torch.ops.flash_ext.bwd_out(*saved, *(r[:, :, 1] for r in room), **options, sinks=sinks)
    for r, w in zip(room, want, strict=False):
        assert torch.equal(r[:, :, 1], w)
        assert (r[:, :, [0, 2]] == 7.0).all()
    assert torch.equal(d_sink, want[3]) and d_sink.dtype == accumulator(dtype)


def test_d_sink_is_empty_without_sinks():
    inputs, options, dout, _ = Problem().tensors()
    out, lse = fwd(**inputs, **options)
    *_, d_sink = torch.ops.flash_ext.bwd(dout, None, *inputs.values(), out, lse, **options)
    assert d_sink.shape == (0,)


def test_checkpointing():
    from torch.utils.checkpoint import checkpoint

    from flash_ext import flash_attn_func

    q, k, v = (torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3))
    gradients = []
    for wrap in (False, True):
        torch.manual_seed(3)
        arguments = (q, k, v, 0.4)
        out = (
            checkpoint(flash_attn_func, *arguments, use_reentrant=False)
            if wrap
            else flash_attn_func(*arguments)
        )
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
