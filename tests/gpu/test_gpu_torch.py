"""Errors, autograd and torch.compile on the GPU."""

import bed
import pytest
import torch
from torch import nn

import flash_ext
from flash_ext import flash_attn_3


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


def training_step(block, x, model):
    """The gradient of each parameter, by a model that has the block's parameters."""
    block.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in block.parameters()]


def test_compiled_training_step_equals_eager():
    block = Block().to(bed.DEVICE, torch.bfloat16)
    x = torch.randn(2, 200, 256, device=bed.DEVICE, dtype=torch.bfloat16)
    with torch.random.fork_rng():
        eager = training_step(block, x, block)
        traced = training_step(block, x, torch.compile(block, fullgraph=True, backend="aot_eager"))
        fused = training_step(block, x, torch.compile(block, fullgraph=True))
    exact = block.double()
    want = training_step(exact, x.double(), lambda x: exact(x, attention=double_attention))
    for compiled in (traced, fused):
        for got, plain, true in zip(compiled, eager, want, strict=True):
            assert float((got - true).norm()) <= 1.25 * float((plain - true).norm())


def packed(*tensors):
    return [x.flatten(0, 1) for x in tensors]


def unpacked(out, like):
    return out.unflatten(0, like.shape[:2])


def cu_seqlens(x):
    return torch.arange(0, x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


# Each public function that has gradients, as a function of padded q, k and v.
FUNCTIONS = {
    "func": flash_ext.flash_attn_func,
    "qkvpacked": lambda q, k, v, **o: flash_ext.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **o),
    "kvpacked": lambda q, k, v, **o: flash_ext.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **o),
    "varlen": lambda q, k, v, **o: unpacked(
        flash_ext.flash_attn_varlen_func(*packed(q, k, v), *[cu_seqlens(q)] * 2, *[q.shape[1]] * 2, **o), q
    ),
    "varlen_qkvpacked": lambda q, k, v, **o: unpacked(
        flash_ext.flash_attn_varlen_qkvpacked_func(
            torch.stack(packed(q, k, v), 1), cu_seqlens(q), q.shape[1], **o
        ),
        q,
    ),
    "varlen_kvpacked": lambda q, k, v, **o: unpacked(
        flash_ext.flash_attn_varlen_kvpacked_func(
            q.flatten(0, 1), torch.stack(packed(k, v), 1), *[cu_seqlens(q)] * 2, *[q.shape[1]] * 2, **o
        ),
        q,
    ),
    "3: func": flash_attn_3.flash_attn_func,
    "3: varlen": lambda q, k, v, **o: unpacked(
        flash_attn_3.flash_attn_varlen_func(*packed(q, k, v), *[cu_seqlens(q)] * 2, *[q.shape[1]] * 2, **o), q
    ),
    "3: qkvpacked": lambda q, k, v, **o: flash_attn_3.flash_attn_qkvpacked_func(
        torch.cat([q, k, v], 2), num_heads_q=q.shape[2], **o
    ),
    "sdpa": lambda q, k, v, causal, version: flash_ext.sdpa(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
    ).transpose(1, 2),
}


@pytest.mark.parametrize("backend", [name for name in bed.BACKENDS if bed.can(name, backward=True)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_every_function(name, backend):
    q, k, v = halves(dtype=torch.float16, requires_grad=True)
    dout = torch.randn_like(q)

    def gradients(function, *inputs, **options):
        return torch.autograd.grad(
            function(*inputs, causal=True, **options), inputs, dout.to(inputs[0].dtype)
        )

    got = gradients(FUNCTIONS[name], q, k, v, version=backend)
    want = gradients(double_attention, q.double(), k.double(), v.double())
    plain = gradients(flash_ext.flash_attn_func, q, k, v, version=backend)
    for x, y, exact in zip(got, plain, want, strict=True):
        error = float((y - exact).norm())
        assert error <= 0.01 * float(exact.norm()) and float((x - exact).norm()) <= 1.25 * error
