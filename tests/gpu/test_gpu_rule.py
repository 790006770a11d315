"""Every kind of problem, by the rule of compare.py: each row and block within twice plain PyTorch's error."""

import functools

import bed
import compare
import pytest
import torch

PROBLEMS = {
    "one tile": {"lengths_q": (128,), "lengths_k": (64,)},
    "long": {"lengths_q": (1024,), "lengths_k": (1024,), "causal": True},
    "ragged tails": {"lengths_q": (1, 129, 257), "lengths_k": (65, 1, 193)},
    "seqlen 1": {"lengths_q": (1, 1), "lengths_k": (1, 1)},
    "decode": {"lengths_q": (1, 1, 1), "lengths_k": (1000, 64, 3), "group": 8},
    "more queries": {"lengths_q": (300, 200), "lengths_k": (100, 64)},
    "more keys": {"lengths_q": (100, 64), "lengths_k": (300, 200), "causal": True},
    "causal, empty rows": {"lengths_q": (300, 200), "lengths_k": (100, 64), "causal": True},
    "causal, top left": {"lengths_q": (100, 200), "lengths_k": (200, 100), "causal": True, "top_left": True},
    "window": {"lengths_q": (300, 200), "lengths_k": (300, 250), "window": (70, 3)},
    "left window": {"lengths_q": (300, 200), "lengths_k": (300, 250), "causal": True, "window": (33, -1)},
    "window, empty rows": {"lengths_q": (300, 70), "lengths_k": (100, 64), "window": (20, 0), "top_left": True},
    "sinks": {"sinks": True, "group": 4},
    "sinks, empty rows": {"sinks": True, "lengths_q": (200, 130), "lengths_k": (70, 0), "causal": True},
    "group of 16": {"nheads_k": 2, "group": 16, "causal": True},
    "one kv head": {"nheads_k": 1, "group": 7},
    "packed": {"packed_q": True, "packed_k": True, "lengths_q": (5, 0, 129, 300), "lengths_k": (64, 10, 200, 65)},
    "packed, spare rows": {"packed_q": True, "packed_k": True, "spare": 7, "causal": True, "sinks": True},
    "packed queries": {"packed_q": True, "lengths_q": (1, 150), "window": (40, -1)},
    "packed keys": {"packed_k": True, "spare": 2, "causal": True},
    "many short": {"packed_q": True, "packed_k": True, "lengths_q": tuple(range(24)), "lengths_k": (3, 40, 17) * 8},
    "no keys": {"lengths_k": (0, 0)},
    "no keys, sinks": {"lengths_k": (0, 50), "sinks": True, "packed_k": True},
    "no queries": {"lengths_q": (0, 0)},
    "spare rows": {"spare": 130, "causal": True},
    "scale": {"scale": 0.71},
    # More blocks of keys than a card has SMs: a backward may cut the last ones into parts, here of equal tiles
    # with blocks of 64, 96 or 128 keys and of 64, 80 or 128, and of causal ones none.
    "many blocks of keys": {"lengths_q": (400,) * 2, "lengths_k": (1280,) * 2, "nheads_k": 7, "group": 1},
    "more blocks of keys": {"lengths_q": (260,) * 3, "lengths_k": (1280,) * 3, "nheads_k": 9, "group": 1},
    "causal, many blocks of keys": {"lengths_q": (400, 90), "lengths_k": (1280, 1000), "nheads_k": 14, "causal": True},
    "few blocks of keys": {"lengths_q": (1500, 900), "lengths_k": (100, 130), "nheads_k": 1, "group": 3},
    "causal, few blocks of keys": {"lengths_q": (900,), "lengths_k": (900,), "nheads_k": 1, "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_problem(name, kernel):
    kernel.check_problem(**PROBLEMS[name], seed=fresh_seed())


@pytest.mark.parametrize("kernel", bed.WITH_BACKWARD, ids=str)
@pytest.mark.parametrize("hint", [0, 130, 10**6])
def test_hints_of_packed_lengths_may_be_wrong(hint, kernel):
    lengths = {"lengths_q": (900, 300), "lengths_k": (300, 130)}
    problem = kernel.fits(packed_q=True, packed_k=True, **lengths, nheads_k=1, group=2, seed=fresh_seed())
    function = functools.partial(kernel.forward, max_seqlen_q=hint, max_seqlen_k=hint)
    inputs, options, *gradients = problem.tensors(bed.DEVICE)
    compare.Expected(inputs, options, *gradients).hold(function)


MODIFIED = {
    "softcap": {"softcap": 5.0},
    "softcap beyond the scores": {"softcap": 1e4},
    "small softcap, sinks": {"softcap": 0.3, "sinks": True, "scale": 0.71},
    "alibi": {"alibi": 1, "lengths_q": (300, 200), "lengths_k": (200, 300)},
    "alibi, causal, packed": {"alibi": 2, "causal": True, "packed_q": True, "packed_k": True, "spare": 3},
    "alibi, top left window": {"alibi": 2, "window": (70, 3), "top_left": True, "group": 4},
    "alibi at 64k": {"alibi": 1, "lengths_q": (70,), "lengths_k": (66000,), "nheads_k": 1},
    "dropout": {"dropout_p": 0.3, "lengths_q": (300, 17), "lengths_k": (200, 300)},
    "dropout, causal": {"dropout_p": 0.17, "causal": True, "lengths_q": (129, 300), "lengths_k": (300, 200)},
    "dropout, packed, sinks": {"dropout_p": 0.5, "packed_q": True, "packed_k": True, "spare": 5, "sinks": True},
    "nearly all dropped": {"dropout_p": 0.999},
    "all of them": {"softcap": 3.0, "alibi": 2, "dropout_p": 0.1, "window": (90, 20), "sinks": True, "group": 3},
}  # fmt: skip


@pytest.mark.parametrize("kernel", [kernel for kernel in bed.KERNELS if kernel.modified], ids=str)
@pytest.mark.parametrize("name", MODIFIED)
def test_modified_scores(name, kernel):
    kernel.check_problem(**MODIFIED[name], seed=fresh_seed())


@pytest.mark.parametrize("of", ["q and k", "v"])
@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_every_head_dim_of_the_bucket(kernel, of):
    one = {"lengths_q": (70,), "lengths_k": (130,), "seed": fresh_seed()}
    smaller = max((d for d, _ in bed.BUCKETS if d < kernel.head_dim), default=0)
    if of == "q and k":
        for dim in range(smaller + 8, kernel.head_dim, 8):
            kernel.check_problem(head_dim=dim, head_dim_v=min(dim, kernel.head_dim_v), **one)
    else:  # any up to q's: every remainder of 32
        for dim in range(8, kernel.head_dim_v, 24):
            kernel.check_problem(head_dim_v=dim, **one)


def test_there_is_a_kernel():
    assert bed.KERNELS, f"no CUDA backend runs here: {torch.ops.flash_ext.backends()}"


@pytest.mark.parametrize("backend", bed.BACKENDS)
@pytest.mark.parametrize("shape_q, shape_k", [
    ((0, 5, 2, 64), (0, 7, 2, 64)), ((2, 0, 2, 64), (2, 7, 2, 64)), ((2, 5, 2, 64), (2, 0, 2, 64)),
    ((2, 5, 0, 64), (2, 7, 0, 64)), ((0, 0, 0, 64), (0, 0, 0, 64)),
], ids=str)  # fmt: skip
def test_zero_sizes(backend, shape_q, shape_k):
    like = {"dtype": bed.dtype_of(backend), "device": bed.DEVICE}
    q, k = (torch.randn(shape, **like) for shape in (shape_q, shape_k))
    out, lse = torch.ops.flash_ext.fwd(q, k, k, version=backend)
    assert out.shape == q.shape and not out.any()
    assert lse.shape == (shape_q[0], shape_q[2], shape_q[1]) and (lse == -torch.inf).all()
    if bed.can(backend, "backward"):
        gradients = torch.ops.flash_ext.bwd(out, None, q, k, k, out, lse, version=backend)
        assert [g.shape for g in gradients[:3]] == [q.shape, k.shape, k.shape]
        assert not any(g.any() for g in gradients)


def fresh_seed() -> int:
    return int(torch.randint(2**31, ()))
