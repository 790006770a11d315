"""Who is measured: functions (cell, q, k, v) -> out, tensors as Cell.inputs makes them.

"fa2:3" is fa2 with the third of its bucket's tiles, which another card takes, forced in the measured pass.
"""

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_ext

OURS = ("cpu", "fa1", "fa2", "fa3")
_CPU_ONLY = ("cpu", "sdpa_cpu")
_CUDA_ONLY = ("fa1", "fa2", "fa3", "sdpa_flash", "sdpa_efficient", "cudnn", "fa3_upstream")
_SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cpu": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def is_ours(name: str) -> bool:
    return name.partition(":")[0] in OURS


class Unable(Exception):
    """A contender cannot run a cell; the text says why."""


def find(name: str, device: str, fa3_upstream: str | None = None):
    """The contender of a name; raises Unable when it cannot run on this device at all."""
    version, _, tile = name.partition(":")
    if (version in _CPU_ONLY and device != "cpu") or (version in _CUDA_ONLY and device != "cuda"):
        raise Unable(f"{name} does not run on {device}")
    if version in OURS:
        return Tiled(partial(_flash_ext, version), tile) if tile else partial(_flash_ext, version)
    if name in _SDPA:
        return partial(_sdpa, _SDPA[name])
    if name == "fa3_upstream":
        if fa3_upstream is None:
            raise Unable("fa3_upstream needs --fa3-upstream DIR")
        _load_fa3_upstream(Path(fa3_upstream))
        return _fa3_upstream
    known = ", ".join((*OURS, *_SDPA, "fa3_upstream"))
    raise SystemExit(f"bench: there is no contender {name!r}; known are {known}")


class Tiled(NamedTuple):
    """A contender whose tile is forced."""

    contender: Callable
    tile: str

    def force(self, call):
        def forced():
            os.environ["FLASH_EXT_TILE"] = self.tile  # read at every call, on whatever thread
            try:
                return call()
            finally:
                del os.environ["FLASH_EXT_TILE"]

        return forced


def make_call(contender, cell, q, k, v, dout):
    """What is timed, as a function without arguments that returns the pass's results.

    A backward alone keeps the graph of one forward and runs its gradient again and again.
    """
    if isinstance(contender, Tiled):
        return contender.force(make_call(contender.contender, cell, q, k, v, dout))
    if cell.pass_ == "fwd":

        def forward():
            with torch.no_grad():
                return (contender(cell, q, k, v),)

        return forward
    if cell.pass_ == "bwd":
        out = contender(cell, q, k, v)
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    return lambda: torch.autograd.grad(contender(cell, q, k, v), (q, k, v), dout)


def _flash_ext(version, cell, q, k, v):
    options = {"causal": cell.causal, "window_size": cell.window, "softcap": cell.softcap, "version": version}
    options |= {"dropout_p": cell.dropout_p, "deterministic": cell.deterministic}
    options |= _option_tensors(cell, q.device)
    if cell.is_packed:
        longest_q, longest_k = map(max, zip(*cell.lengths, strict=True))
        longest = {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
        return flash_ext.flash_attn_varlen_func(q, k, v, **longest, **options)
    return flash_ext.flash_attn_func(q, k, v, **options)


@lru_cache(maxsize=2)
def _option_tensors(cell, device):
    return cell.option_tensors(device)  # once: copies to a GPU are no part of a call


def _sdpa(backend, cell, q, k, v):
    if cell.is_packed or cell.sinks or cell.softcap or cell.alibi or cell.deterministic:
        raise Unable("scaled_dot_product_attention has no such option")
    if cell.window != (-1, -1) or (cell.causal and cell.seqlen_q != cell.seqlen_k):
        raise Unable("scaled_dot_product_attention has no such mask without writing it to memory")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        is_grouped = cell.nheads != cell.nheads_k
        options = {"is_causal": cell.causal, "enable_gqa": is_grouped, "dropout_p": cell.dropout_p}
        out = scaled_dot_product_attention(q, k, v, **options)
    return out.transpose(1, 2)


def _load_fa3_upstream(folder: Path):
    for runtime in folder.glob("libcudart.so.*"):  # the one that the library was built with
        ctypes.CDLL(str(runtime))
    torch.ops.load_library(str(folder / "_C.so"))


class _Fa3Upstream(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        ctx.options = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal}
        hints = {"num_splits": 1, "is_rotary_interleaved": True}
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **hints, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, *gradients, **ctx.options)
        return *gradients, None


def _fa3_upstream(cell, q, k, v):
    if cell.window != (-1, -1) or cell.options not in ("", " qkv"):
        raise Unable("fa3_upstream is measured without windows and options")
    return _Fa3Upstream.apply(q, k, v, cell.causal)
