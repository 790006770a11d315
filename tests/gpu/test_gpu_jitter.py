"""The race test: kernels whose waits and barriers come pseudo-random times late give the same bits.

It needs a second build of the backends (make jitter), in build/jitter or where FLASH_EXT_JITTER_PACKAGE says:
of bfloat16 where a backend has it, for the other type's kernels are the same but for the rounding.
"""

import os
from pathlib import Path

import bed
import pytest
import table
import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(os.environ.get("FLASH_EXT_JITTER_PACKAGE", ROOT / "build/jitter/flash_ext"))
RUNS = 200


def is_built(kernel: bed.Kernel) -> bool:
    has_type = kernel.dtype == torch.bfloat16 or not bed.can(kernel.backend, dtype=torch.bfloat16)
    return has_type and (PACKAGE / f"lib/{kernel.backend}.so").exists()


@pytest.mark.parametrize("max_ctas", [0, 3])
@pytest.mark.parametrize("kernel", [*filter(is_built, bed.WITH_BACKWARD)], ids=str)
def test_late_waits_change_no_gradient(kernel, max_ctas):
    q, k, v = bed.qkv(kernel, batch=1, seqlen_q=333, seqlen_k=700)  # no query sees the first 307 keys
    dout = torch.randn(*q.shape[:3], v.shape[-1], dtype=kernel.dtype, device=bed.DEVICE)
    backend, options = (
        table.load(kernel.backend, PACKAGE),
        kernel.options({"causal": True, "window_left": 60}, q),
    )
    out, lse = kernel.forward(q, k, v, **options)
    want = bed.gradients(kernel, q, k, v, dout, **options)
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    tensors |= {n: x for n, x in options.items() if isinstance(x, torch.Tensor)}
    got = {name: torch.full_like(x, torch.nan) for name, x in zip(bed.GRADIENTS, want, strict=True)}
    problem = table.describe(tensors, options, max_ctas)
    table.describe_backward(problem, tensors | got, deterministic=True)
    workspace = torch.empty(table.planned_bytes(backend, problem), dtype=torch.uint8, device=bed.DEVICE)
    for _ in range(RUNS):
        table.backward(backend, problem, tensors | got | {"workspace": workspace})
        bed.assert_same(tuple(got.values()), want, bed.GRADIENTS)


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside a busy stream"])
@pytest.mark.parametrize("max_ctas", [0, 3])
@pytest.mark.parametrize("kernel", [*filter(is_built, bed.KERNELS)], ids=str)
def test_late_waits_change_nothing(kernel, max_ctas, busy):
    q, k, v = bed.qkv(kernel, batch=1, seqlen_q=333, seqlen_k=515)
    out, lse = kernel.forward(q, k, v, causal=True)
    backend, options = table.load(kernel.backend, PACKAGE), kernel.options({"causal": True}, q)
    outs, lses = (torch.full((RUNS, *x.shape), torch.nan, dtype=x.dtype, device=x.device) for x in (out, lse))
    tensors = {"q": q, "k": k, "v": v} | {n: x for n, x in options.items() if isinstance(x, torch.Tensor)}
    problem = table.describe(tensors, options, max_ctas, kernel.tile)
    workspace = torch.empty(table.planned_bytes(backend, problem), dtype=torch.uint8, device=bed.DEVICE)
    torch.cuda.synchronize()
    if busy:
        matrix = torch.randn(4096, 4096, device=bed.DEVICE, dtype=torch.bfloat16)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(60):
                matrix @ matrix
    for i in range(RUNS):
        table.forward(backend, problem, tensors | {"out": outs[i], "lse": lses[i], "workspace": workspace})
    bed.assert_same((outs, lses), (out.expand_as(outs), lse.expand_as(lses)))
    torch.cuda.synchronize()
