"""torch's scaled_dot_product_attention on flash_ext."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from .options import call_options


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with the kernels of flash_ext.

    As in torch, `is_causal` is aligned to the **top left**: query i sees key j iff ``j <= i``, so for 2
    queries and 5 keys they see 1 and 2 keys (flash-attn's functions let them see 4 and 5). A query without a
    visible key gets 0.

    Parameters
    ----------
    query : Tensor
        (..., nheads, seqlen_q, head_dim), also without batch, or without batch and heads. Transposed views of
        (batch, seqlen, heads, dim) tensors run without a copy.
    key : Tensor
        (..., nheads_k, seqlen_k, head_dim); leading dimensions broadcast.
    value : Tensor
        (..., nheads_k, seqlen_k, head_dim_v).
    attn_mask : Tensor, optional
        What the kernels can express: ``torch.nn.attention.bias.causal_upper_left`` and
        ``causal_lower_right``; a boolean mask (True: visible) that equals one of these for every batch and
        head; a boolean padding mask, which hides the keys behind a sequence's end from all heads and queries.
        Its values are read, which waits for a GPU.
    dropout_p : float
        Probability in [0, 1) of dropping an attention weight.
    is_causal : bool
        See above. Not together with `attn_mask`.
    scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    enable_gqa : bool
        Let nheads be a multiple of nheads_k.

    Returns
    -------
    Tensor
        (..., nheads, seqlen_q, head_dim_v), dtype of `query`, a transposed view of flash_ext's layout.

    Raises
    ------
    NotImplementedError
        A mask that cannot be expressed.
    ValueError
        `is_causal` together with `attn_mask`, or head counts that do not fit.
    RuntimeError
        A rule of :func:`flash_ext.flash_attn_func` is broken, or no backend can run the problem.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1.

    Examples
    --------
    >>> import torch
    >>> from flash_ext import sdpa
    >>> q, k, v = (torch.randn(2, 8, 100, 64) for _ in range(3))
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(sdpa(q, k, v, is_causal=True), theirs, atol=1e-5)
    True
    """
    if is_causal and attn_mask is not None:
        raise ValueError("flash_ext: attn_mask must be None when is_causal is True")
    q, k, v, leading = _four_dimensional(query, key, value, enable_gqa)
    alignment, seqused_k = "top_left" if is_causal else None, None
    if isinstance(attn_mask, CausalBias):
        upper_left = attn_mask.variant == CausalVariant.UPPER_LEFT
        alignment = "top_left" if upper_left else "bottom_right"
    elif attn_mask is not None:
        mask = attn_mask.expand(torch.broadcast_shapes(attn_mask.shape, (*leading, q.shape[-2], k.shape[-2])))
        alignment, seqused_k = _expressed(mask.reshape(*q.shape[:3], k.shape[2]))
    options = call_options(
        q,
        dropout_p,
        scale,
        alignment is not None,
        causal_alignment=alignment or "bottom_right",
        seqused_k=seqused_k,
    )
    out, _ = torch.ops.flash_ext.fwd(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
    return out.transpose(1, 2).reshape(*leading, q.shape[2], v.shape[3])


def _four_dimensional(query, key, value, enable_gqa) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
    """(batch, heads, seqlen, dim) views with one batch, and the leading dimensions of the result."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 2:
            shape = tuple(x.shape)
            raise ValueError(f"flash_ext: {name} must have shape (..., heads, seqlen, dim), got {shape}")
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (query, key, value)]
    if enable_gqa and heads[1] == heads[2]:
        wanted = heads
    else:
        wanted = [*torch.broadcast_shapes(*((n,) for n in heads))] * 3
    if wanted[0] % max(wanted[1], 1) != 0:
        raise ValueError(f"flash_ext: nheads must be a multiple of nheads_k, got {heads[0]} and {heads[1]}")
    shapes = ((*batch, n, *x.shape[-2:]) for n, x in zip(wanted, (query, key, value), strict=True))
    views = [x.expand(shape) for x, shape in zip((query, key, value), shapes, strict=True)]
    leading = batch if max(x.ndim for x in (query, key, value)) == 2 else torch.Size([*batch, wanted[0]])
    flat = [x.reshape(batch.numel(), *x.shape[-3:]) for x in views]
    return *flat, leading


def _expressed(mask: Tensor) -> tuple[str | None, Tensor | None]:
    """The causal alignment or key lengths (batch) that a (batch, heads, queries, keys) mask stands for."""
    if mask.dtype != torch.bool:
        raise NotImplementedError(
            "flash_ext: attn_mask must be boolean or from torch.nn.attention.bias: adding to the scores is "
            f"not supported, got {str(mask.dtype).removeprefix('torch.')}"
        )
    if mask.numel() == 0:
        return None, None
    lengths = mask[:, 0, 0].sum(-1, dtype=torch.int32)
    prefix = torch.arange(mask.shape[-1], device=mask.device) < lengths[:, None, None, None]
    if bool((mask == prefix).all()):
        return None, lengths
    rows, columns = mask.shape[-2:]
    full = torch.ones(rows, columns, dtype=torch.bool, device=mask.device)
    for alignment, offset in (("top_left", 0), ("bottom_right", columns - rows)):
        if bool((mask == full.tril(offset)).all()):
            return alignment, None
    raise NotImplementedError(
        "flash_ext: attn_mask must be causal (upper left or lower right), or hide the keys behind a "
        "sequence's end from all heads and queries: no other mask can be expressed. Packed sequences "
        "(flash_attn_varlen_func) and windows (flash_attn_func) can often replace it"
    )
