"""The operators inside PyTorch: opcheck, compile, export, TorchScript, fake tensors, and what they refuse."""

import os
import subprocess
import sys

import pytest
import torch
from compare import fwd
from strategies import Problem
from torch.library import opcheck

import flash_ext

OPS = torch.ops.flash_ext
PROBLEMS = {
    "plain": {},
    "everything": {"causal": True, "sinks": True, "softcap": 2.0, "alibi": 2, "dropout_p": 0.2, "spare": 1},
    "packed": {"packed_q": True, "packed_k": True, "causal": True, "lengths_q": (4, 3), "lengths_k": (5, 2)},
    "bfloat16": {"dtype": torch.bfloat16, "window": (3, 1), "top_left": True},
    "views": {"layouts": ("heads first", "inside NaN", "odd strides", "heads first")},
}


def make(name):
    """Arguments of fwd and of bwd for a small problem without NaN."""
    small = {"lengths_q": (5, 4), "lengths_k": (6, 3), "head_dim": 8, "head_dim_v": 4}
    inputs, options, dout, d_lse = Problem(**(small | PROBLEMS[name])).tensors()
    options |= {"sinks": inputs.pop("sinks").clamp(min=-5)} if "sinks" in inputs else {}
    inputs = [x.nan_to_num_(0.5) for x in inputs.values()]
    out, lse = fwd(*inputs, **options)
    return inputs, options, (dout.nan_to_num_(0.5), d_lse.nan_to_num_(0.5), *inputs, out, lse)


@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_fwd(name):
    inputs, options, _ = make(name)
    opcheck(OPS.fwd, inputs, options)
    if "sinks" in options:
        options["sinks"].requires_grad_()
    opcheck(OPS.fwd, [x.requires_grad_() for x in inputs], options)


@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_bwd(name):
    _, options, saved = make(name)
    opcheck(OPS.bwd, saved, options)
    opcheck(OPS.bwd, (saved[0][..., :1].expand(saved[0].shape), None, *saved[2:]), options)


@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_bwd_out(name):
    inputs, options, saved = make(name)
    opcheck(OPS.bwd_out, (*saved, *(torch.zeros_like(x) for x in inputs)), options)


@pytest.mark.parametrize("kind", ["qkv", "kv", "heads"])
def test_opcheck_bwd_packed(kind):
    q = torch.randn(2, 5, 2, 8)
    packed = (
        torch.randn(2, 5, 6, 8) if kind == "heads" else torch.randn(2, 5, 3 if kind == "qkv" else 2, 2, 8)
    )
    inputs = packed.split(2, 2) if kind == "heads" else packed.unbind(2)
    out, lse = fwd(*(inputs if kind != "kv" else [q, *inputs]), causal=True)
    heads = [2, 2, 2] if kind == "heads" else None
    arguments = (torch.randn_like(out), None, q if kind == "kv" else None, packed, heads, out, lse)
    opcheck(OPS.bwd_packed, arguments, {"causal": True})


def gradients(function, leaves):
    return torch.autograd.grad(function(*leaves).float().square().sum(), leaves)


def attention(q, k, v):
    out, lse = fwd(q, k, v, causal=True, softcap=3.0)
    return torch.cat([out.flatten(), lse.flatten().to(out.dtype)])


@pytest.mark.smoke
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile(backend, dynamic, dtype):
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (9, 33):
        leaves = [torch.randn(2, rows, h, 16, dtype=dtype, requires_grad=True) for h in (4, 2, 2)]
        assert torch.equal(compiled(*leaves), attention(*leaves))
        for got, want in zip(gradients(compiled, leaves), gradients(attention, leaves), strict=True):
            torch.testing.assert_close(got, want)


def qkvpacked(qkv, sinks):
    return flash_ext.flash_attn_qkvpacked_func(qkv, causal=True, sinks=sinks)


def kvpacked(q, kv):
    return flash_ext.flash_attn_kvpacked_func(q, kv, window_size=(7, 0))


CU_SEQLENS = torch.tensor([0, 4, 9], dtype=torch.int32)


def varlen_qkvpacked(qkv):
    return flash_ext.flash_attn_varlen_qkvpacked_func(qkv, CU_SEQLENS, 5, causal=True)


def sdpa(q, k, v):
    return flash_ext.sdpa(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )


FUNCTIONS = {
    qkvpacked: [(2, 9, 3, 4, 8), (4,)],
    kvpacked: [(2, 9, 4, 8), (2, 9, 2, 2, 8)],
    varlen_qkvpacked: [(9, 3, 4, 8)],
    sdpa: [(2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)],
    flash_ext.flash_attn_func: [(2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)],
}


@pytest.mark.smoke
@pytest.mark.parametrize("backend, dynamic", [("aot_eager", False), ("inductor", True)])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_compile_public_functions(function, backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    leaves = [torch.randn(shape, requires_grad=True) for shape in FUNCTIONS[function]]
    for got, want in zip(gradients(compiled, leaves), gradients(function, leaves), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_dropout(backend):
    """Each call draws a new mask, and forward and backward of one call use the same."""
    torch._dynamo.reset()
    q, v = torch.zeros(1, 40, 2, 8), torch.ones(1, 40, 2, 1, requires_grad=True)
    compiled = torch.compile(
        lambda v: flash_ext.flash_attn_func(q, q, v, 0.5), fullgraph=True, backend=backend
    )
    first, second = compiled(v), compiled(v)
    assert not torch.equal(first, second)
    (dv,) = torch.autograd.grad(first, v, torch.ones_like(first))
    torch.testing.assert_close(dv.sum(), first.sum())


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return fwd_out(q, k, v)


def fwd_out(q, k, v):
    return torch.ops.flash_ext.fwd(q, k, v, causal=True, softmax_scale=0.3)[0]


def in_new_process(code: str, *arguments) -> None:
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", f"import sys, torch, flash_ext\n{code}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.smoke
def test_export(tmp_path):
    """A program with a dynamic batch and sequence length, saved, and loaded in a new process."""
    shapes = {"q": {0: "batch", 1: "rows"}, "k": {0: "batch", 1: "keys"}, "v": {0: "batch", 1: "keys"}}
    dims = {name: torch.export.Dim(name, min=2, max=512) for name in ("batch", "rows", "keys")}
    shapes = {name: {i: dims[d] for i, d in axes.items()} for name, axes in shapes.items()}
    example = (torch.randn(3, 5, 4, 8), torch.randn(3, 7, 2, 8), torch.randn(3, 7, 2, 8))
    program = torch.export.export(Attention(), example, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "program.pt2")
    inputs = torch.randn(2, 50, 4, 8), torch.randn(2, 90, 2, 8), torch.randn(2, 90, 2, 8)
    assert torch.equal(program.module()(*inputs), fwd_out(*inputs))
    torch.save((inputs, fwd_out(*inputs)), tmp_path / "data.pt")
    load = "inputs, want = torch.load(sys.argv[2]); got = torch.export.load(sys.argv[1]).module()(*inputs)"
    in_new_process(
        f"{load}\ntorch.testing.assert_close(got, want)", tmp_path / "program.pt2", tmp_path / "data.pt"
    )


class Scripted(torch.nn.Module):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int = 7
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.flash_ext.fwd(q, k, v, causal=True, window_left=window)
        return out, lse


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_torchscript(tmp_path):
    """A scripted module, saved, and loaded in a new process, forward and backward."""
    scripted = torch.jit.script(Scripted())
    scripted.save(tmp_path / "module.pt")
    inputs = [torch.randn(2, 20, h, 8, requires_grad=True) for h in (4, 2, 2)]
    out, lse = scripted(*inputs)
    want = fwd(*inputs, causal=True, window_left=7)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    (dq,) = torch.autograd.grad(out.sum() + lse.sum(), inputs[0])
    torch.save(([x.detach() for x in inputs], out.detach(), dq), tmp_path / "data.pt")
    code = """
inputs, want, dq = torch.load(sys.argv[2])
inputs[0].requires_grad_()
out, lse = torch.jit.load(sys.argv[1])(*inputs)
torch.testing.assert_close(out, want)
torch.testing.assert_close(torch.autograd.grad(out.sum() + lse.sum(), inputs[0])[0], dq)
"""
    in_new_process(code, tmp_path / "module.pt", tmp_path / "data.pt")


WRONG = {
    "dtype": (lambda q, k, v: (q, k.half(), v), {}),
    "heads": (lambda q, k, v: (q[:, :, :3], k, v), {}),
    "shape": (lambda q, k, v: (q, k[..., :4], v), {}),
    "window": (lambda q, k, v: (q, k, v), {"window_left": -2}),
    "scale": (lambda q, k, v: (q, k, v), {"softmax_scale": -1.0}),
}


@pytest.mark.parametrize("how", ["meta", "compile", "compile dynamic", "backward"])
@pytest.mark.parametrize("name", WRONG)
def test_fake_tensors_follow_the_same_rules(name, how):
    """The text of the eager error arrives from meta tensors and while a function is compiled, too."""
    change, options = WRONG[name]
    good = [torch.randn(2, 5, h, 8) for h in (4, 2, 2)]
    with pytest.raises(RuntimeError) as eager:
        fwd(*change(*good), **options)
    text = str(eager.value)
    assert text.startswith("flash_ext: ")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: fwd(*x, **options)[0], fullgraph=True, backend="aot_eager", dynamic="dyn" in how
    )
    with pytest.raises(RuntimeError) as fake:
        if how == "meta":
            fwd(*(x.to("meta") for x in change(*good)), **options)
        elif how == "backward":
            out, lse = (x.to("meta") for x in fwd(*good))
            OPS.bwd(out, None, *(x.to("meta") for x in change(*good)), out, lse, **options)
        else:
            compiled(*change(*good))
    assert str(fake.value) == text if how in ("meta", "backward") else text in str(fake.value)


def test_fake_outputs():
    """Shapes, dtypes and strides without data."""
    q, k, v = (
        torch.empty(2, n, h, d, device="meta", dtype=torch.bfloat16)
        for n, h, d in ((5, 4, 8), (7, 2, 8), (7, 2, 6))
    )
    out, lse = fwd(q, k, v)
    assert (out.shape, out.dtype, out.stride()) == ((2, 5, 4, 6), torch.bfloat16, (120, 24, 6, 1))
    assert (lse.shape, lse.dtype, lse.stride()) == ((2, 4, 5), torch.float32, (20, 5, 1))


def test_unbacked_sizes():
    """A length that depends on data leaves the checks to the run."""

    def function(x, mask, cu_seqlens):
        rows = x[mask]
        return fwd(rows, rows, rows, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)[0]

    torch._dynamo.reset()
    x, mask = torch.randn(9, 2, 8), torch.tensor([True] * 5 + [False] * 4)
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(function, fullgraph=True, backend="aot_eager")(x, mask, cu_seqlens)
    assert torch.equal(got, function(x, mask, cu_seqlens))


SECOND = "flash_ext: the second derivative is not supported"


@pytest.mark.parametrize("function", ["fwd", "packed"])
def test_second_derivative(function):
    q = torch.randn(1, 4, 3, 2, 8, requires_grad=True)
    out = fwd(*q.unbind(2))[0] if function == "fwd" else flash_ext.flash_attn_qkvpacked_func(q)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=SECOND):
        dq.sum().backward()


def test_second_derivative_of_bwd_out():
    inputs, options, saved = make("plain")
    arguments = [saved[0].requires_grad_(), *saved[1:], *(torch.zeros_like(x) for x in inputs)]
    with pytest.raises(NotImplementedError, match=SECOND):
        OPS.bwd_out(*arguments, **options)
    with torch.no_grad():
        OPS.bwd_out(*arguments, **options)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode(requires_grad):
    q = torch.randn(1, 4, 2, 8, requires_grad=requires_grad)
    with pytest.raises(NotImplementedError, match="flash_ext: forward-mode differentiation"):
        torch.func.jvp(lambda q: fwd(q, q, q)[0], (q,), (q,))
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q.detach(), q.detach())
        with pytest.raises(NotImplementedError, match="flash_ext: forward-mode differentiation"):
            fwd(q, dual, q)
        assert torch.equal(fwd(q, q, q)[0], fwd(q, q, q)[0])


def test_vmap():
    q = torch.randn(3, 1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="flash_ext: torch.vmap is not supported"):
        torch.vmap(lambda q: fwd(q, q, q)[0])(q)


def test_functorch_reverse_mode_is_an_error():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda q: fwd(q, q, q)[0].sum())(q)
