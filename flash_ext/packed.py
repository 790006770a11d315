"""The functions whose k and v, or q, k and v, lie in one tensor, and whose gradients do too.

Names, order, defaults and return values are those of flash-attn 2.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import ops
from .interface import Result, attention_results, check_lengths
from .options import ExtraOptions, call_options, shows_extra_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@shows_extra_options()
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[ExtraOptions],
) -> Result:
    """:func:`flash_ext.flash_attn_func` with keys and values in one tensor, whose gradient is one tensor too.

    The backward writes dk and dv where they belong in it, without a concatenation.

    Parameters
    ----------
    q : Tensor
        (batch, seqlen_q, nheads, head_dim).
    kv : Tensor
        (batch, seqlen_k, 2, nheads_k, head_dim), dtype of `q`: k and v along the third dimension.
    dropout_p to return_attn_probs, **extras
        As in :func:`flash_ext.flash_attn_func`; so are the returned values, errors and sources.

    Returns
    -------
    out : Tensor
        (batch, seqlen_q, nheads, head_dim), and what :func:`flash_ext.flash_attn_func` adds on request.

    Examples
    --------
    >>> import torch
    >>> from flash_ext import flash_attn_kvpacked_func
    >>> q, kv = torch.randn(1, 4, 8, 64), torch.randn(1, 100, 2, 2, 64)
    >>> flash_attn_kvpacked_func(q, kv, causal=True).shape
    torch.Size([1, 4, 8, 64])
    """
    return_lse = extras.pop("return_lse", False)
    options = call_options(
        q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, **extras
    )
    return packed_attention(q, kv, None, options, return_lse, return_attn_probs)


@shows_extra_options()
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Unpack[ExtraOptions],
) -> Result:
    """:func:`flash_ext.flash_attn_func` with q, k and v in one tensor, whose gradient is one tensor too.

    The backward writes dq, dk and dv where they belong in it, without a concatenation.

    Parameters
    ----------
    qkv : Tensor
        (batch, seqlen, 3, nheads, head_dim): q, k and v along the third dimension.
    dropout_p to return_attn_probs, **extras
        As in :func:`flash_ext.flash_attn_func`; so are the returned values, errors and sources.

    Returns
    -------
    out : Tensor
        (batch, seqlen, nheads, head_dim), and what :func:`flash_ext.flash_attn_func` adds on request.

    Examples
    --------
    >>> import torch
    >>> from flash_ext import flash_attn_qkvpacked_func
    >>> qkv = torch.randn(2, 16, 3, 4, 32, requires_grad=True)
    >>> flash_attn_qkvpacked_func(qkv, causal=True).sum().backward()
    >>> qkv.grad.shape
    torch.Size([2, 16, 3, 4, 32])
    """
    return_lse = extras.pop("return_lse", False)
    options = call_options(
        qkv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, **extras
    )
    return packed_attention(None, qkv, None, options, return_lse, return_attn_probs)


@shows_extra_options()
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    validate: bool = False,
    **extras: Unpack[ExtraOptions],
) -> Result:
    """:func:`flash_ext.flash_attn_varlen_func` with keys and values, and their gradients, in one tensor.

    Parameters
    ----------
    q : Tensor
        (total_q, nheads, head_dim).
    kv : Tensor
        (total_k, 2, nheads_k, head_dim), dtype of `q`: k and v along the second dimension.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate
        As in :func:`flash_ext.flash_attn_varlen_func`.
    dropout_p to return_attn_probs, **extras
        As in :func:`flash_ext.flash_attn_func`.

    Returns
    -------
    out : Tensor
        (total_q, nheads, head_dim), and what :func:`flash_ext.flash_attn_varlen_func` adds on request.

    Examples
    --------
    >>> import torch
    >>> from flash_ext import flash_attn_varlen_kvpacked_func
    >>> q, kv = torch.randn(3, 4, 32), torch.randn(9, 2, 4, 32)
    >>> cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 1, 3], [0, 4, 9]))
    >>> flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 2, 5, causal=True).shape
    torch.Size([3, 4, 32])
    """
    return_lse = extras.pop("return_lse", False)
    options = call_options(
        q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, **extras
    )
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if validate:
        check_lengths(q, kv[:, 0], options)
    return packed_attention(q, kv, None, options, return_lse, return_attn_probs)


@shows_extra_options()
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    validate: bool = False,
    **extras: Unpack[ExtraOptions],
) -> Result:
    """:func:`flash_ext.flash_attn_varlen_func` with q, k and v, and their gradients, in one tensor.

    Parameters
    ----------
    qkv : Tensor
        (total, 3, nheads, head_dim): q, k and v along the second dimension.
    cu_seqlens : Tensor
        int32 (batch + 1), for queries and keys.
    max_seqlen : int, optional
        A planning hint.
    dropout_p to return_attn_probs, **extras
        As in :func:`flash_ext.flash_attn_func`; `validate` as in :func:`flash_ext.flash_attn_varlen_func`.

    Returns
    -------
    out : Tensor
        (total, nheads, head_dim), and what :func:`flash_ext.flash_attn_varlen_func` adds on request.

    Examples
    --------
    >>> import torch
    >>> from flash_ext import flash_attn_varlen_qkvpacked_func
    >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(torch.randn(7, 3, 4, 32), cu_seqlens, 4).shape
    torch.Size([7, 4, 32])
    """
    return_lse = extras.pop("return_lse", False)
    options = call_options(
        qkv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, **extras
    )
    options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    options |= {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    if validate:
        check_lengths(qkv[:, 0], qkv[:, 1], options)
    return packed_attention(None, qkv, None, options, return_lse, return_attn_probs)


def packed_attention(
    q: Tensor | None,
    packed: Tensor,
    heads: Sequence[int] | None,
    options: dict,
    return_lse: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """The packed functions' common part; `heads` (q, k, v) if they lie side by side instead of stacked."""
    count = 3 if q is None else 2
    if heads is None and (packed.ndim < 4 or packed.shape[-3] != count):
        name = "qkv" if q is None else "kv"
        raise ValueError(
            f"flash_ext: {name} must have shape (..., {count}, heads, head_dim), got {tuple(packed.shape)}"
        )
    sinks = options.pop("sinks")
    out, lse = _PackedAttention.apply(q, packed, sinks, heads, options)
    if not (return_lse or return_attn_probs):
        return out
    q, k, _ = _inputs(q, packed, heads)
    return attention_results(q, k, out, lse, {**options, "sinks": sinks}, return_lse, return_attn_probs)


def _inputs(q: Tensor | None, packed: Tensor, heads: Sequence[int] | None) -> list[Tensor]:
    """q, k and v as views: `packed` holds k, v or q, k, v: stacked, or side by side, `heads` of each."""
    parts = packed.unbind(-3) if heads is None else packed.split(heads, -2)
    return [*parts] if q is None else [q, *parts]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, packed, sinks, heads, options):
        out, lse = torch.ops.flash_ext.fwd(*_inputs(q, packed, heads), sinks=sinks, **options)
        ops.save_call(ctx, {"q": q, "packed": packed, "heads": heads, "sinks": sinks, **options}, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, d_lse):
        call, dout, out, lse = ops.saved_call(ctx, dout)
        q, packed, heads = (call[name] for name in ("q", "packed", "heads"))
        dq, d_packed, d_sink = torch.ops.flash_ext.bwd_packed(
            dout, d_lse, q, packed, heads, out, lse, **ops.backward_options(call)
        )
        return None if q is None else dq, d_packed, None if call["sinks"] is None else d_sink, None, None


def _bwd_packed(dout, d_lse, q, packed, heads, out, lse, *args, **kwargs):
    """The backward with dk and dv, or dq, dk and dv, as views of one tensor: dq (or empty), d_packed, d_sink.

    An operator of its own and not a call of bwd_out in _PackedAttention, because the compiler of torch 2.13
    loses the storage offsets of views that an operator writes to, when shapes are dynamic.
    """
    dq, d_packed = _packed_gradients(q, packed)
    gradients = _inputs(None if q is None else dq, d_packed, heads)
    inputs = _inputs(q, packed, heads)
    d_sink = torch.ops.flash_ext.bwd_out(dout, d_lse, *inputs, out, lse, *gradients, *args, **kwargs)
    return dq, d_packed, d_sink


def _packed_gradients(q: Tensor | None, packed: Tensor) -> tuple[Tensor, Tensor]:
    dq = packed.new_empty(0) if q is None else q.new_empty(q.shape)
    return dq, packed.new_empty(packed.shape)


def _fake_bwd_packed(dout, d_lse, q, packed, heads, out, lse, *args, **kwargs):
    *_, d_sink = torch.ops.flash_ext.bwd(dout, d_lse, *_inputs(q, packed, heads), out, lse, *args, **kwargs)
    return *_packed_gradients(q, packed), d_sink


ops.define_backward(
    "bwd_packed",
    "Tensor dout, Tensor? d_lse, Tensor? q, Tensor packed, SymInt[]? heads, Tensor out, Tensor lse",
    "Tensor dq, Tensor d_packed, Tensor d_sink",
    _bwd_packed,
    _fake_bwd_packed,
)
