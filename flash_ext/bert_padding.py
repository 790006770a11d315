"""Between padded and packed batches: the functions of flash-attn 2.8's bert_padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor, differentiable.

    Parameters
    ----------
    input : Tensor
        (rows, ...).
    indices : Tensor
        int64 (total).

    Returns
    -------
    Tensor
        (total, ...).

    Examples
    --------
    >>> import torch
    >>> from flash_ext.bert_padding import index_first_axis
    >>> index_first_axis(torch.arange(6).view(3, 2), torch.tensor([2, 0]))
    tensor([[4, 5],
            [0, 1]])
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of :func:`index_first_axis`: rows put into a tensor of zeros, differentiable.

    Parameters
    ----------
    values : Tensor
        (total, ...).
    indices : Tensor
        int64 (total), all different.
    first_axis_dim : int
        Rows of the result.

    Returns
    -------
    Tensor
        (first_axis_dim, ...).

    Examples
    --------
    >>> import torch
    >>> from flash_ext.bert_padding import index_put_first_axis
    >>> index_put_first_axis(torch.ones(1, 2), torch.tensor([1]), 2)
    tensor([[0., 0.],
            [1., 1.]])
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the rows of a padded batch that a mask keeps.

    Parameters
    ----------
    hidden_states : Tensor
        (batch, seqlen, ...).
    attention_mask : Tensor
        bool or int (batch, seqlen), 1 where a token is valid.
    unused_mask : Tensor, optional
        bool or int (batch, seqlen), 1 where space is kept for a token that is not valid: seqused tells.

    Returns
    -------
    hidden_states : Tensor
        (total, ...), the tokens that either mask keeps.
    indices : Tensor
        int64 (total), where they were in the flattened batch; for :func:`pad_input`.
    cu_seqlens : Tensor
        int32 (batch + 1).
    max_seqlen_in_batch : int
        The longest packed sequence.
    seqused : Tensor
        int32 (batch), valid tokens of each sequence.

    References
    ----------
    Dao, "FlashAttention-2", 2023: sequences of different lengths run packed, without padding.

    Examples
    --------
    >>> import torch
    >>> from flash_ext.bert_padding import pad_input, unpad_input
    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> x = torch.randn(2, 3, 8)
    >>> packed, indices, cu_seqlens, longest, seqused = unpad_input(x, mask)
    >>> packed.shape, cu_seqlens.tolist(), longest, seqused.tolist()
    (torch.Size([3, 8]), [0, 2, 3], 2, [2, 1])
    >>> torch.equal(pad_input(packed, indices, 2, 3), x * mask[..., None])
    True
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten()).flatten()
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _cumulative(lengths), _longest(lengths), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack a padded batch whose rows each hold several sequences one behind the other.

    Parameters
    ----------
    hidden_states : Tensor
        (batch, seqlen, ...).
    attention_mask_in_length : Tensor
        int (batch, seqlen): the lengths of a row's sequences in order, then zeros. ``[[2, 3, 0, 0, 0, 0]]``
        is a row of two sequences, 2 and 3 tokens long, and one token of padding.

    Returns
    -------
    hidden_states : Tensor
        (total, ...).
    indices : Tensor
        int64 (total), for :func:`pad_input`.
    cu_seqlens : Tensor
        int32 (number of sequences + 1).
    max_seqlen_in_batch : int
        The longest sequence.

    Examples
    --------
    >>> import torch
    >>> from flash_ext.bert_padding import unpad_input_for_concatenated_sequences
    >>> lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    >>> packed, _, cu_seqlens, _ = unpad_input_for_concatenated_sequences(torch.randn(2, 6, 8), lengths)
    >>> packed.shape, cu_seqlens.tolist()
    (torch.Size([11, 8]), [0, 2, 5, 11])
    """
    tokens = attention_mask_in_length.sum(-1, keepdim=True)
    place = torch.arange(attention_mask_in_length.shape[1], device=tokens.device)
    indices = torch.nonzero((place < tokens).flatten()).flatten()
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _cumulative(lengths), _longest(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of :func:`unpad_input`; padding is 0.

    Parameters
    ----------
    hidden_states : Tensor
        (total, ...).
    indices : Tensor
        int64 (total), from :func:`unpad_input`.
    batch, seqlen : int
        The shape to restore.

    Returns
    -------
    Tensor
        (batch, seqlen, ...).

    Examples
    --------
    >>> import torch
    >>> from flash_ext.bert_padding import pad_input
    >>> pad_input(torch.ones(2, 1), torch.tensor([0, 3]), 2, 2).flatten().tolist()
    [1.0, 0.0, 0.0, 1.0]
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _cumulative(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if len(lengths) else 0
