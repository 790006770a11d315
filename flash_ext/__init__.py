"""Exact attention that never writes the score matrix to memory, on NVIDIA GPUs and on the CPU.

``softmax(scale · q kᵀ) v`` is computed tile by tile with an online softmax, in memory linear in the sequence
length. ``import flash_ext`` after ``import torch`` loads the operators ``torch.ops.flash_ext.*``; without
torch in the process they load with the first function that is used, or with ``import flash_ext.ops``, so
that ``flash_ext._C``, the door for NumPy, CuPy and JAX, works where torch is never imported.
``python -m flash_ext`` tells what works on this machine.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from .version import VERSION as __version__

if TYPE_CHECKING:
    from .interface import flash_attn_func, flash_attn_varlen_func
    from .kvcache import flash_attn_with_kvcache
    from .packed import (
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from .planning import Plan, plan
    from .torch_sdpa import sdpa

__all__ = [
    "Plan",
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "plan",
    "sdpa",
]


def _load() -> None:
    for module in ("interface", "packed", "kvcache", "planning", "torch_sdpa"):
        members = vars(importlib.import_module(f".{module}", __name__))
        globals().update({name: members[name] for name in __all__ if name in members})


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _load()
    return globals()[name]


if "torch" in sys.modules:
    _load()
