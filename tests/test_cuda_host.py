"""What of the CUDA backends needs no GPU: block ranges, schedulers, why_not and plan."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from compare import SEED

import flash_ext

ROOT = Path(__file__).resolve().parent.parent


def run_on_host(tmp_path, source, *arguments):
    """What a program that includes device headers prints, compiled for the host."""
    program = tmp_path / "program"
    build = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-D__device__=", "-D__forceinline__=inline"]
    build += [f"-I{ROOT / 'csrc'}", "-x", "c++", ROOT / "tests" / source, "-o", program]
    subprocess.run(build, check=True, timeout=120)
    run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout
    return run.stdout


def test_block_ranges_and_schedulers_against_brute_force(tmp_path):
    assert run_on_host(tmp_path, "device_host.cpp", str(SEED % 2**31)) == "16000 cases\n"


def test_rows_for_ldmatrix_and_their_banks(tmp_path):
    assert run_on_host(tmp_path, "ldmatrix_host.cpp") == "106 accesses\n"


def test_operands_of_volta_and_their_banks(tmp_path):
    assert run_on_host(tmp_path, "volta_host.cpp") == "756 accesses\n"


def halves(batch=2, seqlen=512, nheads=16, head_dim=128, head_dim_v=None, dtype=torch.bfloat16):
    shape = (batch, seqlen, nheads)
    dims = (head_dim, head_dim, head_dim_v or head_dim)
    return [torch.empty(*shape, dim, dtype=dtype, device="meta") for dim in dims]


def why_not(name, tensors, **options):
    """Why a backend is passed over for tensors on a Hopper; empty when it is the one."""
    try:
        plan = flash_ext.plan(*tensors, device=options.pop("device", "sm_90"), version=name, **options)
    except RuntimeError as error:
        return str(error)
    assert plan.backend == name
    return ""


BUILT = {name: "not built" not in why_not(name, halves()) for name in ("fa1", "fa2", "fa3")}


def not_built(name):
    arch = {"fa1": "75", "fa2": "80", "fa3": "90a"}[name]
    return f"not built: lib/{name}.so is missing (build with FLASH_EXT_CUDA_ARCHS={arch})"


# What each backend answers when it is built; when it is not, it says how to build it.
REASONS = [
    ("fa3", halves(), {"device": "sm_80"}, "it runs on compute capability 9.0 only, this card has 8.0"),
    ("fa2", halves(), {"device": "sm_75"}, "it needs compute capability 8.0 or newer, this card has 7.5"),
    ("fa1", halves(), {"device": "sm_75"}, "its cards have no bfloat16 arithmetic: use float16"),
    ("fa3", halves(seqlen=2**28, nheads=1, batch=1), {}, "a sequence must be shorter than 2^28"),
]  # fmt: skip


@pytest.mark.parametrize("name, tensors, options, sentence", REASONS, ids=[r[3] for r in REASONS])
def test_why_not(name, tensors, options, sentence):
    reason = why_not(name, tensors, **options)
    assert reason.endswith(f"{name}: {sentence if BUILT[name] else not_built(name)}")


def test_plans_of_fa1():
    backends = json.loads(torch.ops.flash_ext.backends())["backends"]
    build = next(backend["build"] for backend in backends if backend["name"] == "fa1")
    cards = [card for card in ("sm_70", "sm_75") if card in build]
    # What is tested on a Hopper is what the one card runs.
    also = len(cards) == 1 and any(code in build for code in ("sm_90", "compute_70"))

    def plan(head_dim, card, **options):
        tensors = halves(head_dim=head_dim, dtype=torch.float16)
        return flash_ext.plan(*tensors, device=card, version="fa1", **options)

    for card in cards:
        smem = {"sm_70": 96, "sm_75": 64}[card] * 1024
        for head_dim in (32, 64, 96, 128, 192, 256):
            for options in {}, {"softcap": 5.0}:
                for backward in False, True:
                    planned = plan(head_dim, card, backward=backward, **options)
                    assert planned.smem_bytes + 1024 <= smem, "what an SM has"
                    if also:
                        there = plan(head_dim, "sm_90", backward=backward, **options)
                        assert (there.tile, there.smem_bytes) == (planned.tile, planned.smem_bytes)
        assert plan(64, card).tile == (128, 64) and plan(64, card).launches == 1
        assert plan(64, card).workspace_bytes == 0 and plan(64, card, backward=True).launches == 3
        assert plan(200, card).tile == plan(256, card).tile, "the bucket of 256"
        assert plan(128, card, backward=True).tile == {"sm_70": (32, 128), "sm_75": (32, 64)}[card]
        assert flash_ext.plan(*halves(dtype=torch.float16), device=card).backend == "fa1"


def test_plans_of_fa2():
    if not BUILT["fa2"]:
        assert why_not("fa2", halves()).endswith(f"fa2: {not_built('fa2')}")
        return

    def tile(device, head_dim, **options):
        tensors = halves(head_dim=head_dim, seqlen=512)
        return flash_ext.plan(*tensors, device=device, version="fa2", **options).tile

    large = {32: (128, 128), 64: (128, 64), 96: (128, 64), 128: (128, 64), 192: (64, 64), 256: (64, 64)}
    for head_dim, want in large.items():
        assert tile("sm_90", head_dim) == want
    assert tile("sm_90", 200) == (64, 64), "the bucket of 256"
    assert tile("sm_80", 128) == (128, 32), "two of them on an SM"
    assert tile("sm_80", 192) == (64, 64), "two of them on an SM"
    assert tile("sm_80", 256) == (128, 64), "eight warps"
    small = {32: (128, 128), 64: (128, 64), 96: (128, 32), 128: (128, 64), 192: (64, 64), 256: (64, 32)}
    for head_dim, want in small.items():
        assert tile("sm_86", head_dim) == want, "99 KB of shared memory"
        assert tile("sm_86", head_dim, softcap=5.0)[0] == want[0]


def test_plans_of_fa2_backward():
    if not BUILT["fa2"]:
        return

    def plan(device, head_dim=128, seqlen=512, **options):
        tensors = halves(head_dim=head_dim, seqlen=seqlen)
        return flash_ext.plan(*tensors, device=device, version="fa2", backward=True, **options)

    rows = 2 * 512 * 16
    first = plan("sm_90")
    assert first.tile == (64, 128) and first.grid == 128 and first.launches == 3
    assert rows * 128 * 4 < first.workspace_bytes < rows * 130 * 4 + 65536, (
        "float32 sums of dQ, lse and delta"
    )
    longer = plan("sm_90", seqlen=4096, deterministic=True)
    assert longer.workspace_bytes < 8 * first.workspace_bytes + 65536, "linear memory"
    smem = [plan(device).smem_bytes // 1024 for device in ("sm_90", "sm_80", "sm_86")]
    assert smem == [177, 161, 72], "two buffers of dS, one, and a smaller tile"
    assert plan("sm_80", 64).smem_bytes < 81 * 1024, "two CTAs on an SM"
    assert [plan(d, 256).tile for d in ("sm_90", "sm_80", "sm_86")] == [(64, 64), (64, 64), (32, 32)]


def test_plans_of_fa3():
    if not BUILT["fa3"]:
        assert why_not("fa3", halves()).endswith(f"fa3: {not_built('fa3')}")
        return
    plan = flash_ext.plan(*halves(), device="sm_90", version="fa3")
    assert plan.tile == (128, 128) and plan.grid == 128 and plan.workspace_bytes == 0 and plan.launches == 1
    plan = flash_ext.plan(*halves(head_dim=64, seqlen=8192), device="sm_90", causal=True, version="fa3")
    assert plan.tile == (192, 128) and plan.grid == 132 and plan.workspace_bytes > 0, "a counter of tiles"
    assert plan.launches == 2, "the counter is cleared first"
    plan = flash_ext.plan(*halves(head_dim=64, seqlen=8192), device="sm_90", version="fa3")
    assert plan.workspace_bytes > 0, "the last tile of a head is short"
    plan = flash_ext.plan(*halves(head_dim=96), device="sm_90", version="fa3")
    assert plan.tile == (128, 160)
    for seqlen, causal, block_n in (
        (2048, False, 128),
        (2049, False, 176),
        (8192, False, 176),
        (2049, True, 128),
        (8192, True, 176),
    ):
        plan = flash_ext.plan(*halves(seqlen=seqlen), device="sm_90", version="fa3", causal=causal)
        assert plan.tile == (128, block_n) and ("blocks of 176 keys" in plan.why) == (block_n == 176)
    window = flash_ext.plan(*halves(seqlen=8192), device="sm_90", version="fa3", window_size=(1024, -1))
    assert window.tile == (128, 128)
    plan = flash_ext.plan(*halves(head_dim=63), device="sm_90", version="fa3")
    assert plan.tile == (192, 128), "63 columns are padded to 64"
    rows = torch.empty(0, 2, 64, dtype=torch.bfloat16, device="meta")
    cu_seqlens = torch.empty(3, dtype=torch.int32, device="meta")
    plan = flash_ext.plan(rows, rows, rows, cu_seqlens, cu_seqlens, 0, 0, device="sm_90", version="fa3")
    assert plan.grid == 0, "packed slots without a row launch nothing"


def test_plans_of_fa3_backward():
    if not BUILT["fa3"]:
        return
    plan = flash_ext.plan(*halves(), device="sm_90", version="fa3", backward=True)
    rows = 2 * 512 * 16
    assert plan.tile == (64, 128) and plan.grid == 128 and plan.launches == 3
    assert rows * 128 * 4 < plan.workspace_bytes < rows * 130 * 4 + 65536, "float32 sums of dQ, lse and delta"
    longer = flash_ext.plan(*halves(seqlen=4096), device="sm_90", version="fa3", backward=True)
    assert longer.grid == 132 and longer.workspace_bytes < 8 * plan.workspace_bytes + 65536, "linear memory"
    assert flash_ext.plan(*halves(head_dim=64), device="sm_90", version="fa3", backward=True).tile == (
        128,
        128,
    )
    wide = flash_ext.plan(*halves(head_dim=192, head_dim_v=128), device="sm_90", version="fa3", backward=True)
    assert wide.tile == (64, 96)
    square = flash_ext.plan(*halves(head_dim=192), device="sm_90", version="fa3", backward=True)
    assert wide.smem_bytes < square.smem_bytes, "128 columns of V have kernels of their own"
    modified = flash_ext.plan(
        *halves(head_dim=256), device="sm_90", version="fa3", backward=True, softcap=5.0
    )
    assert modified.tile == (64, 64)
    assert (
        "bucket 96" in flash_ext.plan(*halves(head_dim=72), device="sm_90", version="fa3", backward=True).why
    )
    assert flash_ext.plan(*halves(head_dim=256), device="sm_90", version="fa3", backward=True).tile == (
        64,
        80,
    )


def test_blocks_of_keys_are_cut_where_sms_would_idle():
    if not BUILT["fa3"]:
        return

    def plan(batch, seqlen, nheads_k, **options):
        q = halves(batch, seqlen, 16)[0]
        k = halves(batch, seqlen, nheads_k)[0]
        return flash_ext.plan(q, k, k, device="sm_90", version="fa3", backward=True, **options)

    def left(plan, batch, seqlen):  # bytes of what parts leave
        return plan.workspace_bytes - batch * seqlen * 16 * 130 * 4

    of_a_part = 128 * 256 * 4
    whole = plan(1, 1024, 16)
    assert whole.grid == 128 and left(whole, 1, 1024) < of_a_part, "128 blocks on 132 SMs"
    few = plan(1, 2048, 1)
    assert few.grid == 128 and 16 * 7 <= left(few, 1, 2048) / of_a_part < 16 * 7 + 1, (
        "16 blocks, 8 parts each"
    )
    last = plan(4, 4096, 16)
    assert last.grid == 132 and 68 * 2 <= left(last, 4, 4096) / of_a_part < 68 * 2 + 1, (
        "15 x 132 + 68, 3 parts"
    )
    causal = plan(2, 8192, 16, causal=True)
    assert causal.grid == 132 and left(causal, 2, 8192) < of_a_part, "longest first will do"
    assert plan(1, 2048, 1, causal=True).grid == 132
    for batch, seqlen in (1, 512), (1, 4096), (3, 5000), (1, 2**17):
        for nheads_k in 1, 2, 8, 16:
            for causal in False, True:
                most = left(plan(batch, seqlen, nheads_k, causal=causal), batch, seqlen) / of_a_part
                assert most < 5 * 132 + 1, "however long"
