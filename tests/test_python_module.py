"""flash_ext._C: the door without torch."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import flash_ext
from flash_ext import _C

# Runs in a process of its own that must never import torch: the reference is NumPy's float64.
WITHOUT_TORCH = """
import importlib.machinery, importlib.util, sys
import numpy as np

spec = importlib.util.spec_from_file_location("flash_ext._C", sys.argv[1])
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)

rng = np.random.default_rng(int(sys.argv[2]))
batch, seqlen_q, seqlen_k, heads, dim = 2, 70, 90, 3, 40
q, k, v, dout = (rng.standard_normal((batch, n, heads, dim)) for n in (seqlen_q, seqlen_k, seqlen_k, seqlen_q))

def reference(q, k, v, dout):
    scale = dim**-0.5
    s = np.einsum("bihd,bjhd->bhij", q, k) * scale
    i, j = np.indices((seqlen_q, seqlen_k))
    s = np.where(j <= i + seqlen_k - seqlen_q, s, -np.inf)
    lse = np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1)) + s.max(-1)
    p = np.exp(s - lse[..., None])
    out = np.einsum("bhij,bjhd->bihd", p, v)
    dp = np.einsum("bihd,bjhd->bhij", dout, v)
    ds = p * (dp - np.einsum("bihd,bihd->bhi", dout, out)[..., None])
    dq = np.einsum("bhij,bjhd->bihd", ds, k) * scale
    dk = np.einsum("bhij,bihd->bjhd", ds, q) * scale
    dv = np.einsum("bhij,bihd->bjhd", p, dout)
    return out, lse, dq, dk, dv

want = reference(q, k, v, dout)
for dtype, bound in ((np.float64, 1e-12), (np.float32, 2e-5), (np.float16, 2e-2)):
    low = [x.astype(dtype) for x in (q, k, v, dout)]
    exact = want if dtype is np.float64 else reference(*(x.astype(np.float64) for x in low))
    out, lse = _C.fwd(*low[:3], causal=True)
    gradients = _C.bwd(low[3], None, *low[:3], out, lse, causal=True)[:3]
    for name, got, ref in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), exact):
        array = np.from_dlpack(got)
        assert array.flags.writeable, name
        error = np.abs(np.asarray(array, np.float64) - ref).max()
        assert error < bound, (dtype, name, error)
assert "torch" not in sys.modules
print("agrees without torch")
"""


def test_agrees_with_the_reference_in_a_process_without_torch():
    seed = str(np.random.SeedSequence().entropy % 2**31)
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_TORCH), _C.__file__, seed],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, f"seed {seed}\n{run.stderr}"
    assert run.stdout.strip() == "agrees without torch"


def arrays(dtype=np.float32):
    rng = np.random.default_rng()
    return [rng.standard_normal((2, n, 4, 16)).astype(dtype) for n in (9, 11, 11)]


def test_both_doors_give_the_same_bits():
    q, k, v = arrays()
    out, lse = _C.fwd(q, k, v, causal=True, softcap=3.0)
    want_out, want_lse = torch.ops.flash_ext.fwd(*map(torch.from_numpy, (q, k, v)), causal=True, softcap=3.0)
    assert np.array_equal(np.asarray(out), want_out.numpy())
    assert np.array_equal(np.asarray(lse), want_lse.numpy())


def test_reads_read_only_sliced_and_torch_arrays():
    q, k, v = arrays()
    want = np.asarray(_C.fwd(q, k, v)[0])
    q.flags.writeable = False
    wide = np.empty((2, 11, 4, 32), np.float32)
    wide[..., :16] = k
    got = _C.fwd(q, wide[..., :16], torch.from_numpy(v))[0]
    assert np.array_equal(np.asarray(got), want)


def test_writes_into_the_callers_arrays():
    q, k, v = arrays()
    out, lse = np.full((2, 9, 4, 16), np.nan, np.float32), torch.full((2, 4, 9), float("nan"))
    returned = _C.fwd(q, k, v, out=out, lse=lse)
    assert returned[0] is out and returned[1] is lse
    want_out, want_lse = _C.fwd(q, k, v)
    assert np.array_equal(out, np.asarray(want_out)) and np.array_equal(lse.numpy(), np.asarray(want_lse))
    dq = np.full_like(q, np.nan)
    gradients = _C.bwd(out, None, q, k, v, out, lse, dq=dq)
    assert gradients[0] is dq and np.isfinite(dq).all()


def test_bfloat16_travels_through_dlpack_and_has_no_buffer():
    q, k, v = (torch.from_numpy(a).bfloat16() for a in arrays())
    out, _ = _C.fwd(q, k, v)
    assert out.dtype == "bfloat16" and out.shape == (2, 9, 4, 16)
    assert torch.equal(torch.from_dlpack(out), torch.ops.flash_ext.fwd(q, k, v)[0])
    with pytest.raises((BufferError, ValueError)):
        memoryview(out)


def test_memory_outlives_the_array_object():
    q, k, v = arrays()
    out, _ = _C.fwd(q, k, v)
    kept = np.from_dlpack(out)
    want = kept.copy()
    del out
    _C.fwd(*arrays())
    assert np.array_equal(kept, want)


def test_options_reach_the_kernel():
    q, k, v = arrays(np.float64)
    cu_q, cu_k = np.array([0, 4, 9], np.int32), np.array([0, 5, 11], np.int32)
    sinks = np.random.default_rng().standard_normal(4)
    out, lse = _C.fwd(
        q[0], k[0], v[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, window_left=3, window_right=1, sinks=sinks
    )
    want = torch.ops.flash_ext.fwd(
        *(torch.from_numpy(a[0]) for a in (q, k, v)), torch.from_numpy(cu_q), torch.from_numpy(cu_k),
        window_left=3, window_right=1, sinks=torch.from_numpy(sinks),
    )  # fmt: skip
    assert np.array_equal(np.asarray(out), want[0].numpy()) and np.array_equal(
        np.asarray(lse), want[1].numpy()
    )


def test_says_what_it_would_do():
    q, k, v = arrays()
    plan = _C.plan(q, k, v, causal=True)
    assert plan["backend"] == "cpu" and set(plan["passed_over"]) == {"fa1", "fa2", "fa3"}
    assert plan["workspace_bytes"] >= 0 and plan["grid"] > 0
    assert _C.why_not("cpu", q, k, v) is None
    assert _C.why_not("fa3", q, k, v)
    assert (
        "cpu"
        in _C.why_not(
            "cpu", q.astype(np.float16), k.astype(np.float16), v.astype(np.float16), device="sm_90"
        ).lower()
    )
    assert {b["name"] for b in _C.backends()["backends"]} == {"cpu", "fa1", "fa2", "fa3"}
    assert _C.build_info()["version"] == flash_ext.__version__
