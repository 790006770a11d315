"""The operators ``torch.ops.flash_ext.*``: loading, fake tensors, autograd and what they refuse.

The kernels and every argument rule live in the door, a shared library that defines the operators. This
module adds what PyTorch wants to hear in Python. Importing it loads the door.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

DOOR = Path(__file__).parent / "lib" / "torch_ops.so"
OLDEST_TORCH = (2, 10)


def _load_door() -> None:
    release = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if release < OLDEST_TORCH:
        raise ImportError(f"flash_ext: torch must be 2.10 or newer, got {torch.__version__}: upgrade torch")
    if not DOOR.exists():
        raise ImportError(
            f"flash_ext: {DOOR} is missing: the library is not built. "
            "Run `pip install --no-build-isolation .` in the source tree, or install a wheel"
        )
    try:
        torch.ops.load_library(str(DOOR))
    except OSError as error:
        raise ImportError(
            f"flash_ext: {DOOR} does not load into torch {torch.__version__}: {error}. "
            "Run `pip install --no-build-isolation .` in the source tree to build it again"
        ) from error


_load_door()
door = torch.ops.flash_ext
_FWD, _BWD, _BWD_OUT = door.fwd.default, door.bwd.default, door.bwd_out.default


@functools.cache
def _defaults(op: torch._ops.OpOverload) -> dict:
    """Argument name -> default (None where there is none), in the schema's order."""
    return {argument.name: argument.default_value for argument in op._schema.arguments}


def _bound(op: torch._ops.OpOverload, args: tuple, kwargs: dict | None = None) -> dict:
    """Every argument of a call by name, defaults filled in, in the schema's order."""
    return _defaults(op) | dict(zip(_defaults(op), args, strict=False)) | (kwargs or {})


# The options that both passes share, in the schema's words.
OPTIONS = [name for name in list(_defaults(_FWD))[3:] if name in _defaults(_BWD)]


# ---- Fake tensors: the rules are checked by the door's Meta kernel, never written again here. ----


def _hint(size: int | torch.SymInt) -> int | None:
    """The size that a symbol stands for while tracing; None when it is not known before the data is."""
    if isinstance(size, torch.SymInt):
        return size.node.hint
    return size


def _meta_twin(tensor: Tensor) -> Tensor | None:
    if not isinstance(tensor, FakeTensor):  # a real one, on the meta device or, wrongly, elsewhere
        return tensor
    sizes, strides = [_hint(n) for n in tensor.shape], [_hint(n) for n in tensor.stride()]
    if None in sizes or None in strides:
        return None
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="meta")


def _checked_by(op: torch._ops.OpOverload):
    """A function that runs the Meta kernel of `op`, which checks arguments, on stand-ins of its own.

    The kernel is looked up now, before `register_fake` puts a Python function in its place. A size that is
    unknown while tracing leaves the checks to the call itself.
    """
    kernel = torch.library.get_kernel(op, "Meta")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)

    def check(*args) -> None:
        with torch._C._DisableTorchDispatch():
            twins = []
            for arg in args:
                known = _meta_twin(arg) if isinstance(arg, Tensor) else arg
                known = _hint(known) if isinstance(known, torch.SymInt) else known
                if known is None and arg is not None:
                    return
                twins.append(known)
            kernel.call_boxed(keys, *twins)

    return check


def _register_fakes() -> None:
    check_fwd, check_bwd, check_bwd_out = _checked_by(_FWD), _checked_by(_BWD), _checked_by(_BWD_OUT)

    @torch.library.register_fake("flash_ext::fwd", allow_override=True)
    def fwd(*args, **kwargs):
        call = _bound(_FWD, args, kwargs)
        check_fwd(*call.values())
        q, v = call["q"], call["v"]
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        rows, heads = q.shape[-3], q.shape[-2]
        return out, q.new_empty(*q.shape[:-3], heads, rows, dtype=accumulator_dtype(q.dtype))

    def fake_d_sink(call):
        heads = 0 if call["sinks"] is None else call["q"].shape[-2]
        return call["q"].new_empty(heads, dtype=accumulator_dtype(call["q"].dtype))

    @torch.library.register_fake("flash_ext::bwd", allow_override=True)
    def bwd(*args, **kwargs):
        call = _bound(_BWD, args, kwargs)
        check_bwd(*call.values())
        return *(call[name].new_empty(call[name].shape) for name in "qkv"), fake_d_sink(call)

    @torch.library.register_fake("flash_ext::bwd_out", allow_override=True)
    def bwd_out(*args, **kwargs):
        call = _bound(_BWD_OUT, args, kwargs)
        check_bwd_out(*call.values())
        return fake_d_sink(call)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and sinks for inputs of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- Autograd ----


def save_call(ctx, call: dict, out: Tensor, lse: Tensor) -> None:
    """Keep on `ctx` what the backward of a forward call (argument name -> value) needs."""
    ctx.set_materialize_grads(False)
    ctx.tensor_names = [name for name, value in call.items() if isinstance(value, Tensor)]
    ctx.options = {name: value for name, value in call.items() if not isinstance(value, Tensor)}
    ctx.save_for_backward(*(call[name] for name in ctx.tensor_names), out, lse)


def saved_call(ctx, dout: Tensor | None) -> tuple[dict, Tensor, Tensor, Tensor]:
    """The forward call, dout (zeros if only lse was used), out and lse."""
    *tensors, out, lse = ctx.saved_tensors
    call = dict(zip(ctx.tensor_names, tensors, strict=True)) | ctx.options
    dout = out.new_zeros(1).expand(out.shape) if dout is None else dout
    call["deterministic"] = call["deterministic"] or torch.are_deterministic_algorithms_enabled()
    return call, dout, out, lse


def backward_options(call: dict) -> dict:
    """The keyword arguments of bwd and bwd_out out of a forward call."""
    return {name: call[name] for name in OPTIONS if name in call}


def _below_autograd(op: torch._ops.OpOverload, keys: torch._C.DispatchKeySet, args: tuple):
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, keys, *args):
        out, lse = _below_autograd(op, keys, args)
        save_call(ctx, _bound(_FWD, args), out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, d_lse):
        call, dout, out, lse = saved_call(ctx, dout)
        inputs = (call[name] for name in "qkv")
        dq, dk, dv, d_sink = torch.ops.flash_ext.bwd(dout, d_lse, *inputs, out, lse, **backward_options(call))
        gradients = {"q": dq, "k": dk, "v": dv, "sinks": None if call["sinks"] is None else d_sink}
        # One for each argument that forward got: torch leaves out defaults at the end.
        names = list(_defaults(_FWD))[: len(ctx.needs_input_grad) - 2]
        return None, None, *(gradients.get(name) for name in names)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, keys, *args):
        return _below_autograd(op, keys, args)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(NO_SECOND_DERIVATIVE)


class _BackwardOut:
    """bwd_out writes into its arguments, so it has no place in a graph: refuse where one is recorded."""

    @staticmethod
    def apply(op, keys, *args):
        raise NotImplementedError(NO_SECOND_DERIVATIVE)


NO_SECOND_DERIVATIVE = (
    "flash_ext: the second derivative is not supported: use torch's scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) where it is needed"
)
NO_FORWARD_MODE = (
    "flash_ext: forward-mode differentiation (torch.func.jvp, dual tensors) is not supported: "
    "use reverse mode"
)
NO_VMAP = (
    "flash_ext: torch.vmap is not supported: q, k and v have a batch dimension already, "
    "fold the mapped one into it"
)


def _autograd_kernel(op: torch._ops.OpOverload, function):
    """The kernel of `op` under the Autograd key.

    torch.library.register_autograd would do, but under forward mode its kernel answers with a zero tangent.
    """

    def kernel(keys, *args):
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if forward_ad._current_level >= 0:
            if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
                raise NotImplementedError(NO_FORWARD_MODE)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return function.apply(op, keys, *args)
        return _below_autograd(op, keys, args)

    return kernel


def _refuse_vmap(info, in_dims, *args, **kwargs):
    raise NotImplementedError(NO_VMAP)


_LIBRARY = torch.library.Library("flash_ext", "FRAGMENT")


def _register(op: torch._ops.OpOverload, function) -> None:
    _LIBRARY.impl(op, _autograd_kernel(op, function), "Autograd", with_keyset=True)
    torch.library.register_vmap(op, _refuse_vmap)


def define_backward(name: str, inputs: str, outputs: str, function, fake) -> None:
    """Add an operator, written in Python, that takes `inputs` and the options of bwd, once differentiable."""
    options = str(_BWD._schema).split("Tensor lse, ")[1].split(") ->")[0]
    _LIBRARY.define(f"{name}({inputs}, {options}) -> ({outputs})")
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_ext::{name}", fake)
    _register(getattr(door, name).default, _Backward)


_register_fakes()
_register(_FWD, _Forward)
_register(_BWD, _Backward)
_register(_BWD_OUT, _BackwardOut)
