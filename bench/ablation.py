"""python -m bench.ablation: fa2's forward against itself with one of FlashAttention-2's choices undone.

`make ablation` builds the kernels. The result is a bench result: bench.table and bench.plot take it.
"""

import ctypes
import sys
from functools import partial
from pathlib import Path

import torch

import bench.__main__ as program
from bench import machine, timing
from bench.cells import GRIDS
from bench.contenders import make_call

sys.path.insert(0, str(machine.ROOT / "tests/gpu"))
import table  # noqa: E402  (a backend's plain structs)

# Name: the kernel's number in csrc/fa2/ablation/ablation.cu, and whether the grid has a CTA for each block of
# queries or one for each head.
VARIANTS = {
    "fa2": (0, True),
    "two barriers": (1, True),
    "split keys": (2, True),
    "a CTA a head": (0, False),
    "FA1's partition": (2, False),  # both of FlashAttention-1's choices
}
# The slowest variants take thirty times as long as the others.
ROUNDS, CALLS = 3, 2


def load(path: Path = machine.ROOT / "build/ablation/fa2_ablation.so"):
    function = ctypes.CDLL(str(path)).flash_ext_ablation
    pointers = ctypes.POINTER(table.Problem), ctypes.POINTER(table.FwdTensors)
    function.argtypes = [ctypes.c_int, *pointers, ctypes.c_void_p]
    return function


def attention(function, number: int, by_blocks: bool, cell, q, k, v) -> torch.Tensor:
    out, lse = torch.empty_like(q), q.new_empty(cell.batch, cell.nheads, cell.seqlen_q, dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    max_ctas = 0 if by_blocks else cell.batch * cell.nheads
    problem = table.describe(tensors, {"causal": cell.causal}, max_ctas)
    problem.out = table.strides(out)
    pointers = table.FwdTensors(**{name: x.data_ptr() for name, x in tensors.items()})
    error = function(number, problem, pointers, torch.cuda.current_stream().cuda_stream)
    if error:
        raise RuntimeError(f"CUDA error {error}")
    return out


def measure(function, cell) -> list[dict]:
    """A row for each variant. They are held against the first, which the tests hold against float64."""
    torch.manual_seed(0)
    inputs = cell.inputs("cuda")
    contenders = {name: partial(attention, function, *variant) for name, variant in VARIANTS.items()}
    calls = {name: make_call(contender, cell, *inputs) for name, contender in contenders.items()}
    first = calls["fa2"]()[0].float()
    errors = {name: float((call()[0] - first).abs().max()) for name, call in calls.items()}
    assert max(errors.values()) <= 0.01 * float(first.abs().max()), errors
    seconds = timing.measure(calls, "cuda", ROUNDS, CALLS)
    return [program.make_row(cell, name, seconds, errors[name], 0.0, None) for name in calls]


def main() -> None:
    function = load()
    paper = GRIDS["paper"]().cells
    cells = [c for c in paper if c.pass_ == "fwd" and c.head_dim < 256 and c.nheads == c.nheads_k]
    rows = []
    with torch.cuda.stream(torch.cuda.Stream()), machine.Clocks("cuda") as clocks:
        for cell in cells:
            print(f"\n{cell.name}")
            rows += measure(function, cell)
            for row in rows[-len(VARIANTS) :]:
                program.print_row(row)
    head = machine.header("ablation", "cuda", clocks_mhz=clocks.mhz)
    print(f"\nwritten to {machine.save(machine.ROOT / 'bench/results', head, rows, [])}")


if __name__ == "__main__":
    main()
