"""For the owner of a V100: python tools/volta_check.py, on a build for 7.0.

Built with FLASH_EXT_CUDA_ARCHS=70 and CUDA 12.9 or older. Holds out, lse and the gradients of fa1 against
float64 on this card, times them beside what PyTorch has, and prints a page to paste into a report. The exit
code is 1 when a result is wrong.
"""

import sys
from itertools import product

import torch

import flash_ext
from flash_ext import reference

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_left": 100, "window_right": 10},
    "softcap": {"softcap": 20.0},
    "dropout": {"dropout_p": 0.2},
}
HEAD_DIMS = (32, 64, 96, 128, 192, 256)


def gradients(function, q, k, v, dout, **options) -> list[torch.Tensor]:
    """out, lse, dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def error_ratios(head_dim: int, options: dict) -> list[float]:
    """Largest errors of a small ragged problem, as multiples of those that plain PyTorch makes in float16."""
    q, k, v, dout = (
        torch.randn(2, n, h, head_dim, device="cuda", dtype=torch.float16)
        for n, h in ((200, 4), (333, 2), (333, 2), (200, 4))
    )
    if "dropout_p" in options:
        options = options | {"rng_state": torch.tensor([1, 2], device="cuda")}

    def in_half(*tensors, **kwargs):
        return reference.attention(*tensors, dtype=torch.float16, **kwargs)

    got = gradients(torch.ops.flash_ext.fwd, q, k, v, dout, **options, version="fa1")
    want = gradients(reference.attention, q, k, v, dout, **options)
    base = gradients(in_half, q, k, v, dout, **options)
    return [
        float((x.double() - y).abs().max() / ((z.double() - y).abs().max() + 1e-6))
        for x, y, z in zip(got, want, base, strict=True)
    ]


def milliseconds(call, repeat: int = 20) -> float:
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeat


def sdpa(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def time_cell(head_dim: int, seqlen: int, causal: bool) -> str:
    """A line: TFLOPS forward and backward, and how many times as fast as PyTorch's best."""
    batch, heads = max(1, 8192 // seqlen), 1024 // head_dim
    shape = batch, seqlen, heads, head_dim
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape, device="cuda", dtype=torch.float16)
    flops = 4 * batch * heads * seqlen**2 * head_dim / (2 if causal else 1)
    line = f"{head_dim:4}{seqlen:7}{' causal' if causal else ' full  '}"
    ours = lambda: torch.ops.flash_ext.fwd(q, k, v, causal=causal, version="fa1")[0]  # noqa: E731
    theirs = lambda: sdpa(q, k, v, causal).transpose(1, 2)  # noqa: E731
    forward = [milliseconds(call) for call in (ours, theirs)]
    backward = []
    for call in (ours, theirs):
        out = call()
        backward.append(
            milliseconds(lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
        )
    for (mine, other), work in ((forward, flops), (backward, 2.5 * flops)):
        line += f"{work / mine / 1e9:9.1f} TFLOPS{other / mine:6.2f}x"
    return line


def main() -> int:
    print(f"flash_ext {flash_ext.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(torch.ops.flash_ext.backends())
    print("\nerrors of out, lse, dq, dk, dv as multiples of PyTorch's in float16 (at most 2):")
    wrong = False
    for head_dim, (name, options) in product(HEAD_DIMS, OPTIONS.items()):
        ratios = error_ratios(head_dim, options)
        wrong |= not max(ratios) <= 2
        print(
            f"{head_dim:4} {name:8}",
            *(f"{ratio:6.2f}" for ratio in ratios),
            "" if max(ratios) <= 2 else "WRONG",
        )
    print("\nhead_dim, length: forward and backward, times PyTorch's scaled_dot_product_attention")
    for head_dim, seqlen, causal in product((64, 128), (512, 2048, 8192), (False, True)):
        print(time_cell(head_dim, seqlen, causal), flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
