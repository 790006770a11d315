"""flash_ext.sdpa against torch's scaled_dot_product_attention: shapes, masks it can express, and those it cannot."""

import inspect

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from flash_ext import sdpa

SDPA = torch.nn.functional.scaled_dot_product_attention


def same(q, k, v, **options):
    """Forward and gradients agree with torch's."""
    results = []
    for function in (sdpa, SDPA):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves, **options)
        torch.manual_seed(0)
        results.append([out, *torch.autograd.grad(out, leaves, torch.randn(out.shape, dtype=out.dtype))])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs)


def make(*lead, rows=9, keys=13, dim=8, dim_v=None, dtype=torch.float64):
    return (
        torch.randn(*lead, rows, dim, dtype=dtype),
        torch.randn(*lead, keys, dim, dtype=dtype),
        torch.randn(*lead, keys, dim_v or dim, dtype=dtype),
    )


def test_signature():
    parameters = inspect.signature(sdpa).parameters.values()
    assert [(p.name, p.default) for p in parameters if p.default is not p.empty] == [
        ("attn_mask", None),
        ("dropout_p", 0.0),
        ("is_causal", False),
        ("scale", None),
        ("enable_gqa", False),
    ]
    assert [p.name for p in parameters if p.default is p.empty] == ["query", "key", "value"]


@pytest.mark.parametrize("lead", [(), (4,), (2, 4), (2, 3, 4), (1, 2, 3, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_shapes(lead, options):
    same(*make(*lead), **options)


def test_value_dimension_and_dtypes():
    same(*make(2, 4, dim_v=5))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v = make(2, 4, dtype=dtype)
        out = sdpa(q, k, v, is_causal=True)
        assert out.dtype == dtype
        rounding = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(out, SDPA(q, k, v, is_causal=True), **rounding)


def test_grouped_heads():
    q, _, _ = make(2, 6)
    _, k, v = make(2, 2)
    same(q, k, v, enable_gqa=True, is_causal=True)
    with pytest.raises(RuntimeError):
        sdpa(q, k, v)
    with pytest.raises(ValueError, match="nheads must be a multiple of nheads_k, got 6 and 4"):
        sdpa(q, *make(2, 4)[1:], enable_gqa=True)


def test_broadcast():
    q, _, _ = make(2, 3, 4)
    _, k, v = make(1, 3, 1)
    same(q, k, v)


def test_no_copy():
    """Views of (batch, seqlen, heads, dim) tensors go in where they lie, and the result is such a view."""
    q, k, v = (torch.randn(2, n, 4, 16).transpose(1, 2) for n in (9, 13, 13))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = sdpa(q, k, v)
    assert not {event.name for event in profile.events()} & {"aten::copy_", "aten::clone", "aten::contiguous"}
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("rows, keys", [(9, 13), (13, 13), (13, 9)])
def test_causal_masks(rows, keys):
    q, k, v = make(2, 3, rows=rows, keys=keys)
    full = torch.ones(rows, keys, dtype=torch.bool)
    top_left = sdpa(q, k, v, is_causal=True)
    assert torch.equal(sdpa(q, k, v, attn_mask=causal_upper_left(rows, keys)), top_left)
    assert torch.equal(sdpa(q, k, v, attn_mask=full.tril()), top_left)
    assert torch.equal(sdpa(q, k, v, attn_mask=full.tril().expand(2, 1, rows, keys)), top_left)
    lower_right = sdpa(q, k, v, attn_mask=causal_lower_right(rows, keys))
    assert torch.equal(lower_right, sdpa(q, k, v, attn_mask=full.tril(keys - rows)))
    seen = max(rows - keys, 0)  # torch answers rows without keys in its own way
    want = SDPA(q[..., seen:, :], k, v, attn_mask=full.tril(keys - rows)[seen:])
    torch.testing.assert_close(lower_right[..., seen:, :], want)
    assert (lower_right[..., :seen, :] == 0).all()


@pytest.mark.parametrize("shape", [(2, 1, 1, 13), (2, 1, 9, 13), (2, 3, 9, 13)])
def test_padding_masks(shape):
    q, k, v = make(2, 3)
    lengths = torch.tensor([5, 13])
    mask = (torch.arange(13) < lengths[:, None])[:, None, None].expand(shape)
    same(q, k, v, attn_mask=mask)
    assert torch.equal(sdpa(q, k, v, attn_mask=torch.ones(9, 13, dtype=torch.bool)), sdpa(q, k, v))
    assert torch.equal(sdpa(q, k, v, attn_mask=torch.ones(13, dtype=torch.bool)), sdpa(q, k, v))


def test_padding_mask_without_batch():
    q, k, v = make(3)
    mask = (torch.arange(13) < 7).expand(3, 9, 13)
    same(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("kind", ["float", "middle", "left padding", "per head", "per row", "banded"])
def test_masks_that_cannot_be_expressed(kind):
    q, k, v = make(2, 3)
    mask = torch.ones(2, 3, 9, 13, dtype=torch.bool)
    if kind == "float":
        mask = torch.zeros(9, 13, dtype=torch.float64)
    elif kind == "middle":
        mask[..., 4] = False
    elif kind == "left padding":
        mask[1, ..., :3] = False
    elif kind == "per head":
        mask[:, 1, :, 6:] = False
    elif kind == "per row":
        mask[:, :, 2, 6:] = False
    else:
        mask = mask.tril().triu(-3)
    text = "must be boolean" if kind == "float" else "no other mask can be expressed"
    with pytest.raises(NotImplementedError, match=f"flash_ext: attn_mask .*{text}"):
        sdpa(q, k, v, attn_mask=mask)


def test_mask_and_is_causal():
    q, k, v = make(2, 3)
    with pytest.raises(ValueError, match="attn_mask must be None when is_causal is True"):
        sdpa(q, k, v, attn_mask=torch.ones(9, 13, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match=r"key must have shape \(..., heads, seqlen, dim\), got \(8,\)"):
        sdpa(q, k[0, 0, 0], v)


def test_dropout():
    q, k, v = make(2, 3)
    torch.manual_seed(1)
    first = sdpa(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, sdpa(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, sdpa(q, k, v, dropout_p=0.5))
