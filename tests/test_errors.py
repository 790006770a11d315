"""Every error's text, the same from both doors: torch.ops.flash_ext and flash_ext._C."""

import math

import numpy as np
import pytest
import torch

import flash_ext  # noqa: F401  (loads the operators)
from flash_ext import _C

OPS = torch.ops.flash_ext


def inputs(**changes):
    """A good call of fwd: batch 2, seqlen 5 and 7, heads 4 and 2, head_dim 8 and 16."""
    call = {"q": torch.randn(2, 5, 4, 8), "k": torch.randn(2, 7, 2, 8), "v": torch.randn(2, 7, 2, 16)}
    return call | changes


def packed(**changes):
    """A good packed call: sequences of 2 and 3 queries, 3 and 4 keys."""
    call = {"q": torch.randn(5, 4, 8), "k": torch.randn(7, 2, 8), "v": torch.randn(7, 2, 16)}
    call |= {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 3, 7)}
    return call | changes


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


NAN, INF = math.nan, math.inf
FORWARD = [
    (inputs(q=torch.ones(2, 5, 4, 8, dtype=torch.int64)), TypeError, "q must be float16, bfloat16, float32 or float64, got int64"),
    (inputs(k=torch.randn(2, 7, 2, 8).half()), TypeError, "k must have the dtype of q, float32, got float16"),
    (inputs(v=torch.randn(2, 7, 2, 16).double()), TypeError, "v must have the dtype of q, float32, got float64"),
    (inputs(q=torch.randn(5, 4, 8)), ValueError, "q must be 4-dimensional (batch, seqlen_q, nheads, head_dim), got shape (5, 4, 8)"),
    (inputs(k=torch.randn(7, 2, 8)), ValueError, "k must be 4-dimensional (batch, seqlen_k, nheads_k, head_dim), got shape (7, 2, 8)"),
    (inputs(v=torch.randn(7)), ValueError, "v must be 4-dimensional (batch, seqlen_k, nheads_k, head_dim_v), got shape (7,)"),
    (packed(q=torch.randn(1, 5, 4, 8)), ValueError, "q must be 3-dimensional (total_q, nheads, head_dim) when cu_seqlens_q is given, got shape (1, 5, 4, 8)"),
    (packed(k=torch.randn(1, 7, 2, 8)), ValueError, "k must be 3-dimensional (total_k, nheads_k, head_dim) when cu_seqlens_k is given, got shape (1, 7, 2, 8)"),
    (packed(v=torch.randn(1, 7, 2, 8)), ValueError, "v must be 3-dimensional (total_k, nheads_k, head_dim_v) when cu_seqlens_k is given, got shape (1, 7, 2, 8)"),
    (inputs(k=torch.randn(3, 7, 2, 8)), ValueError, "k must have shape (batch, seqlen_k, nheads_k, head_dim) = (2, 7, 2, 8), got (3, 7, 2, 8)"),
    (inputs(k=torch.randn(2, 7, 2, 9)), ValueError, "k must have shape (batch, seqlen_k, nheads_k, head_dim) = (2, 7, 2, 8), got (2, 7, 2, 9)"),
    (inputs(v=torch.randn(2, 6, 2, 16)), ValueError, "v must have shape (batch, seqlen_k, nheads_k, head_dim_v) = (2, 7, 2, 16), got (2, 6, 2, 16)"),
    (packed(k=torch.randn(7, 2, 9)), ValueError, "k must have shape (total_k, nheads_k, head_dim) = (7, 2, 8), got (7, 2, 9)"),
    (packed(v=torch.randn(6, 2, 16)), ValueError, "v must have shape (total_k, nheads_k, head_dim_v) = (7, 2, 16), got (6, 2, 16)"),
    (inputs(q=torch.randn(2, 5, 3, 8)), ValueError, "nheads of q must be a multiple of nheads_k of k and v, got 3 and 2"),
    (inputs(q=torch.randn(2, 5, 4, 264), k=torch.randn(2, 7, 2, 264)), ValueError, "head_dim must be 1 to 256, got 264"),
    (inputs(v=torch.randn(2, 7, 2, 0)), ValueError, "head_dim_v must be 1 to 256, got 0"),
    (packed(cu_seqlens_q=ints(0, 2, 5, dtype=torch.int64)), TypeError, "cu_seqlens_q must be int32, got int64"),
    (packed(cu_seqlens_k=ints(0, 7)), ValueError, "cu_seqlens_k must have shape (batch + 1,) = (3,), got (2,)"),
    (packed(cu_seqlens_q=ints(0, 2, 5).reshape(1, 3)), ValueError, "cu_seqlens_q must have shape (batch + 1,), got (1, 3)"),
    (packed(cu_seqlens_q=ints(0, 9, 2, 9, 5)[::2]), ValueError, "cu_seqlens_q must be contiguous, got strides (2,)"),
    (packed(cu_seqlens_q=ints(0, 4, 3)), ValueError, "cu_seqlens_q must start at 0 or above and never decrease, got 3 after 4 at index 2"),
    (packed(cu_seqlens_k=ints(-1, 3, 7)), ValueError, "cu_seqlens_k must start at 0 or above and never decrease, got -1 after 0 at index 0"),
    (packed(cu_seqlens_k=ints(0, 3, 8)), ValueError, "cu_seqlens_k must end at or below the number of rows, 7, got 8"),
    (packed(seqused_q=ints(2, 3, dtype=torch.int64)), TypeError, "seqused_q must be int32, got int64"),
    (packed(seqused_k=ints(3, 5)), ValueError, "seqused_k must be between 0 and the length of its sequence, 4, got 5 at index 1"),
    (inputs(seqused_k=ints(-1, 5)), ValueError, "seqused_k must be between 0 and the length of its sequence, 7, got -1 at index 0"),
    (inputs(seqused_q=ints(1, 2, 3)), ValueError, "seqused_q must have shape (batch,) = (2,), got (3,)"),
    (packed(max_seqlen_q=-1), ValueError, "max_seqlen_q must be >= 0, got -1"),
    (inputs(window_left=-2), ValueError, "window_left must be >= 0, or -1 for unlimited, got -2"),
    (inputs(window_right=-3), ValueError, "window_right must be >= 0, or -1 for unlimited, got -3"),
    (inputs(softmax_scale=0.0), ValueError, "softmax_scale must be finite and > 0, got 0"),
    (inputs(softmax_scale=-0.5), ValueError, "softmax_scale must be finite and > 0, got -0.5"),
    (inputs(softmax_scale=NAN), ValueError, "softmax_scale must be finite and > 0, got nan"),
    (inputs(softmax_scale=INF), ValueError, "softmax_scale must be finite and > 0, got inf"),
    (inputs(softcap=-1.0), ValueError, "softcap must be finite and >= 0 (0: off), got -1"),
    (inputs(softcap=INF), ValueError, "softcap must be finite and >= 0 (0: off), got inf"),
    (inputs(alibi_slopes=torch.randn(4).double()), TypeError, "alibi_slopes must be float32, got float64"),
    (inputs(alibi_slopes=torch.randn(3)), ValueError, "alibi_slopes must have shape (nheads,) = (4,), got (3,)"),
    (inputs(alibi_slopes=torch.randn(1, 4)), ValueError, "alibi_slopes must have shape (batch, nheads) = (2, 4), got (1, 4)"),
    (inputs(sinks=torch.randn(4).bfloat16()), TypeError, "sinks must be float32, got bfloat16"),
    (inputs(sinks=torch.randn(2)), ValueError, "sinks must have shape (nheads,) = (4,), got (2,)"),
    (inputs(dropout_p=1.0), ValueError, "dropout_p must be in [0, 1), got 1"),
    (inputs(dropout_p=-0.1), ValueError, "dropout_p must be in [0, 1), got -0.1"),
    (inputs(dropout_p=NAN), ValueError, "dropout_p must be in [0, 1), got nan"),
    (inputs(dropout_p=0.1), ValueError, "rng_state must be given when dropout_p > 0: an int64 tensor of shape (2,) with seed and offset, got None"),
    (inputs(dropout_p=0.1, rng_state=ints(1, 2)), TypeError, "rng_state must be int64, got int32"),
    (inputs(dropout_p=0.1, rng_state=ints(1, dtype=torch.int64)), ValueError, "rng_state must have shape (2,) = (2,), got (1,)"),
    (inputs(version="fa9"), ValueError, "version must be one of fa3, fa2, fa1, cpu, got fa9"),
]  # fmt: skip


def backward_call(**changes):
    call = inputs()
    out, lse = OPS.fwd(**call)
    return {"dout": torch.randn_like(out), "d_lse": None} | call | {"out": out, "lse": lse} | changes


def backward_cases():
    return [
        (backward_call(dout=torch.randn(2, 5, 4, 8)), ValueError, "dout must have shape (batch, seqlen_q, nheads, head_dim_v) = (2, 5, 4, 16), got (2, 5, 4, 8)"),
        (backward_call(dout=torch.randn(2, 5, 4, 16).half()), TypeError, "dout must have the dtype of q, float32, got float16"),
        (backward_call(out=torch.randn(2, 5, 2, 16)), ValueError, "out must have shape (batch, seqlen_q, nheads, head_dim_v) = (2, 5, 4, 16), got (2, 5, 2, 16)"),
        (backward_call(lse=torch.randn(2, 5, 4)), ValueError, "lse must have shape (batch, nheads, seqlen_q) = (2, 4, 5), got (2, 5, 4)"),
        (backward_call(lse=torch.randn(2, 4, 5).half()), TypeError, "lse must be float32, got float16"),
        (backward_call(d_lse=torch.randn(8, 5)), ValueError, "d_lse must have shape (batch, nheads, seqlen_q) = (2, 4, 5), got (8, 5)"),
        (backward_call(k=torch.randn(2, 7, 3, 8)), ValueError, "v must have shape (batch, seqlen_k, nheads_k, head_dim_v) = (2, 7, 3, 16), got (2, 7, 2, 16)"),
    ]  # fmt: skip


@pytest.mark.parametrize("call, kind, text", FORWARD, ids=[c[2][:70] for c in FORWARD])
def test_forward_says_what_is_wrong(call, kind, text):
    with pytest.raises(RuntimeError) as raised:
        OPS.fwd(**call)
    assert str(raised.value) == "flash_ext: " + text
    with pytest.raises(kind) as raised:
        _C.fwd(**call)
    assert str(raised.value) == "flash_ext: " + text


# Fake tensors have no values and belong to no machine; every other rule holds for them too.
OF_VALUES = ("never decrease", "number of rows", "length of its sequence", "version")
FAKE = [case for case in FORWARD if not any(rule in case[2] for rule in OF_VALUES)]


@pytest.mark.parametrize("call, kind, text", FAKE, ids=[c[2][:70] for c in FAKE])
def test_fake_tensors_obey_the_same_rules(call, kind, text):
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in call.items()}
        with pytest.raises(RuntimeError) as raised:
            OPS.fwd(**fakes)
    assert str(raised.value) == "flash_ext: " + text


@pytest.mark.parametrize("case", range(len(backward_cases())))
def test_backward_says_what_is_wrong(case):
    call, kind, text = backward_cases()[case]
    with pytest.raises(RuntimeError) as raised:
        OPS.bwd(**call)
    assert str(raised.value) == "flash_ext: " + text
    with pytest.raises(kind) as raised:
        _C.bwd(**call)
    assert str(raised.value) == "flash_ext: " + text


def test_gradients_given_by_the_caller_are_checked():
    call = backward_call()
    good = {"d" + n: torch.empty_like(call[n]) for n in "qkv"}
    OPS.bwd_out(**call, **good)
    bad = [
        ({"dq": torch.empty(2, 5, 4, 9)}, "dq must have shape of its input = (2, 5, 4, 8), got (2, 5, 4, 9)"),
        ({"dk": torch.empty(2, 7, 2, 8).half()}, "dk must have the dtype of its input, float32, got float16"),
        (
            {"dv": torch.empty(1, 7, 2, 16).expand(2, 7, 2, 16)},
            "dv must not overlap itself, got strides (0, 32, 16, 1)",
        ),
        (
            {"dv": torch.empty(2, 7, 16, 2).mT},
            "dv must have a contiguous last dimension (stride 1), got strides (224, 32, 1, 2)",
        ),
    ]
    for change, text in bad:
        with pytest.raises(RuntimeError) as raised:
            OPS.bwd_out(**call, **(good | change))
        assert str(raised.value) == "flash_ext: " + text
        with pytest.raises((TypeError, ValueError)) as raised:
            _C.bwd(**call, **change)
        assert str(raised.value) == "flash_ext: " + text


def test_tensors_on_another_device():
    for name in ("k", "v"):
        call = inputs()
        with pytest.raises(
            RuntimeError, match=f"^flash_ext: {name} must be on the device of q, cpu, got meta$"
        ):
            OPS.fwd(**(call | {name: call[name].to("meta")}))
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        call = packed()
        with pytest.raises(
            RuntimeError, match=f"^flash_ext: {name} must be on the device of q, cpu, got meta$"
        ):
            OPS.fwd(**(call | {name: call[name].to("meta")}))


def test_a_version_that_cannot_run_says_why():
    with pytest.raises(RuntimeError, match=r"^flash_ext: version=fa3 cannot run this problem: fa3: \w+"):
        OPS.fwd(**inputs(version="fa3"))
    with pytest.raises(
        NotImplementedError, match=r"^flash_ext: version=fa3 cannot run this problem: fa3: \w+"
    ):
        _C.fwd(**inputs(version="fa3"))


def test_device_names():
    with pytest.raises(
        RuntimeError, match="^flash_ext: device must be one of cpu, cuda, cuda:N, sm_70, .*, got tpu$"
    ):
        OPS.plan(**inputs(), device="tpu")
    with pytest.raises(
        RuntimeError, match="^flash_ext: no backend can run this problem: fa3: .*; fa2: .*; fa1: .*; cpu: "
    ):
        OPS.plan(**{n: t.bfloat16() for n, t in inputs().items()}, device="sm_70")


def test_last_dimension_is_copied_by_torch_and_refused_by_dlpack():
    call = inputs(q=torch.randn(2, 5, 8, 4).mT)
    out, _ = OPS.fwd(**call)
    same, _ = OPS.fwd(**(call | {"q": call["q"].contiguous()}))
    assert torch.equal(out, same)
    with pytest.raises(ValueError) as raised:
        _C.fwd(**call)
    assert str(raised.value) == (
        "flash_ext: q must have a contiguous last dimension (stride 1), got strides (160, 32, 1, 4)"
    )


def test_dlpack_door_refuses_what_is_no_array():
    call = inputs()
    cases = [
        (call | {"q": [1.0]}, TypeError, "q must be an array with __dlpack__ (NumPy, CuPy, JAX, torch), got list"),
        (call | {"k": None}, TypeError, "k must be an array, got None"),
        (call | {"scale": 1.0}, TypeError, "fwd has no argument scale"),
        (call | {"softmax_scale": "big"}, TypeError, "softmax_scale must be a float, got str"),
        (call | {"max_seqlen_q": 1.5}, TypeError, "max_seqlen_q must be an int, got float"),
        (call | {"out": np.empty((2, 5, 4, 8), np.float32)}, ValueError, "out must have shape (batch, seqlen_q, nheads, head_dim_v) = (2, 5, 4, 16), got (2, 5, 4, 8)"),
        (call | {"out": np.empty((2, 5, 16, 4), np.float32).swapaxes(2, 3)}, ValueError, "out must be contiguous, got strides (320, 64, 1, 4)"),
        (call | {"lse": np.empty((2, 4, 5), np.float64)}, TypeError, "lse must be float32, got float64"),
    ]  # fmt: skip
    for bad, kind, text in cases:
        with pytest.raises(kind) as raised:
            _C.fwd(**bad)
        assert str(raised.value) == "flash_ext: " + text
    read_only = np.empty((2, 5, 4, 16), np.float32)
    read_only.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        _C.fwd(**call, out=read_only)
    capsule = call["q"].__dlpack__()
    _C.fwd(**(call | {"q": capsule}))
    with pytest.raises(
        TypeError, match="^flash_ext: q must give an unused DLPack capsule, got one that was consumed$"
    ):
        _C.fwd(**(call | {"q": capsule}))
