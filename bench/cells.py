"""What is measured: a cell is one attention problem and one pass, a grid is cells and who runs in them."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import accumulate, product

import torch

PASSES = ("fwd", "bwd", "fwd+bwd")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PASS_COST = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}  # a backward has five matrix products, a forward two


@dataclass(frozen=True)
class Cell:
    """One row of a table. window is (left, right), -1 unlimited; causal is bottom-right aligned.

    storage: "padded"; "qkv" (q, k and v are views of one tensor); "packed" (without a batch dimension,
    cu_seqlens tells sequences apart); "ragged" (packed, lengths spread evenly from 1 to 2 seqlen_q - 1).
    """

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
    storage: str = "padded"
    sinks: bool = False
    softcap: float = 0.0
    alibi: bool = False
    dropout_p: float = 0.0
    deterministic: bool = False  # the backward's sums

    @property
    def name(self) -> str:
        heads = f"h{self.nheads}" if self.nheads == self.nheads_k else f"h{self.nheads}/{self.nheads_k}"
        value_dim = "" if self.head_dim_v == self.head_dim else f",{self.head_dim_v}"
        mask = "causal" if self.causal else "full"
        window = "" if self.window == (-1, -1) else f" window {self.window[0]},{self.window[1]}"
        sizes = f"b{self.batch} s{self.seqlen_q} {heads}"
        return f"{self.pass_} {self.dtype} d{self.head_dim}{value_dim} {mask}{window} {sizes}{self.options}"

    @property
    def options(self) -> str:
        """What it has beside its shape and mask, in words."""
        words = [self.storage] * (self.storage != "padded") + ["sinks"] * self.sinks + ["ALiBi"] * self.alibi
        words += [f"softcap {self.softcap:g}"] * (self.softcap > 0)
        words += [f"dropout {self.dropout_p:g}"] * (self.dropout_p > 0)
        words += ["deterministic"] * self.deterministic
        return "".join(f" {word}" for word in words)

    @property
    def is_packed(self) -> bool:
        return self.storage in ("packed", "ragged")

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Queries and keys of each sequence."""
        if self.storage != "ragged":
            return [(self.seqlen_q, self.seqlen_k)] * self.batch
        lengths = [1 + 37 * i % (2 * self.seqlen_q - 1) for i in range(self.batch)]
        return [(length, length) for length in lengths]

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that the mask lets through, in one head of all sequences."""
        return sum(count * self._visible_pairs(*length) for length, count in Counter(self.lengths).items())

    def _visible_pairs(self, seqlen_q, seqlen_k) -> int:
        left, right = self.window
        right = 0 if self.causal else right
        total = 0
        for i in range(seqlen_k - seqlen_q, seqlen_k):
            first = max(0, i - left) if left >= 0 else 0
            last = min(seqlen_k - 1, i + right) if right >= 0 else seqlen_k - 1
            total += max(0, last - first + 1)
        return total

    @property
    def flops(self) -> float:
        return (
            2 * self.nheads * self.visible_pairs * (self.head_dim + self.head_dim_v) * _PASS_COST[self.pass_]
        )

    def inputs(self, device) -> tuple[torch.Tensor, ...]:
        """q, k, v and the gradient of out: random normal, (batch, seqlen, heads, head_dim) unless packed."""
        rows_q, rows_k = (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)
        if self.is_packed:
            rows_q, rows_k = ((sum(lengths),) for lengths in zip(*self.lengths, strict=True))
        shapes = [
            (*rows_q, self.nheads, self.head_dim),
            (*rows_k, self.nheads_k, self.head_dim),
            (*rows_k, self.nheads_k, self.head_dim_v),
            (*rows_q, self.nheads, self.head_dim_v),
        ]
        q, k, v, dout = (torch.randn(shape, device=device, dtype=DTYPES[self.dtype]) for shape in shapes)
        if self.storage == "qkv":
            q, k, v = torch.stack((q, k, v), 2).unbind(2)
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout

    def option_tensors(self, device) -> dict[str, torch.Tensor]:
        """The tensors of its options by the names of flash_ext's arguments."""
        tensors = {}
        if self.sinks:
            tensors["sinks"] = torch.linspace(-2, 2, self.nheads, device=device)
        if self.alibi:
            tensors["alibi_slopes"] = torch.logspace(-1, -8, self.nheads, base=2, device=device)
        if self.is_packed:
            for name, lengths in zip("qk", zip(*self.lengths, strict=True), strict=True):
                starts = list(accumulate(lengths, initial=0))
                tensors[f"cu_seqlens_{name}"] = torch.tensor(starts, dtype=torch.int32, device=device)
        return tensors


@dataclass(frozen=True)
class Grid:
    cells: list[Cell]
    contenders: tuple[str, ...]
    memory: list[Cell] = ()  # cells whose peak memory is measured in processes of their own
    # For a cell with an option: the plain cell that is run in the same rounds, and the least share of its
    # TFLOPS that is asked for, if any.
    beside: dict[Cell, tuple[Cell, float | None]] = field(default_factory=dict)


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


def _few() -> Grid:
    """Backwards of one sequence with few heads of k: as many blocks of keys as SMs, or fewer."""
    shapes = [(2048, 32, 1, 128), (2048, 32, 8, 128), (4096, 16, 2, 128), (8192, 8, 1, 128)]
    shapes += [(1024, 8, 8, 128), (2048, 32, 8, 64), (2048, 8, 1, 256), (1024, 8, 8, 256)]
    cells = [
        _square("bwd", "bfloat16", 1, seqlen, nheads, head_dim, causal, nheads_k)
        for (seqlen, nheads, nheads_k, head_dim), causal in product(shapes, (False, True))
    ]
    return Grid(cells, ("fa3", "fa2", "sdpa_flash", "cudnn", "fa3_upstream"))


def _generations() -> Grid:
    """All generations on one card, in float16, which each of them has; 16k tokens and 2048 hidden units."""
    kinds = product(("fwd", "bwd"), (64, 128), (False, True), (1024, 2048, 4096, 8192))
    cells = [_square(pass_, "float16", 16384 // n, n, 2048 // d, d, causal) for pass_, d, causal, n in kinds]
    return Grid(cells, ("fa3", "fa2", "fa1", "sdpa_flash", "sdpa_efficient"))


def _options() -> Grid:
    """What each option costs, as a share of the TFLOPS of the plain problem; and shapes that paper lacks."""
    beside, others = {}, []
    for pass_ in ("fwd", "bwd"):

        def square(seqlen, head_dim, causal, nheads=None, nheads_k=None, pass_=pass_, **options):
            nheads = nheads or 2048 // head_dim
            cell = _square(pass_, "bfloat16", 16384 // seqlen, seqlen, nheads, head_dim, causal, nheads_k)
            return replace(cell, **options)

        for causal in (False, True):
            plain = square(2048, 128, causal)
            beside[replace(plain, storage="packed")] = plain, 0.97
            for seqlen in (2047, 2049):
                beside[replace(plain, seqlen_q=seqlen, seqlen_k=seqlen)] = plain, 0.93
            plain = square(8192, 128, causal)
            beside[replace(plain, seqlen_q=8191, seqlen_k=8191)] = plain, 0.93
            beside[replace(plain, dtype="float16")] = plain, 0.98
            beside[square(4096, 80, causal, nheads=16)] = square(4096, 96, causal, nheads=16), 0.80
        plain = square(2048, 128, True)
        beside[replace(plain, storage="qkv")] = plain, 0.99
        beside[replace(plain, sinks=True)] = plain, 0.99
        for option in ({"softcap": 30.0}, {"alibi": True}, {"dropout_p": 0.1}):
            beside[replace(plain, **option)] = plain, None
        for head_dim in (64, 128, 256):
            plain = square(8192, head_dim, True)
            beside[replace(plain, window=(1024, 0))] = plain, 0.75
        plain = square(8192, 64, True, nheads=64, nheads_k=8)
        beside[replace(plain, window=(1024, 0), sinks=True)] = plain, None  # GPT-OSS
        for causal in (False, True):
            others += [square(4096, head_dim, causal, nheads=16) for head_dim in (96, 192)]
            others.append(square(4096, 192, causal, nheads=16, head_dim_v=128))
        others.append(replace(square(34, 128, True), batch=8192, storage="ragged"))
    for head_dim, causal in product((64, 128, 256), (False, True)):
        others += [square(seqlen, head_dim, causal, pass_="fwd+bwd") for seqlen in (2048, 8192)]
        for seqlen in (4096, 8192, 16384):
            plain = square(seqlen, head_dim, causal, pass_="bwd")
            beside[replace(plain, deterministic=True)] = plain, 0.877 if causal else 0.926
    return Grid([*beside, *others], ("fa3", "sdpa_flash", "cudnn"), beside=beside)


def _smoke() -> Grid:
    """Small: does everything run, is everything right?"""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    cells = [_square(pass_, dtype, 2, 128, 4, 64, causal) for pass_ in PASSES for causal in (False, True)]
    cells.append(_square("fwd", dtype, 1, 96, 4, 32, True, nheads_k=2))
    cells.append(replace(cells[1], window=(16, 0)))
    plain = replace(cells[1], seqlen_q=48, seqlen_k=48)
    changes = [{"storage": "qkv"}, {"storage": "packed"}, {"storage": "ragged"}]
    changes += [{"sinks": True}, {"softcap": 5.0}, {"alibi": True}, {"dropout_p": 0.1}, {"head_dim_v": 32}]
    beside = {replace(plain, **change): (plain, None) for change in changes}
    backward = replace(plain, pass_="bwd")
    beside[replace(backward, deterministic=True)] = backward, None
    peers = ("sdpa_cpu", "sdpa_math", "sdpa_flash", "sdpa_efficient", "cudnn")
    return Grid([*cells, *beside], ("cpu", "fa1", "fa2", "fa3", *peers), beside=beside)


GRIDS = {
    "cpu": _cpu,
    "few": _few,
    "generations": _generations,
    "options": _options,
    "paper": _paper,
    "smoke": _smoke,
}
