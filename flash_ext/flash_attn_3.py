"""The functions of FlashAttention-3's Python interface: its names, its order, its return values.

The fourth positional argument differs from flash-attn 2 (softmax_scale there is dropout_p), hence a module of
its own. Shapes, meaning, errors and sources are those of :func:`flash_ext.flash_attn_func` and its siblings;
flash_ext's own options (`sinks`, `causal_alignment`, `version`, ...) are keyword-only behind these.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import interface, kvcache, packed
from .options import call_options

Result = Tensor | tuple[Tensor, ...]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **extras,
) -> Result:
    """:func:`flash_ext.flash_attn_func` in FlashAttention-3's order.

    Parameters
    ----------
    q, k, v : Tensor
        (batch, seqlen_q, nheads, head_dim), (batch, seqlen_k, nheads_k, head_dim) and
        (batch, seqlen_k, nheads_k, head_dim_v).
    return_attn_probs : bool
        Return (out, lse): FlashAttention-3 returns no probabilities.
    softmax_scale to sm_margin, **extras
        As in :func:`flash_ext.flash_attn_func`.

    Returns
    -------
    out : Tensor
        (batch, seqlen_q, nheads, head_dim_v), and lse (batch, nheads, seqlen_q) on request.

    References
    ----------
    Shah et al., "FlashAttention-3", 2024, section 3.

    Examples
    --------
    >>> import torch
    >>> from flash_ext import flash_attn_3
    >>> q = k = v = torch.randn(1, 16, 2, 32)
    >>> flash_attn_3.flash_attn_func(q, k, v, 0.1, True).shape
    torch.Size([1, 16, 2, 32])
    """
    return interface.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        return_lse=return_attn_probs,
        **extras,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **extras,
) -> Result:
    """:func:`flash_ext.flash_attn_varlen_func` in FlashAttention-3's order.

    Parameters
    ----------
    q, k, v : Tensor
        (total_q, nheads, head_dim), (total_k, nheads_k, head_dim) and (total_k, nheads_k, head_dim_v).
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        As in :func:`flash_ext.flash_attn_varlen_func`.
    return_attn_probs : bool
        Return (out, lse).
    softmax_scale to sm_margin, **extras
        As in :func:`flash_ext.flash_attn_func`.

    Returns
    -------
    out : Tensor
        (total_q, nheads, head_dim_v), and lse (nheads, total_q) on request.

    Examples
    --------
    >>> import torch
    >>> from flash_ext import flash_attn_3
    >>> q = k = v = torch.randn(7, 2, 32)
    >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_3.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 4, 4).shape
    torch.Size([7, 2, 32])
    """
    return interface.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        return_lse=return_attn_probs,
        **extras,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **extras,
) -> Result:
    """:func:`flash_ext.flash_attn_qkvpacked_func` in FlashAttention-3's order, also with grouped-query heads.

    Parameters
    ----------
    qkv : Tensor
        (batch, seqlen, 3, nheads, head_dim), or with `num_heads_q`
        (batch, seqlen, num_heads_q + 2 · nheads_k, head_dim): the heads of q, then of k, then of v.
    num_heads_q : int, optional
        Query heads in a 4-dimensional `qkv`.
    return_attn_probs : bool
        Return (out, lse).
    softmax_scale to sm_margin, **extras
        As in :func:`flash_ext.flash_attn_func`.

    Returns
    -------
    out : Tensor
        (batch, seqlen, nheads, head_dim), and lse (batch, nheads, seqlen) on request.

    Examples
    --------
    >>> import torch
    >>> from flash_ext import flash_attn_3
    >>> flash_attn_3.flash_attn_qkvpacked_func(torch.randn(1, 16, 4 + 2 * 2, 32), num_heads_q=4).shape
    torch.Size([1, 16, 4, 32])
    """
    options = call_options(
        qkv,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        **extras,
    )
    heads = None
    if qkv.ndim == 4:
        if num_heads_q is None or num_heads_q > qkv.shape[2] or (qkv.shape[2] - num_heads_q) % 2:
            raise ValueError(
                "flash_ext: a 4-dimensional qkv must have num_heads_q + 2 · nheads_k heads, got "
                f"{qkv.shape[2]} heads and num_heads_q = {num_heads_q}"
            )
        nheads_k = (qkv.shape[2] - num_heads_q) // 2
        heads = [num_heads_q, nheads_k, nheads_k]
    return packed.packed_attention(None, qkv, heads, options, return_lse=return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    **extras,
) -> Result:
    """:func:`flash_ext.flash_attn_with_kvcache` in FlashAttention-3's order.

    Parameters
    ----------
    q, k_cache, v_cache : Tensor
        (batch, seqlen_q, nheads, head_dim), (batch_cache, seqlen_cache, nheads_k, head_dim) and
        (batch_cache, seqlen_cache, nheads_k, head_dim_v), or pages with `page_table`.
    k to return_softmax_lse
        As in :func:`flash_ext.flash_attn_with_kvcache`.
    qv, q_descale, k_descale, v_descale, attention_chunk, pack_gqa, sm_margin, **extras
        As in :func:`flash_ext.flash_attn_func`.

    Returns
    -------
    out : Tensor
        (batch, seqlen_q, nheads, head_dim_v), and lse (batch, nheads, seqlen_q) on request.

    Examples
    --------
    >>> import torch
    >>> from flash_ext import flash_attn_3
    >>> q, cache = torch.randn(1, 1, 4, 32), torch.randn(1, 64, 2, 32)
    >>> flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=10).shape
    torch.Size([1, 1, 4, 32])
    """
    return kvcache.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
        rotary_interleaved,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        scheduler_metadata=scheduler_metadata,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        **extras,
    )
