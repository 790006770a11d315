"""What is measured: a cell is one attention problem and one pass, a grid is cells and who runs in them."""

from dataclasses import dataclass, replace
from itertools import product

import torch

PASSES = ("fwd", "bwd", "fwd+bwd")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PASS_COST = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}  # a backward has five matrix products, a forward two


@dataclass(frozen=True)
class Cell:
    """One row of a table. window is (left, right), -1 unlimited; causal is bottom-right aligned."""

    pass_: str
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: tuple[int, int] = (-1, -1)

    @property
    def name(self) -> str:
        heads = f"h{self.nheads}" if self.nheads == self.nheads_k else f"h{self.nheads}/{self.nheads_k}"
        mask = "causal" if self.causal else "full"
        window = "" if self.window == (-1, -1) else f" window {self.window[0]},{self.window[1]}"
        sizes = f"b{self.batch} s{self.seqlen_q} {heads}"
        return f"{self.pass_} {self.dtype} d{self.head_dim} {mask}{window} {sizes}"

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that the mask lets through, in one head of one sequence."""
        left, right = self.window
        right = 0 if self.causal else right
        offset = self.seqlen_k - self.seqlen_q
        total = 0
        for i in range(offset, offset + self.seqlen_q):
            first = max(0, i - left) if left >= 0 else 0
            last = min(self.seqlen_k - 1, i + right) if right >= 0 else self.seqlen_k - 1
            total += max(0, last - first + 1)
        return total

    @property
    def flops(self) -> float:
        forward = 2 * self.batch * self.nheads * self.visible_pairs * (self.head_dim + self.head_dim_v)
        return forward * _PASS_COST[self.pass_]

    def inputs(self, device) -> tuple[torch.Tensor, ...]:
        """q, k, v and the gradient of out: random normal, (batch, seqlen, heads, head_dim)."""
        shapes = [
            (self.batch, self.seqlen_q, self.nheads, self.head_dim),
            (self.batch, self.seqlen_k, self.nheads_k, self.head_dim),
            (self.batch, self.seqlen_k, self.nheads_k, self.head_dim_v),
            (self.batch, self.seqlen_q, self.nheads, self.head_dim_v),
        ]
        q, k, v, dout = (torch.randn(shape, device=device, dtype=DTYPES[self.dtype]) for shape in shapes)
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


@dataclass(frozen=True)
class Grid:
    cells: list[Cell]
    contenders: tuple[str, ...]
    memory: list[Cell] = ()  # cells whose peak memory is measured in processes of their own


def _square(pass_, dtype, batch, seqlen, nheads, head_dim, causal, nheads_k=None) -> Cell:
    return Cell(pass_, dtype, batch, seqlen, seqlen, nheads, nheads_k or nheads, head_dim, head_dim, causal)


def _cpu() -> Grid:
    kinds = product(DTYPES, (False, True), PASSES)
    cells = [_square(pass_, dtype, 2, 2048, 8, 64, causal) for dtype, causal, pass_ in kinds]
    kinds = product((2048, 16384), ("fwd", "fwd+bwd"))
    memory = [_square(pass_, "float32", 2, seqlen, 8, 64, True) for seqlen, pass_ in kinds]
    return Grid(cells, ("cpu", "sdpa_cpu"), memory)


def _paper() -> Grid:
    """16k tokens and 2048 hidden units in every cell, then the head counts of Llama 2 70B."""
    cells = []
    for pass_ in ("fwd", "bwd"):
        lengths = (512, 1024, 2048, 4096, 8192, 16384)
        for d, causal, seqlen in product((64, 128, 256), (False, True), lengths):
            cells.append(_square(pass_, "bfloat16", 16384 // seqlen, seqlen, 2048 // d, d, causal))
        for causal, seqlen in product((False, True), (4096, 8192)):
            cells.append(_square(pass_, "bfloat16", 16384 // seqlen, seqlen, 64, 128, causal, nheads_k=8))
    return Grid(cells, ("fa3", "fa2", "fa1", "sdpa_flash", "cudnn", "fa3_upstream"))


def _smoke() -> Grid:
    """Small: does everything run, is everything right?"""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    cells = [_square(pass_, dtype, 2, 128, 4, 64, causal) for pass_ in PASSES for causal in (False, True)]
    cells.append(_square("fwd", dtype, 1, 96, 4, 32, True, nheads_k=2))
    cells.append(replace(cells[1], window=(16, 0)))
    peers = ("sdpa_cpu", "sdpa_math", "sdpa_flash", "sdpa_efficient", "cudnn")
    return Grid(cells, ("cpu", "fa1", "fa2", "fa3", *peers))


GRIDS = {"cpu": _cpu, "paper": _paper, "smoke": _smoke}
