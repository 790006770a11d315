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

sys.path.insert(0, str(machine.ROOT / "tests/gpu"))
import table  # noqa: E402  (a backend's plain structs)

# Name: the kernel's number in csrc/fa2/ablation/ablation.cu, and whether the grid has a CTA for each block of
# queries or one for each head.
VARIANTS = {
    "fa2": (0, True),
    "two barriers": (1, True),
    "split keys": (2, True),
    "a CTA a head": (0, False),
}


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


def main() -> int:
    function = load()
    contenders = {name: partial(attention, function, *variant) for name, variant in VARIANTS.items()}
    paper = GRIDS["paper"]().cells
    cells = [c for c in paper if c.pass_ == "fwd" and c.head_dim < 256 and c.nheads == c.nheads_k]
    rows, is_right = [], True
    with torch.cuda.stream(torch.cuda.Stream()), machine.Clocks("cuda") as clocks:
        for cell in cells:
            cell_rows, _, cell_is_right = program.run_cell(cell, contenders, "cuda", timing.ROUNDS)
            rows, is_right = rows + cell_rows, is_right and cell_is_right
    head = machine.header("ablation", "cuda", clocks_mhz=clocks.mhz)
    print(f"\nwritten to {machine.save(machine.ROOT / 'bench/results', head, rows, [])}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
