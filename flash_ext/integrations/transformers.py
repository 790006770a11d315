"""flash_ext as the attention of Hugging Face transformers models.

A padded batch runs packed: padding is left out of the key and value rows (and, in decoders, of the query
rows), and the sequences go through the variable-length kernel. Everything a mask can say in this form is
honoured (left and right padding, causal, sliding windows, caches, several sequences packed into one row);
what it cannot say is an error.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface

import flash_ext
from flash_ext.bert_padding import index_first_axis, pad_input

_RESERVED = ("flash", "sdpa", "flex_attention")  # inside a name they select transformers' own code
_PACKINGS = WeakTensorKeyDictionary()  # of the masks made here: every layer of a forward gets the same one
_INSTEAD = "use attn_implementation='sdpa' for this model"


def register(name: str = "ext_attention", version: str | None = None) -> str:
    """Make flash_ext available to transformers under a name.

    Parameters
    ----------
    name : str
        What models will be given as ``attn_implementation``. Must not contain "flash", "sdpa" or
        "flex_attention": transformers routes such names to its own code.
    version : str, optional
        Force a backend ("cpu", "fa1", "fa2", "fa3") instead of the best one for each call.

    Returns
    -------
    str
        The name.

    Raises
    ------
    ValueError
        If the name contains a word that transformers reserves.

    Examples
    --------
    >>> from transformers import BertConfig, BertModel
    >>> from flash_ext.integrations.transformers import register
    >>> config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> model = BertModel._from_config(config, attn_implementation=register())
    >>> tuple(model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape)
    (1, 3, 32)
    """
    for word in _RESERVED:
        if word in name:
            raise ValueError(
                f"flash_ext: name must not contain {word!r}, a word of transformers, got {name!r}"
            )
    AttentionInterface.register(name, partial(attention, version=version))
    AttentionMaskInterface.register(name, attention_mask)
    return name


def attention_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    use_vmap=False,
    local_size=None,
    allow_is_causal_skip=True,
    config=None,
    device=None,
    **kwargs,
) -> torch.Tensor | None:
    """What `attention` receives as its mask; transformers calls this once per forward and kind of layer.

    Returns
    -------
    torch.Tensor or None
        None when every key is real; bool (batch, keys), True for real keys, when some are padding or when
        the cache is longer than what was written (only the first `keys` are to be read); int32 (batch, keys),
        the number of the sequence in its row, when several were packed into rows (position_ids start again).

    Raises
    ------
    NotImplementedError
        For masks that this form cannot hold: custom and / or functions, chunks, blocks that look ahead.
    """
    if use_vmap:
        raise NotImplementedError(f"flash_ext: custom mask functions are not supported, {_INSTEAD}")
    end = kv_offset + kv_length
    is_chunked = local_size is not None and local_size != getattr(config, "sliding_window", None)
    if is_chunked and end > local_size:
        raise NotImplementedError(
            f"flash_ext: chunks must hold all tokens: {local_size} each, got {end} tokens, {_INSTEAD}"
        )
    is_causal = "allow_is_bidirectional_skip" not in kwargs
    if is_causal:
        end = min(end, int(q_offset) + q_length)  # the rows behind are the unwritten part of a static cache
        if not allow_is_causal_skip:
            starts = _sequence_starts(mask_function, batch_size, q_length, int(q_offset), device)
            if starts.any():
                return F.pad(starts, (1, 0)).cumsum(1, dtype=torch.int32)
    columns = end - kv_offset
    if attention_mask is None:
        return (
            None if columns == kv_length else torch.ones(batch_size, columns, dtype=torch.bool, device=device)
        )
    attention_mask = attention_mask[:, :end][
        :, -columns:
    ]  # generate() sends a mask through here twice: cut only once
    attention_mask = F.pad(attention_mask.bool(), (0, columns - attention_mask.shape[1]))
    if columns == kv_length and attention_mask.all():
        return None
    _PACKINGS[attention_mask] = None  # nobody else has it, so nobody writes to it
    return attention_mask


def _sequence_starts(mask_function, batch_size, q_length, q_offset, device):
    """bool (batch, q_length - 1): token i + 1 does not see token i, so a new sequence starts there."""
    row = torch.arange(batch_size, device=device)[:, None]
    head = torch.zeros_like(row)
    token = torch.arange(q_offset, q_offset + q_length - 1, device=device)[None, :]
    if mask_function(row, head, token, token + 1).any():
        raise NotImplementedError(f"flash_ext: blocks that see later tokens are not supported, {_INSTEAD}")
    return ~mask_function(row, head, token + 1, token).expand(batch_size, -1)


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    is_causal=None,
    s_aux=None,
    position_bias=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    version=None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in each layer.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer; its `is_causal` holds unless the argument of that name is given.
    query, key, value : torch.Tensor
        (batch, heads, length, head_dim); the heads of key and value must divide those of query.
    attention_mask : torch.Tensor, optional
        What the function `attention_mask` of this module returned.
    dropout, scaling, sliding_window, softcap, is_causal, s_aux : optional
        As in transformers' own attention functions; s_aux are attention sinks.
    cu_seq_lens_q, cu_seq_lens_k : torch.Tensor, optional
        Where the sequences of a batch of one begin, from a padding-free data collator.
    version : str, optional
        Force a backend.

    Returns
    -------
    tuple of torch.Tensor and None
        (batch, length, heads, head_dim_v), and no attention weights.
    """
    if position_bias is not None:
        raise NotImplementedError(f"flash_ext: position_bias is not supported, {_INSTEAD}")
    if kwargs.get("output_attentions"):
        raise NotImplementedError("flash_ext: output_attentions needs attn_implementation='eager'")
    if attention_mask is not None and attention_mask.ndim != 2:
        shape = tuple(attention_mask.shape)
        raise NotImplementedError(
            f"flash_ext: attention_mask must have shape (batch, seqlen_k), got {shape}, {_INSTEAD}"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if torch.is_autocast_enabled(q.device.type):  # normalised queries and keys may still be float32
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = (
        (-1, -1) if sliding_window is None else (sliding_window - 1, 0 if is_causal else sliding_window - 1)
    )
    options = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "causal": is_causal,
        "window_size": window,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "version": version,
    }
    if cu_seq_lens_q is not None:
        return _flattened(q, k, v, cu_seq_lens_q.int(), cu_seq_lens_k.int(), options), None
    if attention_mask is None:
        return flash_ext.flash_attn_func(q, k, v, **options), None
    if attention_mask.dtype == torch.int32:
        cu_seqlens = _cu_seqlens_of(attention_mask)
        return _flattened(q, k, v, cu_seqlens, cu_seqlens, options), None
    return _unpadded(q, k, v, attention_mask.bool(), options), None


def _cu_seqlens_of(sequences):
    """int32 (count + 1): where sequences begin in rows laid end to end; each row begins one."""
    is_start = F.pad(sequences.diff(dim=1) != 0, (1, 0), value=True).flatten()
    starts = is_start.nonzero().flatten()
    return F.pad(starts, (0, 1), value=is_start.numel()).int()


def _flattened(q, k, v, cu_seqlens_q, cu_seqlens_k, options):
    """Attention over rows laid end to end: (batch, seqlen_q, nheads, head_dim_v)."""
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out = flash_ext.flash_attn_varlen_func(
        *rows, cu_seqlens_q, cu_seqlens_k, q.shape[1], k.shape[1], **options
    )
    return out.unflatten(0, q.shape[:2])


def _unpadded(q, k, v, is_real, options):
    """Attention without padding: (batch, seqlen_q, nheads, head_dim_v), 0 for a decoder's padded queries."""
    batch, seqlen_q = q.shape[:2]
    seqlen_k = is_real.shape[1]
    rows_k, cu_seqlens_k = _packing(is_real)
    k, v = (index_first_axis(x[:, :seqlen_k].flatten(0, 1), rows_k) for x in (k, v))
    if options["causal"]:  # the queries are the last tokens of the keys
        rows, cu_seqlens_q = _packing(is_real if seqlen_q == seqlen_k else is_real[:, seqlen_k - seqlen_q :])
        q = index_first_axis(q.flatten(0, 1), rows)
        out = flash_ext.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, **options
        )
        return pad_input(out, rows, batch, seqlen_q)
    # The mask of a bidirectional or a cross attention says nothing about the queries: all of them run.
    cu_seqlens_q = seqlen_q * torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    q = q.flatten(0, 1)
    out = flash_ext.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, **options)
    return out.unflatten(0, (batch, seqlen_q))


def _packing(is_real):
    """Where a mask's real tokens are in the flattened batch, int64 (total), and their cu_seqlens.

    Of a mask that was made here found once for all layers: to know how many there are the host has to
    wait for the GPU.
    """
    packing = _PACKINGS.get(is_real)
    if packing is None:
        indices = is_real.flatten().nonzero().flatten()
        packing = indices, F.pad(is_real.sum(-1).cumsum(0, dtype=torch.int32), (1, 0))
        if is_real in _PACKINGS:
            _PACKINGS[is_real] = packing
    return packing
