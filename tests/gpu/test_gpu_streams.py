"""Streams, CUDA graphs, other devices, and the same bits from run to run."""

import os
import subprocess
import sys
from pathlib import Path

import bed
import pytest
import torch

import flash_ext


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_the_same_bits_from_run_to_run(kernel):
    tensors = bed.qkv(kernel, seqlen_q=700, seqlen_k=500)
    want = kernel.forward(*tensors, causal=True)
    for max_ctas in 0, 1, 2, 3, 100:
        bed.assert_same(kernel.forward(*tensors, max_ctas, causal=True), want)


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_it_runs_on_the_current_stream(kernel):
    """Inputs arrive on a side stream after 20 ms: whoever does not wait for them reads zeros."""
    tensors = bed.qkv(kernel)
    want = kernel.forward(*tensors)
    late = [torch.zeros_like(x) for x in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40_000_000)
        for x, y in zip(late, tensors, strict=True):
            x.copy_(y)
        got = kernel.forward(*late)
    stream.synchronize()
    bed.assert_same(got, want)


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_calls_wait_for_those_before(kernel):
    """A chain of calls without a pause: each one's values are what the one before it wrote."""
    q, k, v = bed.qkv(kernel, batch=1, seqlen_q=2048, seqlen_k=2048, nheads=4, nheads_k=4)

    def chain(pause) -> torch.Tensor:
        values = v
        for _ in range(6):
            values, _ = kernel.forward(q, k, values, causal=True)
            pause()
        return values

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # on the default stream no kernel starts early
        poison = torch.full((2**26,), torch.nan, device=bed.DEVICE)  # the caching allocator hands it on
        del poison
        torch.cuda._sleep(20_000_000)  # so that all calls are there before the first begins
        got = chain(lambda: None)
        torch.cuda.synchronize()
        assert torch.equal(got, chain(torch.cuda.synchronize))


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_beside_a_busy_stream(kernel):
    tensors = bed.qkv(kernel, seqlen_q=700, seqlen_k=500)
    want = kernel.forward(*tensors)
    other, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device=bed.DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(50):
            matrix @ matrix
    for got in [kernel.forward(*tensors) for _ in range(50)]:
        bed.assert_same(got, want)
    torch.cuda.synchronize()


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside a busy stream"])
@pytest.mark.parametrize("kernel", bed.WITH_BACKWARD, ids=str)
def test_deterministic_gradients(kernel, busy):
    """30 calls give the same bits, whatever their workspaces held."""
    q, k, v = bed.qkv(kernel, seqlen_q=1500, seqlen_k=1300, nheads=8, nheads_k=4)
    dout = torch.randn(*q.shape[:3], v.shape[-1], dtype=kernel.dtype, device=bed.DEVICE)
    want = bed.gradients(kernel, q, k, v, dout, causal=True)
    if busy:
        other, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device=bed.DEVICE, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(60):
                matrix @ matrix
    for _ in range(30):
        poison = torch.full((2**26,), torch.nan, device=bed.DEVICE)  # the caching allocator hands it on
        del poison
        bed.assert_same(bed.gradients(kernel, q, k, v, dout, causal=True), want, bed.GRADIENTS)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kernel", bed.WITH_BACKWARD, ids=str)
def test_graph_of_a_backward(kernel):
    q, k, v = bed.qkv(kernel)
    dout = torch.randn(*q.shape[:3], v.shape[-1], dtype=kernel.dtype, device=bed.DEVICE)
    bed.gradients(kernel, q, k, v, dout, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = bed.gradients(kernel, q, k, v, dout, causal=True)
    for _ in range(3):
        for x in (q, k, v, dout):
            x.normal_()
        graph.replay()
        bed.assert_same(captured, bed.gradients(kernel, q, k, v, dout, causal=True), bed.GRADIENTS)


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_graph(kernel):
    """A captured call reads what its inputs hold at each replay."""
    inputs, options, _, _ = kernel.fits(packed_q=True, packed_k=True, sinks=True, causal=True).tensors(
        bed.DEVICE
    )
    static = [inputs[name] for name in "qkv"]
    options["sinks"] = inputs["sinks"]
    kernel.forward(*static, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.forward(*static, **options)
    for _ in range(3):
        for x in static:
            x.normal_()
        graph.replay()
        bed.assert_same(captured, kernel.forward(*static, **options))


FIRST_CALL = """
import sys
import torch, flash_ext
dtype = getattr(torch, sys.argv[3])
q, k, v = (torch.randn(2, 300, 4, int(sys.argv[2]), device="cuda", dtype=dtype) for _ in range(3))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out, lse = torch.ops.flash_ext.fwd(q, k, v, causal=True, version=sys.argv[1])
graph.replay()
want = torch.ops.flash_ext.fwd(q, k, v, causal=True, version=sys.argv[1])
assert torch.equal(out, want[0]) and torch.equal(lse, want[1]) and torch.isfinite(out).all()
print("same")
"""


@pytest.mark.parametrize("backend", bed.BACKENDS)
def test_first_call_ever_under_capture(backend):
    package = str(Path(flash_ext.__file__).resolve().parents[1])
    command = [sys.executable, "-c", FIRST_CALL, backend, "64", str(bed.dtype_of(backend))[6:]]
    ran = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": package},
        cwd=package,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.strip() == "same", ran.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_tensors_of_another_device(kernel):
    """The tensors' device is used, and the current one is current again."""
    tensors = bed.qkv(kernel)
    want = kernel.forward(*tensors)
    elsewhere = [x.to("cuda:1") for x in tensors]
    with torch.cuda.device(0):
        got = kernel.forward(*elsewhere)
        assert torch.cuda.current_device() == 0
    bed.assert_same([x.to("cuda:0") for x in got], want)
