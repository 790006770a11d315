"""What the operator means, in plain PyTorch: slow, readable, and the judge of every backend.

Everything here is **quadratic** in memory and time: it builds the score matrix that the kernels never
write. It works sequence by sequence on slices, so a result cannot depend on memory outside its sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_PHILOX_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_PHILOX_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_PHILOX_ROUNDS = 7
_LOW_32 = 0xFFFFFFFF


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options,
) -> tuple[Tensor, Tensor]:
    """Exact attention with PyTorch's own autograd. Quadratic in memory.

    Takes the arguments of ``torch.ops.flash_ext.fwd`` and follows the same definition: scores are scaled,
    soft-capped, biased by ALiBi and masked, in this order; sinks only add to the denominator; dropout
    uses the same Philox mapping as the kernels.

    Parameters
    ----------
    q : Tensor
        (batch, seqlen_q, nheads, head_dim), or (total_q, nheads, head_dim) with `cu_seqlens_q`.
    k : Tensor
        (batch, seqlen_k, nheads_k, head_dim), or (total_k, nheads_k, head_dim) with `cu_seqlens_k`.
    v : Tensor
        Shape of `k` with head_dim_v as its last dimension.
    cu_seqlens_q, cu_seqlens_k : Tensor, optional
        int32 (batch + 1). Sequence b holds rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``.
    dtype : torch.dtype
        In which to compute; with the inputs' own it is the baseline that errors are measured by.
    **options
        ``seqused_q, seqused_k, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes,
        sinks, dropout_p, rng_state, top_left`` as in ``torch.ops.flash_ext.fwd``; planning hints
        (``max_seqlen_q, max_seqlen_k``) are accepted and change nothing.

    Returns
    -------
    out : Tensor
        `dtype`, shape of `q` with head_dim_v as its last dimension; 0 in rows without a visible key.
    lse : Tensor
        `dtype`, natural log, (batch, nheads, seqlen_q) or (nheads, total_q); -inf in such rows.

    References
    ----------
    Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022,
    section 2.2 (standard attention).

    Examples
    --------
    >>> import torch
    >>> from flash_ext import reference
    >>> q = k = v = torch.ones(1, 2, 1, 4)
    >>> out, lse = reference.attention(q, k, v, causal=True)
    >>> lse
    tensor([[[2.0000, 2.6931]]], dtype=torch.float64)
    """
    rows = list(_sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, dtype, options))
    outs, lses = [], []
    for row in rows:
        probabilities, lse = _softmax(row, options)
        if row.keep is not None:
            probabilities = probabilities * row.keep / (1 - _threshold(options["dropout_p"]) / 65536)
        group = row.q.shape[1] // max(row.k.shape[1], 1)
        out = torch.einsum("hij,jhd->ihd", probabilities, row.v.repeat_interleave(group, 1))
        outs.append(F.pad(out, (0, 0, 0, 0, 0, row.length_q - len(out))))
        lses.append(F.pad(lse, (0, row.length_q - len(out)), value=-math.inf))
    nothing = q[:0, ..., 0].to(dtype)  # a part of the graph also where there is no sequence
    if cu_seqlens_q is None:
        out = torch.stack(outs) if outs else nothing[..., None].expand(*nothing.shape, v.shape[-1])
        return out, torch.stack(lses) if lses else nothing.transpose(1, 2)
    first, last = int(cu_seqlens_q[0]), int(cu_seqlens_q[-1])
    out = torch.cat([nothing[..., None].expand(*nothing.shape, v.shape[-1]), *outs])
    lse = torch.cat([nothing.transpose(0, 1), *lses], 1)
    behind = len(q) - last
    return F.pad(out, (0, 0, 0, 0, first, behind)), F.pad(lse, (first, behind), value=-math.inf)


def signed_probabilities(
    q: Tensor,
    k: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **options,
) -> Tensor:
    """The softmax matrix itself, dropped entries with a minus sign. Quadratic, for tests and inspection.

    Parameters
    ----------
    q, k, cu_seqlens_q, cu_seqlens_k, **options
        As in :func:`attention`.

    Returns
    -------
    Tensor
        float64 (batch, nheads, longest query, longest key sequence), not rescaled for dropout.

    References
    ----------
    Dao et al., "FlashAttention", 2022, appendix B.3 (the dropout mask of the forward pass).

    Examples
    --------
    >>> import torch
    >>> from flash_ext import reference
    >>> reference.signed_probabilities(torch.ones(1, 1, 1, 4), torch.ones(1, 2, 1, 4))
    tensor([[[[0.5000, 0.5000]]]], dtype=torch.float64)
    """
    rows = list(_sequences(q, k, k, cu_seqlens_q, cu_seqlens_k, torch.float64, options))
    most_q = max([row.length_q for row in rows], default=0)
    most_k = max([row.length_k for row in rows], default=0)
    result = q.new_zeros(len(rows), q.shape[-2], most_q, most_k, dtype=torch.float64)
    for b, row in enumerate(rows):
        probabilities, _ = _softmax(row, options)
        if row.keep is not None:
            probabilities = torch.where(row.keep, probabilities, -probabilities)
        result[b, :, : len(row.q), : len(row.k)] = probabilities
    return result


def dropout_keep_mask(
    rng_state: Tensor, dropout_p: float, batch: int, nheads: int, seqlen_q: int, seqlen_k: int
) -> Tensor:
    """Which probabilities dropout keeps, the same on every backend and for every tile. Quadratic.

    One call of Philox4x32-7 serves a slot of 8 elements of a 16x16 block, laid out as the accumulator
    fragment of a 16x8x16 matrix instruction. With i and j counted from the start of the sequence: slot
    ``s = 4·(i%8) + (j%8)/2``, word ``(i%16)/8 + 2·((j%16)/8)``, half ``j%2``; key = seed, counter =
    ``(32·(j/16) + s, i/16, batch·nheads + head, offset)``. An element is dropped iff its 16 bits are below
    ``round(65536·dropout_p)``.

    Parameters
    ----------
    rng_state : Tensor
        int64 (2): seed and offset.
    dropout_p : float
        Probability of dropping, in [0, 1).
    batch, nheads, seqlen_q, seqlen_k : int
        The shape of the mask.

    Returns
    -------
    Tensor
        bool (batch, nheads, seqlen_q, seqlen_k), True where the probability is kept.

    References
    ----------
    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011, section 3.3 (Philox).

    Examples
    --------
    >>> import torch
    >>> from flash_ext import reference
    >>> mask = reference.dropout_keep_mask(torch.tensor([7, 0]), 0.25, 1, 2, 64, 64)
    >>> mask.shape, bool((mask.double().mean() - 0.75).abs() < 0.02)
    (torch.Size([1, 2, 64, 64]), True)
    """
    heads = torch.arange(batch * nheads, device=rng_state.device)
    bits = _random_16_bits(rng_state, heads, seqlen_q, seqlen_k)
    return (bits >= _threshold(dropout_p)).view(batch, nheads, seqlen_q, seqlen_k)


class _Sequence(NamedTuple):
    """One sequence of the batch, cut to its used rows; length_* are its rows in memory."""

    q: Tensor  # (used_q, nheads, head_dim)
    k: Tensor  # (used_k, nheads_k, head_dim)
    v: Tensor  # (used_k, nheads_k, head_dim_v)
    slopes: Tensor | None  # (nheads)
    keep: Tensor | None  # (nheads, used_q, used_k)
    length_q: int
    length_k: int


def _sequences(q, k, v, cu_q, cu_k, dtype, options) -> Iterator[_Sequence]:
    batch = len(q) if cu_q is None else len(cu_q) - 1
    heads = torch.arange(q.shape[-2], device=q.device)
    slopes, dropout_p = options.get("alibi_slopes"), options.get("dropout_p", 0.0)
    for b in range(batch):
        rows_q, rows_k = _rows(q, cu_q, b), _rows(k, cu_k, b)
        used_q, used_k = (
            length if options.get(name) is None else int(options[name][b])
            for name, length in (("seqused_q", len(rows_q)), ("seqused_k", len(rows_k)))
        )
        keep = None
        if _threshold(dropout_p) > 0:
            bits = _random_16_bits(options["rng_state"], b * len(heads) + heads, used_q, used_k)
            keep = bits >= _threshold(dropout_p)
        yield _Sequence(
            q=rows_q[:used_q].to(dtype),
            k=rows_k[:used_k].to(dtype),
            v=_rows(v, cu_k, b)[:used_k].to(dtype),
            slopes=slopes if slopes is None or slopes.ndim == 1 else slopes[b],
            keep=keep,
            length_q=len(rows_q),
            length_k=len(rows_k),
        )


def _rows(x: Tensor, cu_seqlens: Tensor | None, b: int) -> Tensor:
    return x[b] if cu_seqlens is None else x[int(cu_seqlens[b]) : int(cu_seqlens[b + 1])]


def _softmax(row: _Sequence, options) -> tuple[Tensor, Tensor]:
    """Probabilities (nheads, used_q, used_k) before dropout, and lse (nheads, used_q)."""
    scale, softcap = options.get("softmax_scale"), options.get("softcap", 0.0)
    heads = row.q.shape[1]
    k = row.k.repeat_interleave(heads // max(row.k.shape[1], 1), 1)
    scores = torch.einsum("ihd,jhd->hij", row.q * (row.q.shape[-1] ** -0.5 if scale is None else scale), k)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    # How far key j lies to the right of the diagonal that query i is aligned to.
    offset = 0 if options.get("top_left", False) else len(row.k) - len(row.q)
    j, i = (torch.arange(len(x), device=row.q.device) for x in (row.k, row.q))
    right_of = j - (i[:, None] + offset)
    if row.slopes is not None:
        scores = scores - row.slopes.to(scores.dtype)[:, None, None] * right_of.abs()
    left, right = options.get("window_left", -1), options.get("window_right", -1)
    if options.get("causal", False):
        right = 0
    hidden = torch.zeros_like(right_of, dtype=torch.bool)
    if left >= 0:
        hidden |= right_of < -left
    if right >= 0:
        hidden |= right_of > right
    scores = scores.masked_fill(hidden, -math.inf)

    sinks = options.get("sinks")
    sink = scores.new_full((heads,), -math.inf) if sinks is None else sinks.to(scores.dtype)
    scores = torch.cat([scores, sink[:, None, None].expand(-1, len(row.q), 1)], -1)
    largest = scores.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    lse = (largest + torch.log(total.masked_fill(empty, 1.0))).masked_fill(empty, -math.inf)
    return weights[..., :-1] / total.masked_fill(empty, 1.0), lse.squeeze(-1)


def _threshold(dropout_p: float) -> int:
    return min(math.floor(65536 * dropout_p + 0.5), 65535)


def _random_16_bits(rng_state: Tensor, heads: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(len(heads), seqlen_q, seqlen_k) numbers below 65536; heads are counted over the whole batch."""
    seed, offset = rng_state.tolist()
    blocks_q, blocks_k = -(-seqlen_q // 16), -(-seqlen_k // 16)
    x = torch.arange(32 * blocks_k, device=heads.device)
    y = torch.arange(blocks_q, device=heads.device)
    counter = torch.broadcast_tensors(x, y[:, None], heads[:, None, None], x.new_tensor(offset & _LOW_32))
    words = torch.stack(_philox(counter, (seed & _LOW_32, (seed >> 32) & _LOW_32)), -1)
    halves = torch.stack([words & 0xFFFF, words >> 16], -1)
    # slot = (i%8, (j%8)/2) and word = (j half, i half) of the 16x16 block
    halves = halves.view(len(heads), blocks_q, blocks_k, 8, 4, 2, 2, 2)
    bits = halves.permute(0, 1, 6, 3, 2, 5, 4, 7).reshape(len(heads), 16 * blocks_q, 16 * blocks_k)
    return bits[:, :seqlen_q, :seqlen_k]


def _philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    x, y, z, w = counter
    for n in range(_PHILOX_ROUNDS):
        key_0, key_1 = (
            (word + n * step) & _LOW_32 for word, step in zip(key, _PHILOX_KEY_STEPS, strict=True)
        )
        # int64 products wrap modulo 2^64, which keeps both halves of the unsigned product intact.
        product_0, product_1 = x * _PHILOX_MULTIPLIERS[0], z * _PHILOX_MULTIPLIERS[1]
        x, y, z, w = (
            ((product_1 >> 32) & _LOW_32) ^ y ^ key_0,
            product_1 & _LOW_32,
            ((product_0 >> 32) & _LOW_32) ^ w ^ key_1,
            product_0 & _LOW_32,
        )
    return x, y, z, w
