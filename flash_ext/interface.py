"""flash-attn's functions: the names, order, defaults and return values of flash-attn 2.8.

What FlashAttention-3 adds, and what flash_ext adds, is keyword-only behind them. The functions are
differentiable with respect to queries, keys, values and sinks, also through the returned lse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import reference
from .kvcache import gather_keys
from .options import ExtraOptions, call_options, shows_extra_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

Result = Tensor | tuple[Tensor, ...]


@shows_extra_options()
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """Exact attention ``softmax(softmax_scale · q kᵀ) v`` that never writes the score matrix to memory.

    `causal` is aligned to the bottom right: query i sees key j iff ``j <= i + seqlen_k - seqlen_q``.
    For seqlen_q = 2 and seqlen_k = 5 (1: visible)::

        bottom_right (default)      top_left
        1 1 1 1 0                   1 0 0 0 0
        1 1 1 1 1                   1 1 0 0 0

    With ``causal_alignment="top_left"`` query i sees key j iff ``j <= i``, as in torch's
    ``scaled_dot_product_attention(is_causal=True)``. Windows and ALiBi follow the same alignment. A query
    without a visible key has out = 0, lse = -inf and zero gradients.

    Parameters
    ----------
    q : Tensor
        (batch, seqlen_q, nheads, head_dim); bfloat16 or float16, on the CPU also float32 and float64;
        head_dim 1 to 256. Any strides with a contiguous last dimension are used without a copy.
    k : Tensor
        (batch, seqlen_k, nheads_k, head_dim), dtype of `q`. nheads must be a multiple of nheads_k: query
        head h reads key head ``h // (nheads // nheads_k)`` (grouped-query and multi-query attention).
    v : Tensor
        (batch, seqlen_k, nheads_k, head_dim_v), dtype of `q`; head_dim_v may differ from head_dim.
    dropout_p : float
        Probability in [0, 1) of dropping an attention weight. Use 0 for evaluation.
    softmax_scale : float, optional
        Finite and > 0; default ``1 / sqrt(head_dim)``.
    causal : bool
        See above.
    window_size : (int, int)
        (left, right): query i sees keys ``i + seqlen_k - seqlen_q - left`` to ``... + right``, both
        included; -1 is unlimited. `causal` makes right 0.
    softcap : float
        If > 0, scores become ``softcap · tanh(score / softcap)``.
    alibi_slopes : Tensor, optional
        float32 (nheads) or (batch, nheads): ``slope · |i + seqlen_k - seqlen_q - j|`` is subtracted from
        the score of query i and key j. It gets no gradient.
    deterministic : bool
        Bit-equal gradients from run to run. ``torch.use_deterministic_algorithms`` turns it on too.
    return_attn_probs : bool
        Return (out, lse, S_dmask) as flash-attn does. S_dmask is for tests: with dropout it is the whole
        probability matrix, quadratic in memory, else an empty tensor.
    seqused_q, seqused_k : Tensor, optional
        int32 (batch): how many rows of each sequence count. What lies behind them is never read; out and
        the gradients are 0 there.
    sinks : Tensor, optional
        float (nheads): a logit per head that adds ``exp(sink)`` to the softmax's denominator and nothing to
        its numerator; -inf is no sink. lse includes it. Differentiable.
    causal_alignment : str
        "bottom_right" or "top_left", see above.
    rng_state : Tensor, optional
        int64 (2): seed and offset of the dropout mask. Default: drawn from torch's generator on q's device.
    version : str, optional
        Force a backend ("fa1", "fa2", "fa3", "cpu"); :func:`flash_ext.plan` tells which one is chosen.
    return_lse : bool
        Return (out, lse).
    num_splits, pack_gqa, sm_margin : optional
        FlashAttention-3's hints, accepted; they never change a result.
    qv, q_descale, k_descale, v_descale, attention_chunk : optional
        FlashAttention-3's arguments that are not supported yet.

    Returns
    -------
    out : Tensor
        (batch, seqlen_q, nheads, head_dim_v), dtype of `q`, contiguous.
    lse : Tensor
        With `return_lse` or `return_attn_probs`: (batch, nheads, seqlen_q), float32 (float64 for float64
        inputs), the natural logarithm of the softmax's denominator. Differentiable.
    S_dmask : Tensor
        With `return_attn_probs`: (batch, nheads, seqlen_q, seqlen_k), dropped entries negative, or empty.

    Raises
    ------
    RuntimeError
        A broken rule (``flash_ext: argument, rule, expected, got``), or no backend for the problem.
    NotImplementedError
        An argument that is not supported yet; a second derivative, forward mode or vmap.

    References
    ----------
    Dao et al., "FlashAttention", 2022, algorithms 1 and 4; Dao, "FlashAttention-2", 2023, section 3.1;
    Shah et al., "FlashAttention-3", 2024, section 3.

    Examples
    --------
    >>> import torch
    >>> from flash_ext import flash_attn_func
    >>> q, k, v = (torch.randn(2, 128, 8, 64, requires_grad=True) for _ in range(3))
    >>> out = flash_attn_func(q, k, v, causal=True)
    >>> out.sum().backward()
    >>> out.shape, q.grad.shape
    (torch.Size([2, 128, 8, 64]), torch.Size([2, 128, 8, 64]))
    """
    return_lse = extras.pop("return_lse", False)
    options = call_options(
        q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, **extras
    )
    out, lse = torch.ops.flash_ext.fwd(q, k, v, **options)
    return attention_results(q, k, out, lse, options, return_lse, return_attn_probs)


@shows_extra_options()
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
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
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    validate: bool = False,
    **extras: Unpack[ExtraOptions],
) -> Result:
    """Attention over sequences of different lengths, packed one behind the other without padding.

    Sequence b holds the query rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and the key rows
    ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``. Causal masks, windows and ALiBi count from each
    sequence's own corner. Rows outside all sequences have out = 0, lse = -inf and zero gradients.

    Parameters
    ----------
    q : Tensor
        (total_q, nheads, head_dim).
    k : Tensor
        (total_k, nheads_k, head_dim), or with `block_table` (num_blocks, page_size, nheads_k, head_dim).
    v : Tensor
        (total_k, nheads_k, head_dim_v), or (num_blocks, page_size, nheads_k, head_dim_v).
    cu_seqlens_q, cu_seqlens_k : Tensor
        int32 (batch + 1), on q's device, never decreasing. With `block_table` and `seqused_k`
        `cu_seqlens_k` may be None.
    max_seqlen_q, max_seqlen_k : int, optional
        Planning hints: a wrong value never changes a result.
    block_table : Tensor, optional
        int32 (batch, max_blocks): page ``block_table[b, n]`` holds keys ``n · page_size`` and on of sequence
        b. The pages are gathered into one copy first. `page_table` is FlashAttention-3's name for it.
    validate : bool
        Also check the values of cu_seqlens and seqused on a GPU, which waits for it. On the CPU they are
        always checked.
    dropout_p to return_attn_probs, **extras
        As in :func:`flash_attn_func`; so are errors and sources.

    Returns
    -------
    out : Tensor
        (total_q, nheads, head_dim_v), dtype of `q`.
    lse : Tensor
        With `return_lse` or `return_attn_probs`: (nheads, total_q), float32 (float64 for float64 inputs).
    S_dmask : Tensor
        With `return_attn_probs`: (batch, nheads, longest query, longest key sequence), or empty.

    Examples
    --------
    >>> import torch
    >>> from flash_ext import flash_attn_varlen_func
    >>> q = k = v = torch.randn(7, 4, 32)
    >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 4, 4, causal=True).shape
    torch.Size([7, 4, 32])
    """
    return_lse = extras.pop("return_lse", False)
    options = call_options(
        q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, **extras
    )
    options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    table = page_table if block_table is None else block_table
    if table is None:
        options["cu_seqlens_k"] = cu_seqlens_k
    else:
        if options["seqused_k"] is None:
            options["seqused_k"] = cu_seqlens_k.diff()
        k, v = gather_keys(k, v, options["seqused_k"], block_table=table)
    if validate:
        check_lengths(q, k, options)
    out, lse = torch.ops.flash_ext.fwd(q, k, v, **options)
    return attention_results(q, k, out, lse, options, return_lse, return_attn_probs)


def attention_results(
    q: Tensor, k: Tensor, out: Tensor, lse: Tensor, options: dict, return_lse: bool, return_attn_probs: bool
) -> Result:
    """What a public function returns."""
    if return_attn_probs:
        if options["dropout_p"] == 0:
            return out, lse, q.new_empty(0)
        with torch.no_grad():
            return out, lse, reference.signed_probabilities(q, k, **options).to(q.dtype)
    return (out, lse) if return_lse else out


def check_lengths(q: Tensor, k: Tensor, options: dict) -> None:
    """Check the values of cu_seqlens and seqused by the rules of the CPU: a call there, on zero heads."""
    if q.is_cpu:
        return
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    on_cpu = {name: options[name].cpu() for name in lengths if options.get(name) is not None}
    rows_q, rows_k = (torch.empty(*x.shape[:-2], 0, 8, dtype=torch.float32) for x in (q, k))
    torch.ops.flash_ext.fwd(rows_q, rows_k, rows_k, **on_cpu)
