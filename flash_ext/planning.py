"""What a call will run: backend, tile, grid, memory, and why not the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .options import ExtraOptions, call_options, shows_extra_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Plan:
    """How one call will run. ``str(plan)`` is a short report."""

    backend: str  # "fa3", "fa2", "fa1" or "cpu"
    tile: tuple[int, int]  # query rows and keys of one step
    grid: int  # thread blocks launched; tiles handed out to threads on the CPU
    workspace_bytes: int
    smem_bytes: int  # shared memory of a thread block
    stages: int  # tiles of keys and values in flight
    launches: int  # kernels launched
    why: str  # why this tile
    passed_over: dict[str, str]  # backend -> why it was not taken

    def __str__(self) -> str:
        m, n = self.tile
        lines = [
            f"backend    {self.backend}",
            f"tile       {m} queries x {n} keys: {self.why}",
            f"grid       {self.grid}, {self.launches} launch{'es' if self.launches != 1 else ''}",
            f"memory     workspace {_bytes(self.workspace_bytes)}, shared {_bytes(self.smem_bytes)}, "
            f"{self.stages} stage{'s' if self.stages != 1 else ''}",
        ]
        return "\n".join(lines + [f"not {name:<6} {reason}" for name, reason in self.passed_over.items()])


def _bytes(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@shows_extra_options(without=("return_lse", "rng_state"))
def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    backward: bool = False,
    device: str | None = None,
    **extras: Unpack[ExtraOptions],
) -> Plan:
    """What :func:`flash_attn_func` or :func:`flash_attn_varlen_func` would run for these arguments.

    Nothing is computed; tensors on the meta device will do. It needs no GPU.

    Parameters
    ----------
    q, k, v : Tensor
        As in :func:`flash_attn_func`, or packed with cu_seqlens as in :func:`flash_attn_varlen_func`.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k : optional
        As in :func:`flash_attn_varlen_func`.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, **extras
        As in :func:`flash_attn_func`.
    backward : bool
        Plan the backward instead of the forward.
    device : str, optional
        "cpu", "cuda", or a card that need not be here, such as "sm_80" or "sm_90"; default: q's device.

    Returns
    -------
    Plan
        Print it for a report.

    Raises
    ------
    RuntimeError
        A broken rule, or no backend that can run the problem: with every backend's reason.

    References
    ----------
    Dao, "FlashAttention-2", 2023, section 3.2 (parallelism and work partitioning: what a plan decides).

    Examples
    --------
    >>> import torch, flash_ext
    >>> q = torch.empty(2, 2048, 8, 64, device="meta")
    >>> flash_ext.plan(q, q, q, causal=True, device="cpu").backend
    'cpu'
    """
    options = call_options(
        q,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        **extras,
    )
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    text = torch.ops.flash_ext.plan(q, k, v, **options, backward=backward, device=device)
    facts = json.loads(text)
    return Plan(**{**facts, "tile": tuple(facts["tile"])})
