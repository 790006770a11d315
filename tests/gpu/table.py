"""A backend's C table (csrc/core/backend.h) by ctypes: outputs and workspace come from the caller.

This is how tests put them between guard bands, and how they load a library that is not the package's.
"""

from __future__ import annotations

import ctypes as c
from pathlib import Path

import torch
from torch import Tensor

import flash_ext


def struct(name: str, /, **fields) -> type[c.Structure]:
    return type(name, (c.Structure,), {"_fields_": list(fields.items())})


def of(kind, names: str) -> dict:
    return dict.fromkeys(names.split(), kind)


Status = struct("Status", code=c.c_int32, text=c.c_char * 504)
Device = struct("Device", **of(c.c_int32, "type ordinal cc sm_count smem_optin l2_bytes"))
Strides = struct("Strides", **of(c.c_int64, "batch row head"))
Problem = struct(
    "Problem",
    **of(c.c_int32, "kind dtype batch nheads nheads_k head_dim head_dim_v packed_q packed_k"),
    **of(c.c_int64, "seqlen_q seqlen_k total_q total_k"),
    **of(c.c_int32, "has_seqused_q has_seqused_k has_sinks has_alibi has_d_lse top_left"),
    **of(c.c_int64, "window_left window_right"),
    **of(c.c_double, "softmax_scale softcap"),
    **of(c.c_int32, "dropout_threshold deterministic"),
    **of(Strides, "q k v out dout dq dk dv"),
    device=Device,
    **of(c.c_int32, "max_ctas tile"),
)
Plan = struct(
    "Plan",
    workspace_bytes=c.c_uint64,
    **of(c.c_int32, "tile_m tile_n"),
    grid=c.c_int64,
    **of(c.c_int32, "smem stages launches"),
    why=c.c_char * 256,
)
LENGTHS = "cu_seqlens_q cu_seqlens_k seqused_q seqused_k"
FwdTensors = struct("FwdTensors", **of(c.c_void_p, f"q k v {LENGTHS} alibi_slopes sinks rng_state out lse"))
BwdTensors = struct(
    "BwdTensors",
    **of(c.c_void_p, f"dout d_lse q k v out lse {LENGTHS} alibi_slopes sinks rng_state dq dk dv d_sink"),
)
Call = struct(
    "Call", **of(c.c_void_p, "stream workspace"), workspace_bytes=c.c_uint64, parallel_for=c.c_void_p
)
Backend = struct(
    "Backend",
    **of(c.c_uint32, "abi_version problem_bytes plan_bytes fwd_bytes bwd_bytes call_bytes"),
    **of(c.c_char_p, "name build"),
    why_not=c.CFUNCTYPE(Status, c.POINTER(Problem)),
    plan=c.CFUNCTYPE(Status, c.POINTER(Problem), c.POINTER(Plan)),
    fwd=c.CFUNCTYPE(Status, c.POINTER(Problem), c.POINTER(FwdTensors), c.POINTER(Call)),
    bwd=c.CFUNCTYPE(Status, c.POINTER(Problem), c.POINTER(BwdTensors), c.POINTER(Call)),
    **of(c.c_void_p, "alloc free"),
)
DTYPES = {torch.float16: 0, torch.bfloat16: 1}


def load(backend: str, package: Path = Path(flash_ext.__file__).parent) -> c.Structure:
    """The table of one backend of the package, or of another build of it."""
    library = c.CDLL(str(package / f"lib/{backend}.so"))
    library.flash_ext_backend.restype = c.POINTER(Backend)
    table = library.flash_ext_backend().contents
    sizes = {"problem": Problem, "plan": Plan, "fwd": FwdTensors, "bwd": BwdTensors, "call": Call}
    for name, mirror in sizes.items():
        assert getattr(table, f"{name}_bytes") == c.sizeof(mirror), (
            f"{mirror.__name__} here is not the library's"
        )
    return table


def strides(x: Tensor) -> c.Structure:
    return Strides(x.stride(0) if x.ndim == 4 else 0, x.stride(-3), x.stride(-2))


def this_device(x: Tensor) -> c.Structure:
    facts = torch.cuda.get_device_properties(x.device)
    cc = 10 * facts.major + facts.minor
    smem = facts.shared_memory_per_block_optin
    return Device(1, x.device.index, cc, facts.multi_processor_count, smem, facts.L2_cache_size)


def describe(tensors: dict[str, Tensor], options: dict, max_ctas: int = 0, tile: int = 0) -> c.Structure:
    """The Problem that core makes of such a call of torch.ops.flash_ext.fwd, without its checks."""
    q, k, v = (tensors[name] for name in "qkv")
    p = Problem(dtype=DTYPES[q.dtype], nheads=q.shape[-2], nheads_k=k.shape[-2], max_ctas=max_ctas, tile=tile)
    p.head_dim, p.head_dim_v = q.shape[-1], v.shape[-1]
    p.packed_q, p.packed_k = "cu_seqlens_q" in tensors, "cu_seqlens_k" in tensors
    p.batch = len(tensors["cu_seqlens_q"]) - 1 if p.packed_q else len(q)
    p.total_q, p.total_k = (x.shape[:-2].numel() for x in (q, k))
    p.seqlen_q, p.seqlen_k = q.shape[-3], k.shape[-3]
    p.has_seqused_q, p.has_seqused_k = "seqused_q" in tensors, "seqused_k" in tensors
    p.has_sinks, p.top_left = "sinks" in tensors, options.get("top_left", False)
    p.window_left, p.window_right = options.get("window_left", -1), options.get("window_right", -1)
    p.window_right = 0 if options.get("causal") else p.window_right
    slopes = options.get("alibi_slopes")
    p.has_alibi = 0 if slopes is None else slopes.ndim
    p.softmax_scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
    p.q, p.k, p.v = strides(q), strides(k), strides(v)
    p.device = this_device(q)
    return p


def checked(status: c.Structure) -> None:
    assert status.code == 0, f"{status.code}: {status.text.decode()}"


def planned_bytes(table: c.Structure, problem: c.Structure) -> int:
    plan = Plan()
    checked(table.plan(problem, plan))
    return plan.workspace_bytes


def forward(table: c.Structure, problem: c.Structure, tensors: dict[str, Tensor]) -> None:
    """Run the table's fwd on the current stream; tensors holds out, lse and perhaps a workspace too."""
    problem.out = strides(tensors["out"])
    run(table.fwd, FwdTensors, problem, tensors)


def describe_backward(problem: c.Structure, tensors: dict[str, Tensor], deterministic: bool) -> None:
    """Turn a Problem into that of the backward; tensors holds dout, perhaps d_lse, and the gradients."""
    problem.kind, problem.deterministic = 1, deterministic
    problem.has_d_lse = "d_lse" in tensors
    for name in ("out", "dout", "dq", "dk", "dv"):
        setattr(problem, name, strides(tensors[name]))


def backward(table: c.Structure, problem: c.Structure, tensors: dict[str, Tensor]) -> None:
    """Run the table's bwd on the current stream; tensors holds what BwdTensors names and a workspace."""
    run(table.bwd, BwdTensors, problem, tensors)


def run(entry, kind: type[c.Structure], problem: c.Structure, tensors: dict[str, Tensor]) -> None:
    pointers = {name: x.data_ptr() for name, x in tensors.items()}
    workspace = pointers.pop("workspace", None)
    call = Call(stream=torch.cuda.current_stream().cuda_stream, workspace=workspace)
    call.workspace_bytes = tensors["workspace"].numel() if workspace else 0
    checked(entry(problem, kind(**pointers), call))
