"""The forward on padded batches: every option and dtype, exact needles, edges, layouts."""

import math

import pytest
import torch
from compare import DTYPES, check, fwd
from strategies import LAYOUTS, Problem, with_layout

OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "top_left": True},
    {"window": (20, 5)},
    {"window": (0, -1), "top_left": True},
    {"causal": True, "window": (33, 7)},
    {"softcap": 3.0},
    {"alibi": 1, "causal": True},
    {"alibi": 2},
    {"sinks": True},
    {"scale": 0.31},
    {"dropout_p": 0.2},
    {"nheads_k": 1, "group": 6},
    {"head_dim": 192, "head_dim_v": 128},
    {"head_dim": 40, "head_dim_v": 72},
    {"lengths_q": (129, 64), "lengths_k": (64, 129), "causal": True},
    {
        "spare": 3,
        "causal": True,
        "sinks": True,
        "softcap": 2.0,
        "alibi": 2,
        "window": (50, 50),
        "dropout_p": 0.1,
    },
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, dtype):
    inputs, op_options, _, _ = Problem(dtype=dtype, **options).tensors()
    check(inputs, op_options)


def signs(rows: int, dim: int) -> torch.Tensor:
    return torch.randint(0, 2, (rows, dim)).double() * 2 - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("lengths", [(200, 200), (70, 193), (1, 321)], ids=str)
def test_needle(lengths, mask, dtype):
    """Every query sees one key alone, so a key that is dropped, doubled, permuted or leaked shows in its row.

    Keys are random signs and query i is key π(i) scaled until its weight is 1; π covers every key, and for masks
    the last visible one and one that is hidden, which must not be found.
    """
    rows, keys = lengths
    dim, offset = 128, keys - rows
    k, v = signs(keys, dim), torch.randn(keys, 64, dtype=torch.float64)
    options = {"none": {}, "causal": {"causal": True}, "window": {"window_left": 40, "window_right": 3}}[mask]
    last = torch.arange(rows) + offset + {"none": keys, "causal": 0, "window": 3}[mask]
    first = torch.arange(rows) + offset - 40 if mask == "window" else torch.zeros(rows, dtype=torch.int64)
    first, last = first.clamp(0, keys - 1), last.clamp(0, keys - 1)
    shifts = range(0, keys, max(rows, 1)) if mask == "none" else (0, 1, 7)
    for shift in shifts:
        if mask == "none":
            needle = (torch.arange(rows) + shift) % keys
        else:
            needle = (last - shift).clamp(min=first)
        q, half = k[needle], [x.to(dtype)[None, :, None] for x in (k, v)]
        out, lse = fwd((q * 16).to(dtype)[None, :, None], *half, softmax_scale=0.5, **options)
        want = v.to(dtype)[needle]
        step = torch.finfo(dtype).eps
        worst = ((out[0, :, 0].double() - want.double()).abs() / want.double().abs().clamp(min=step)).amax(1)
        assert float(worst.max()) <= 2 * step, (
            f"row {int(worst.argmax())} did not find key {int(needle[worst.argmax()])}"
        )
        torch.testing.assert_close(lse[0, 0].double(), torch.full((rows,), 16 * dim * 0.5).double())
    if mask == "none":
        return
    hidden = last + 1
    rows_hidden = hidden < keys
    q = torch.where(rows_hidden[:, None], k[hidden.clamp(max=keys - 1)], k[last])[None, :, None]
    check({"q": q.to(dtype), "k": k[None, :, None].to(dtype), "v": v[None, :, None].to(dtype)}, options)


@pytest.mark.parametrize("rows, keys", [(2, 5), (5, 2)])
def test_causal_alignment(rows, keys):
    """The example of the docstrings: which keys a query sees, read off from equal weights."""
    q, k = torch.zeros(1, rows, 1, 8), torch.zeros(1, keys, 1, 8)
    v = torch.eye(keys)[None, :, None]
    seen = {
        top_left: fwd(q, k, v, causal=True, top_left=top_left)[0][0, :, 0] > 0 for top_left in (False, True)
    }
    assert torch.equal(seen[True], torch.ones(rows, keys, dtype=torch.bool).tril())
    assert torch.equal(seen[False], torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows))


def test_rows_without_keys():
    inputs, options, _, _ = Problem(lengths_q=(70, 5), lengths_k=(3, 0), causal=True, packed_q=True).tensors()
    out, lse = fwd(**inputs, **options)
    empty = torch.tensor([True] * 67 + [False] * 3 + [True] * 5)
    assert (out[empty] == 0).all() and (lse[:, empty] == -math.inf).all()
    assert (out[~empty] != 0).all() and lse[:, ~empty].isfinite().all()
    sinks = torch.tensor([0.5, -1.0, 3.0, -math.inf])
    out, lse = fwd(**inputs, **options, sinks=sinks)
    assert (out[empty] == 0).all() and (lse[:, empty] == sinks[:, None]).all()


@pytest.mark.parametrize("zero", ["batch", "seqlen_q", "seqlen_k", "heads", "everything"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_sizes(zero, dtype):
    sizes = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "heads": 2}
    sizes |= dict.fromkeys(sizes, 0) if zero == "everything" else {zero: 0}
    batch, rows, keys, heads = sizes.values()
    q, k = torch.randn(batch, rows, heads, 8, dtype=dtype), torch.randn(batch, keys, heads, 8, dtype=dtype)
    check({"q": q, "k": k, "v": k}, {}, torch.randn_like(q), torch.randn(batch, heads, rows))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 72, 37])
def test_layouts(layout, head_dim):
    """Any strides give the values that the same numbers give in order."""
    inputs = {name: torch.randn(2, n, 3, head_dim) for name, n in (("q", 33), ("k", 65), ("v", 65))}
    inputs = {name: with_layout(x, layout) for name, x in inputs.items()}
    results = check(inputs, {"causal": True})
    plain, _ = fwd(*(x.contiguous() for x in inputs.values()), causal=True)
    assert torch.equal(results["out"], plain)


def test_size_one_dimensions_have_no_stride():
    q, k, v = (torch.randn(1, n, 1, 32) for n in (1, 40, 40))
    odd = [with_layout(x, "odd strides") for x in (q, k, v)]
    assert odd[0].stride() == (7777, 7777, 7777, 1)
    assert torch.equal(fwd(*odd)[0], fwd(q, k, v)[0])


def test_misaligned_address():
    base = torch.randn(3, 1 + 2 * 20 * 2 * 64).bfloat16()
    q, k, v = (row[1:].view(2, 20, 2, 64) for row in base)
    assert torch.equal(fwd(q, k, v)[0], fwd(q.clone(), k.clone(), v.clone())[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["large", "rising", "equal", "outliers", "one huge row"])
def test_distributions(kind, dtype):
    """Scores that overflow a softmax without running maximum, or move the maximum at every block."""
    q, k, v = (torch.randn(1, n, 2, 64, dtype=torch.float64) for n in (70, 300, 300))
    if kind == "large":
        q = q * 50
    elif kind == "rising":  # the maximum grows block by block
        k = torch.ones_like(k) * torch.linspace(-4, 4, 300, dtype=torch.float64)[None, :, None, None]
        q = torch.ones_like(q) * 1.4
    elif kind == "equal":
        k = torch.zeros_like(k)
    elif kind == "outliers":
        k[torch.rand(k.shape) < 1e-3] *= 30
    else:
        q[0, 3] *= 3e3
    results = check({"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}, {})
    assert results["out"].isfinite().all() and results["lse"].isfinite().all()


def test_scores_near_the_end_of_float16():
    q = torch.full((1, 3, 1, 8), 60000.0, dtype=torch.float16)
    k = torch.tensor([1.0, -1.0, 0.5]).half()[None, :, None, None].expand(1, 3, 1, 8)
    v = torch.tensor([[1.0], [2.0], [3.0]]).half()[None, :, None].expand(1, 3, 1, 8)
    out, lse = fwd(q, k, v, softmax_scale=1.0)
    assert (out == 1).all()
    assert torch.equal(lse, torch.full((1, 1, 3), 480000.0 - 480000.0 % 1)) or torch.allclose(
        lse, 8 * q[0, 0, 0, 0].float()
    )


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        problem = Problem(lengths_q=(300,), lengths_k=(300,), causal=True)
        first, second = (check(*problem.tensors()) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(first["out"], second["out"])


def test_memory_is_linear():
    """16384 queries and keys: the score matrix alone would be 1 GiB. The planned workspace is below 64 MiB."""
    import json

    q = torch.empty(1, 16384, 1, 64, device="meta")
    for backward in (False, True):
        facts = json.loads(torch.ops.flash_ext.plan(q, q, q, backward=backward, device="cpu"))
        assert facts["workspace_bytes"] < 2**26
