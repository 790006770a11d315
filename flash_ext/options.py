"""The options that the public functions share, turned into the arguments of ``torch.ops.flash_ext.fwd``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypedDict, TypeVar

import torch
from torch import Tensor

from .ops import accumulator_dtype

Function = TypeVar("Function", bound=Callable)


class ExtraOptions(TypedDict, total=False):
    """What every attention function takes by keyword behind flash-attn's own arguments.

    The names up to `sm_margin` are FlashAttention-3's.
    """

    seqused_q: Tensor | None  # int32 (batch): rows of each query sequence that count, from its start
    seqused_k: Tensor | None  # int32 (batch): the same for keys
    qv: Tensor | None  # not supported yet
    q_descale: Tensor | None  # not supported yet
    k_descale: Tensor | None  # not supported yet
    v_descale: Tensor | None  # not supported yet
    attention_chunk: int  # not supported yet
    num_splits: int  # hint, never changes the result
    pack_gqa: bool | None  # hint
    sm_margin: int  # hint
    sinks: Tensor | None  # float (nheads): a logit per head that only adds to the softmax's denominator
    causal_alignment: str  # "bottom_right" or "top_left"
    rng_state: Tensor | None  # int64 (2): seed and offset of dropout; drawn from torch's generator if None
    version: str | None  # force a backend: "fa1", "fa2", "fa3" or "cpu"
    return_lse: bool  # return (out, lse)


def call_options(
    q: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    sinks: Tensor | None = None,
    causal_alignment: str = "bottom_right",
    rng_state: Tensor | None = None,
    version: str | None = None,
) -> dict:
    """Keyword arguments for ``torch.ops.flash_ext.fwd``; raises for what is not supported yet.

    num_splits, pack_gqa and sm_margin are hints of FlashAttention-3 on how to run: no backend needs them.
    """
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    for name, value in {"qv": qv, **descales, "attention_chunk": attention_chunk or None}.items():
        if value is not None:
            raise NotImplementedError(f"flash_ext: {name} is not supported yet, leave it at its default")
    if causal_alignment not in ("bottom_right", "top_left"):
        raise ValueError(
            f"flash_ext: causal_alignment must be 'bottom_right' or 'top_left', got {causal_alignment!r}"
        )
    if len(window_size) != 2:
        raise ValueError(f"flash_ext: window_size must be (left, right), got {tuple(window_size)}")
    if dropout_p > 0 and rng_state is None:
        rng_state = draw_rng_state(q.device)
    return {
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_left": window_size[0],
        "window_right": window_size[1],
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks if sinks is None else sinks.to(accumulator_dtype(q.dtype)),
        "dropout_p": dropout_p,
        "rng_state": rng_state,
        "top_left": causal_alignment == "top_left",
        "deterministic": deterministic,
        "version": version,
    }


def draw_rng_state(device: torch.device) -> Tensor:
    """Seed and offset of one dropout, int64 (2), from torch's default generator of `device`.

    A tensor and not two numbers, so that no synchronisation happens, and so that captured graphs, compiled
    functions, activation checkpointing and ``torch.manual_seed`` all do what they do for torch's own dropout.
    """
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def shows_extra_options(*, without: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Make a function that ends in ``**extras: Unpack[ExtraOptions]`` list those options in its signature."""

    def decorate(function: Function) -> Function:
        shared = inspect.signature(call_options).parameters.values()
        extras = [p for p in shared if p.kind is p.KEYWORD_ONLY and p.name not in without]
        if "return_lse" not in without:
            keyword_only = inspect.Parameter.KEYWORD_ONLY
            extras.append(inspect.Parameter("return_lse", keyword_only, default=False, annotation="bool"))
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=own + extras)  # type: ignore[attr-defined]
        return function

    return decorate
