"""Packed sequences: against the reference, against padded calls, and alone in memory."""

import math

import pytest
import torch
from compare import DTYPES, check, fwd, run
from strategies import Problem

SHAPES = [
    {"packed_q": True, "packed_k": True},
    {"packed_q": True, "packed_k": True, "spare": 4},
    {"packed_q": True},
    {"packed_k": True},
    {
        "packed_q": True,
        "packed_k": True,
        "lengths_q": (0, 3, 65, 1),
        "lengths_k": (5, 0, 64, 130),
        "spare": 1,
    },
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "sinks": True}, {"window": (9, 4), "alibi": 2}, {"dropout_p": 0.3}],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_options(shape, options, dtype):
    check(*Problem(dtype=dtype, head_dim=32, head_dim_v=48, **shape, **options).tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_does_not_see_its_neighbours(dtype):
    """Other numbers in every other sequence and in the rows between change not a bit of this one."""
    problem = Problem(dtype, (70, 33, 40), (80, 65, 20), True, True, spare=2, causal=True)
    inputs, options, dout, d_lse = problem.tensors()
    rows = {
        "q": slice(*sequence(options["cu_seqlens_q"], 1)),
        "k": slice(*sequence(options["cu_seqlens_k"], 1)),
    }
    first = run(fwd, inputs, options, dout, d_lse)
    for name, x in inputs.items():
        other = torch.randn_like(x) * 100
        other[rows["q" if name == "q" else "k"]] = x[rows["q" if name == "q" else "k"]]
        x.copy_(other)
    second = run(fwd, inputs, options, dout, d_lse)
    for name in ("out", "d_q"):
        assert torch.equal(first[name][rows["q"]][:33], second[name][rows["q"]][:33])
    for name in ("d_k", "d_v"):
        assert torch.equal(first[name][rows["k"]][:65], second[name][rows["k"]][:65])
    assert torch.equal(first["lse"][:, rows["q"]][:, :33], second["lse"][:, rows["q"]][:, :33])


def sequence(cu_seqlens, b):
    return int(cu_seqlens[b]), int(cu_seqlens[b + 1])


def test_unused_rows_are_written():
    problem = Problem(torch.float32, (5, 2), (4, 6), True, True, spare=3, head_dim=8, head_dim_v=8)
    inputs, options, dout, d_lse = problem.tensors()
    results = run(fwd, inputs, options, dout, d_lse)
    unused_q, unused_k = inputs["q"].isnan().all((1, 2)), inputs["k"].isnan().all((1, 2))
    assert unused_q.sum() == 9 and unused_k.sum() == 9
    assert (results["out"][unused_q] == 0).all() and (results["d_q"][unused_q] == 0).all()
    assert (results["lse"][:, unused_q] == -math.inf).all()
    assert (results["d_k"][unused_k] == 0).all() and (results["d_v"][unused_k] == 0).all()


@pytest.mark.parametrize("hints", [(1, 1), (10**6, 10**6), (None, None)])
def test_max_seqlen_is_only_a_hint(hints):
    inputs, options, dout, _ = Problem(packed_q=True, packed_k=True, causal=True).tensors()
    plain = run(fwd, inputs, options, dout)
    hinted = run(fwd, inputs, options | {"max_seqlen_q": hints[0], "max_seqlen_k": hints[1]}, dout)
    assert all(torch.equal(plain[name], hinted[name]) for name in plain)


def test_many_short_sequences():
    lengths = tuple(int(n) for n in torch.randint(0, 6, (150,)))
    check(
        *Problem(
            torch.float32, lengths, lengths[::-1], True, True, head_dim=16, head_dim_v=16, causal=True
        ).tensors()
    )


@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
@pytest.mark.parametrize("by", ["cu_seqlens_k", "seqused_k"])
def test_pages(page_size, by):
    from flash_ext import flash_attn_varlen_func

    inputs, options, dout, _ = Problem(
        torch.float64, (9, 4, 2), (37, 20, 0), True, True, head_dim=16, head_dim_v=8
    ).tensors()
    q, k, v = (x.requires_grad_() for x in inputs.values())
    cu_q, cu_k = options["cu_seqlens_q"], options["cu_seqlens_k"]
    want = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 37, causal=True)
    blocks = -(-37 // page_size)
    table = torch.randperm(3 * blocks, dtype=torch.int32).view(3, blocks)
    pages = [torch.full((3 * blocks, page_size, *x.shape[1:]), math.nan, dtype=x.dtype) for x in (k, v)]
    for page, x in zip(pages, (k, v), strict=True):
        for b in range(3):
            rows = x.detach()[cu_k[b] : cu_k[b + 1]]
            for n, start in enumerate(range(0, len(rows), page_size)):
                part = rows[start : start + page_size]
                page[table[b, n], : len(part)] = part
            table[b, -(-len(rows) // page_size) :] = 10**6  # nobody may follow these
    pages = [page.requires_grad_() for page in pages]
    lengths = (
        {"cu_seqlens_k": cu_k} if by == "cu_seqlens_k" else {"cu_seqlens_k": None, "seqused_k": cu_k.diff()}
    )
    out = flash_attn_varlen_func(
        q, *pages, cu_q, max_seqlen_q=9, max_seqlen_k=37, causal=True, block_table=table, **lengths
    )
    assert torch.equal(out, want)
    got, expected = torch.autograd.grad(out, [q, *pages], dout), torch.autograd.grad(want, [q, k, v], dout)
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1].sum((0, 1)), expected[1].sum(0))
