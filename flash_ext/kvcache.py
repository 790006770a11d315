"""Attention with a key-value cache: append, rotary embedding, left padding and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .options import ExtraOptions, call_options, shows_extra_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@shows_extra_options(without=("rng_state", "return_lse", "num_splits", "seqused_q", "seqused_k"))
@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    **extras: Unpack[ExtraOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache of keys and values, which may be extended in the same call.

    `k` and `v` are written **into the cache**, behind the first `cache_seqlens` rows of each sequence, and
    take part in the attention. No gradient is computed. Causal masks are aligned to the bottom right of the
    used keys, as in :func:`flash_ext.flash_attn_func`: with 2 queries over 5 keys the first query sees 4.

    A plain cache is read where it lies. With `cache_batch_idx`, `cache_leftpad` or `block_table` the rows
    that count are gathered into one copy first.

    Parameters
    ----------
    q : Tensor
        (batch, seqlen_q, nheads, head_dim), or (total_q, nheads, head_dim) with `cu_seqlens_q`.
    k_cache : Tensor
        (batch_cache, seqlen_cache, nheads_k, head_dim), or with `block_table` pages
        (num_blocks, page_size, nheads_k, head_dim) of any page size.
    v_cache : Tensor
        As `k_cache`, with head_dim_v as its last dimension.
    k, v : Tensor, optional
        (batch, seqlen_new, nheads_k, head_dim or head_dim_v): rows to append; with `cu_seqlens_k_new` packed.
    rotary_cos, rotary_sin : Tensor, optional
        (seqlen_rotary, rotary_dim / 2). Rotates the first rotary_dim elements of `k` at positions
        cache_seqlens, cache_seqlens + 1, ... and of `q` at the same ones if `causal` or a window is given,
        else at position cache_seqlens alone. Needs `k` and `v`.
    cache_seqlens : int or Tensor, optional
        int32 (batch): rows of each sequence that are in the cache already, left padding included. Needed to
        append; without it the whole cache counts.
    cache_batch_idx : Tensor, optional
        int32 (batch): which sequence of the cache belongs to each one of q.
    cache_leftpad : Tensor, optional
        int32 (batch): rows at the start of each sequence that do not count.
    block_table : Tensor, optional
        int32 (batch, max_blocks): page ``block_table[b, n]`` holds rows ``n · page_size`` and on.
        `page_table` is FlashAttention-3's name for it.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in :func:`flash_ext.flash_attn_func`.
    rotary_interleaved : bool
        True rotates elements (0, 1), (2, 3), ... as pairs; False elements (0, rotary_dim / 2), ...
    num_splits : int
        A hint; it never changes a result.
    return_softmax_lse : bool
        Return (out, lse).
    cu_seqlens_q, cu_seqlens_k_new : Tensor, optional
        int32 (batch + 1): `q`, or `k` and `v`, are packed sequences of different lengths.
    max_seqlen_q, scheduler_metadata : optional
        FlashAttention-3's hints, accepted.
    rotary_seqlens : Tensor, optional
        int32 (batch): the first rotary position of each sequence instead of cache_seqlens.
    **extras
        As in :func:`flash_ext.flash_attn_func`.

    Returns
    -------
    out : Tensor
        (batch, seqlen_q, nheads, head_dim_v) or packed, dtype of `q`.
    lse : Tensor
        With `return_softmax_lse`: float32, (batch, nheads, seqlen_q) or (nheads, total_q).

    Raises
    ------
    ValueError
        Arguments that do not fit each other, or a cache too short for what is appended.
    RuntimeError
        A rule of :func:`flash_ext.flash_attn_func` is broken, or no backend can run the problem.

    References
    ----------
    Su et al., "RoFormer", 2021, section 3.2 (rotary embedding); Kwon et al., "Efficient Memory Management for
    Large Language Model Serving with PagedAttention", 2023, section 4.1 (pages).

    Examples
    --------
    >>> import torch
    >>> from flash_ext import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 64, 4, 32), torch.zeros(2, 64, 4, 32)
    >>> q, k, v = (torch.randn(2, 1, 4, 32) for _ in range(3))
    >>> seqlens = torch.tensor([5, 9], dtype=torch.int32)
    >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=seqlens, causal=True)
    >>> out.shape, bool((k_cache[1, 9] == k[1, 0]).all())
    (torch.Size([2, 1, 4, 32]), True)
    """
    options = call_options(q, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, **extras)
    table = page_table if block_table is None else block_table
    _check(q, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, table)
    batch = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    if cache_seqlens is None:
        cache_seqlens = capacity
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    where = _Cache(cache_batch_idx, table, k_cache.shape[1])
    used = cache_seqlens
    if k is not None:
        used = used + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())
        if used.is_cpu and (used > capacity).any():
            raise ValueError(
                f"flash_ext: the cache must hold cache_seqlens + new rows <= {capacity} rows a sequence, "
                f"got {int(used.max())}"
            )
        sequence, row = _sequence_and_row(k, cu_seqlens_k_new)
        if rotary_cos is not None:
            start = cache_seqlens if rotary_seqlens is None else rotary_seqlens
            k = _rotate(k, rotary_cos, rotary_sin, start[sequence] + row, rotary_interleaved)
            sequence_q, row_q = _sequence_and_row(q, cu_seqlens_q)
            moves = causal or tuple(window_size) != (-1, -1)
            positions = start[sequence_q] + (row_q if moves else 0)
            q = _rotate(q, rotary_cos, rotary_sin, positions, rotary_interleaved)
        index = where.index(sequence, cache_seqlens[sequence] + row)
        inside = slice(None)
        if cu_seqlens_k_new is not None:
            inside = slice(int(cu_seqlens_k_new[0]), int(cu_seqlens_k_new[-1]))
        k_cache[tuple(i[inside] for i in index)] = k[inside]
        v_cache[tuple(i[inside] for i in index)] = v[inside]

    keys, values = k_cache, v_cache
    if table is not None or cache_batch_idx is not None or cache_leftpad is not None:
        used = used if cache_leftpad is None else used - cache_leftpad
        keys, values = gather_keys(k_cache, v_cache, used, cache_batch_idx, cache_leftpad, table)
    options |= {"seqused_k": used, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    out, lse = torch.ops.flash_ext.fwd(q, keys, values, **options)
    return (out, lse) if return_softmax_lse else out


def gather_keys(
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The first `lengths` rows of each sequence of a cache behind its left padding, as one padded copy.

    Rows behind the used length repeat some valid row: they are there to be skipped by seqused_k.
    """
    capacity = k.shape[1] * (1 if block_table is None else block_table.shape[1])
    # A longest length would have to be read from a GPU: there the capacity serves.
    longest = int(lengths.max()) if lengths.is_cpu and len(lengths) else capacity
    row = torch.arange(longest, device=k.device).expand(len(lengths), longest)
    sequence = torch.arange(len(lengths), device=k.device)[:, None].expand_as(row)
    used = row < lengths[:, None]
    row = row if leftpad is None else row + leftpad[:, None]
    index = _Cache(batch_idx, block_table, k.shape[1]).index(sequence, row, used)
    return k[index], v[index]


class _Cache:
    """Where a row of a sequence lies in a cache, with or without pages."""

    def __init__(self, batch_idx: Tensor | None, block_table: Tensor | None, page_size: int):
        self.batch_idx, self.block_table, self.page_size = batch_idx, block_table, page_size

    def index(self, sequence: Tensor, row: Tensor, used: Tensor | bool = True) -> tuple[Tensor, Tensor]:
        """Indices into the first two dimensions of the cache; (0, 0) where `used` is False."""
        used = torch.as_tensor(used, device=row.device)
        row = torch.where(used, row, 0)
        if self.block_table is not None:
            page = self.block_table[sequence, row // self.page_size]
            # Entries of the table behind the used rows may hold anything.
            return torch.where(used, page, 0), row % self.page_size
        first = sequence if self.batch_idx is None else self.batch_idx[sequence]
        return torch.where(used, first, 0), row


def _sequence_and_row(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sequence of each row of x and its place in it, both shaped like x without heads and dim."""
    if cu_seqlens is None:
        row = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return torch.arange(len(x), device=x.device)[:, None].expand_as(row), row
    row = torch.arange(len(x), device=x.device, dtype=cu_seqlens.dtype)
    sequence = torch.bucketize(row, cu_seqlens[1:], right=True).clamp(max=len(cu_seqlens) - 2)
    return sequence, row - cu_seqlens[sequence]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of the first 2 · cos.shape[1] elements of (..., heads, dim); positions are (...)."""
    half = cos.shape[1]
    positions = positions.clamp(0, len(cos) - 1)
    work = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[positions].unsqueeze(-2).to(work) for table in (cos, sin))
    turned, rest = x[..., : 2 * half].to(work), x[..., 2 * half :]
    pair = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    a, b = (turned[..., part] for part in pair)
    rotated = torch.empty_like(turned)
    rotated[..., pair[0]] = a * cos - b * sin
    rotated[..., pair[1]] = a * sin + b * cos
    return torch.cat([rotated.to(x.dtype), rest], -1)


def _check(q, k, v, rotary_cos, rotary_sin, cache_seqlens, batch_idx, leftpad, block_table) -> None:
    if (k is None) != (v is None):
        raise ValueError("flash_ext: k and v must be given together")
    if k is not None and cache_seqlens is None:
        raise ValueError("flash_ext: cache_seqlens must be given with k and v: it says where to append")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("flash_ext: rotary_cos and rotary_sin must be given together")
    if rotary_cos is not None and k is None:
        raise ValueError("flash_ext: rotary_cos and rotary_sin need k and v: the cache holds rotated keys")
    if rotary_cos is not None and 2 * rotary_cos.shape[-1] > q.shape[-1]:
        raise ValueError(
            "flash_ext: rotary_cos must have shape (seqlen_rotary, rotary_dim / 2) with rotary_dim <= "
            f"head_dim = {q.shape[-1]}, got {tuple(rotary_cos.shape)}"
        )
    if block_table is not None and batch_idx is not None:
        raise ValueError("flash_ext: cache_batch_idx and block_table must not be given together")
    tensors = {"cache_seqlens": cache_seqlens, "cache_batch_idx": batch_idx, "cache_leftpad": leftpad}
    for name, tensor in {**tensors, "block_table": block_table}.items():
        if isinstance(tensor, Tensor) and tensor.dtype != torch.int32:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"flash_ext: {name} must be int32, got {dtype}")
