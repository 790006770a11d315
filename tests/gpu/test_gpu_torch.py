"""Errors, autograd and torch.compile on the GPU."""

import bed
import pytest
import torch
from torch import nn

import flash_ext


def halves(head_dim: int = 64, dtype=torch.bfloat16, **options) -> list[torch.Tensor]:
    return [torch.randn(2, 100, 2, head_dim, device=bed.DEVICE, dtype=dtype, **options) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_floats_are_sent_to_sdpa(dtype):
    with pytest.raises(RuntimeError) as raised:
        flash_ext.flash_attn_func(*halves(dtype=dtype))
    assert str(raised.value) == (
        f"flash_ext: q must be bfloat16 or float16 on a GPU, got {str(dtype)[6:]}: "
        "convert to bfloat16, or use torch's scaled_dot_product_attention (SDPA)"
    )


UNSUPPORTED = {
    "softcap": ({"softcap": 5.0}, 64, "softcap"),
    "alibi": ({"alibi_slopes": torch.ones(2)}, 64, "alibi_slopes"),
    "dropout": ({"dropout_p": 0.1}, 64, "dropout"),
    "head_dim 256": ({}, 256, "head_dim 256"),
}


@pytest.mark.parametrize("backend", bed.BACKENDS)
@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_what_is_not_supported_is_named(feature, backend):
    options, head_dim, name = UNSUPPORTED[feature]
    options = {k: x.to(bed.DEVICE) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    if bed.can(backend, feature):
        out = flash_ext.flash_attn_func(*halves(head_dim, bed.dtype_of(backend)), **options, version=backend)
        assert torch.isfinite(out).all()
        return
    with pytest.raises(RuntimeError) as raised:
        flash_ext.flash_attn_func(*halves(head_dim, bed.dtype_of(backend)), **options, version=backend)
    assert str(raised.value).startswith("flash_ext: ") and name in str(raised.value)


@pytest.mark.parametrize("head_dim", [1, 63, 100])
@pytest.mark.parametrize("backend", bed.BACKENDS)
def test_any_head_dim_is_padded(backend, head_dim):
    q, k, v = halves(head_dim, bed.dtype_of(backend))
    out = flash_ext.flash_attn_func(q, k, v, causal=True, version=backend)
    want = double_attention(q, k, v, causal=True)
    assert out.shape == want.shape and float((out - want).abs().max()) < 2e-2
    assert flash_ext.plan(q, k, v, version=backend).backend == backend


def test_an_error_lists_every_backend():
    with bed.forced(tile=99), pytest.raises(RuntimeError) as raised:
        flash_ext.flash_attn_func(*halves())
    assert str(raised.value).startswith("flash_ext: no backend can run this problem: fa3: ")
    assert all(f"; {name}: " in str(raised.value) for name in ("fa2", "fa1", "cpu"))


WITHOUT_GRADIENTS = [name for name in bed.BACKENDS if not bed.can(name, "softcap", backward=True)]


@pytest.mark.parametrize("backend", WITHOUT_GRADIENTS)
def test_a_missing_gradient_is_an_error_and_never_wrong(backend):
    q, k, v = halves(dtype=bed.dtype_of(backend), requires_grad=True)
    out = flash_ext.flash_attn_func(q, k, v, softcap=5.0, version=backend)
    assert torch.isfinite(out).all()
    with pytest.raises(RuntimeError, match=f"flash_ext: .*{backend}: softcap has no gradients yet"):
        out.sum().backward()
    assert q.grad is k.grad is v.grad is None


class Block(nn.Module):
    """A transformer block with grouped-query attention."""

    def __init__(self, width=256, heads=4, heads_k=2, head_dim=64):
        super().__init__()
        self.heads, self.heads_k = heads, heads_k
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = (
            nn.Linear(width, (heads + 2 * heads_k) * head_dim),
            nn.Linear(heads * head_dim, width),
        )
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, attention=flash_ext.flash_attn_func):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (self.heads + 2 * self.heads_k, -1))
        q, k, v = qkv.split([self.heads, self.heads_k, self.heads_k], -2)
        x = x + self.out(attention(q, k, v, causal=True).flatten(-2))
        return x + self.mlp(self.norm_2(x))


def double_attention(q, k, v, causal):
    return flash_ext.reference.attention(q, k, v, causal=causal)[0]


@torch.no_grad()
def test_compiled_block_equals_eager():
    block = Block().to(bed.DEVICE, torch.bfloat16)
    x = torch.randn(2, 200, 256, device=bed.DEVICE, dtype=torch.bfloat16)
    eager = block(x)
    assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(x), eager)
    fused = torch.compile(block, fullgraph=True)(x)
    want = block.double()(x.double(), attention=double_attention)
    assert float((fused - want).abs().max()) <= 2 * float((eager - want).abs().max())
