"""Compiles every kernel of 7.0 without a Volta and without an nvcc that knows it, and reads what came out.

    python tools/volta_report.py [--library LIBNVRTC --include FOLDER]

NVRTC comes from the wheels nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12 (12.9), or is given. Exit code
1 when a build rule is broken: no HMMA, local memory (a modified kernel may have 64 bytes), more shared memory
or registers than an SM has for the CTAs that the kernel is made for; at head_dim 64 and 128 less than 60 % of
the peak below, or 45 % backward.

The table is a bound, not a measurement. It counts what a warp issues for a block of the loop without a mask,
and how many cycles each part of an SM is busy when four warps, one on each scheduler, do the same:

    tensor   2 for an HMMA step: an m8n8k4 has four, and 1024 products; a scheduler does 128 a cycle
    issue    1 for an instruction
    fma, alu 2 for each: 16 lanes
    xu       8 for an exponential or a conversion: 4 lanes
    lsu      1 for 128 bytes to or from shared memory, of a load, or for a shuffle; of four warps

`bound` is the busiest part; `peak` the share of 125 TFLOPS that it leaves.
"""

import argparse
import re
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import kernel_report
import nvrtc

SM_SMEM, SM_REGISTERS = 96 * 1024, 64 * 1024
LEAST_PEAK = {"volta_fwd": 0.60, "volta_bwd": 0.45}  # at head_dim 64 and 128
HMMA, LDS, STS, LDG, STG, SHFL, BRA = 0x036, 0x184, 0x188, 0x181, 0x186, 0x189, 0x147
MUFU, F2F, BAR, EXIT = 0x108, 0x104, 0x11D, 0x14D
FMA_PIPE = {0x020, 0x021, 0x023, 0x024, 0x025}  # FMUL, FADD, FFMA, IMAD, IMAD.WIDE
MEMORY = {LDS, STS, LDG, STG}
CONTROL = {BRA, BAR, EXIT, 0x118, 0x155, 0x141, 0x145}  # the last: NOP, BMOV, BSYNC, BSSY
NO_PIPE = {HMMA, SHFL, MUFU, F2F} | MEMORY | CONTROL
INSTRUCTION = 16  # bytes


class Instruction(NamedTuple):
    code: int  # nine bits: what it does, without the kind of its operands
    always: bool  # no predicate
    bits: int  # of a load or store, for each lane
    target: int  # of a branch: a number in the list


def text_section(cubin: bytes, kernel: str) -> bytes:
    """The code of one of a cubin's kernels."""
    offset, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from("<II4Q", cubin, offset + size * i) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, at, length in headers:
        start = strings + name
        if cubin[start : cubin.index(b"\0", start)] == b".text." + kernel.encode():
            return cubin[at : at + length]
    raise ValueError(f"no code of {kernel}")


def decode(text: bytes) -> list[Instruction]:
    instructions = []
    for at in range(0, len(text), INSTRUCTION):
        low, high = struct.unpack_from("<QQ", text, at)
        code, target = low & 0x1FF, -1
        if code == BRA:
            offset = ((low >> 34) | ((high & 0x3FFFF) << 30)) << 2
            offset -= (offset >> 49 & 1) << 50
            target = (at + INSTRUCTION + offset) // INSTRUCTION
        bits = {4: 32, 5: 64, 6: 128}.get(high >> 9 & 7, 32) if code in MEMORY else 0
        instructions.append(Instruction(code, low >> 12 & 15 == 7, bits, target))
    return instructions


def main_loop(instructions: list[Instruction], inner_trips: int) -> list[Instruction]:
    """One trip through the loop that has the HMMAs.

    It goes the way with the most products and copies, and of those the shortest: it meets no mask, no
    rescaling and no ragged block. A loop inside it, over 16 keys at a time, is made so many times.
    """
    loops = [(i.target, at) for at, i in enumerate(instructions) if 0 <= i.target <= at]
    begin, end = max(loops, key=lambda at: (count_hmma(instructions[at[0] : at[1] + 1]), at[0] - at[1]))
    best: dict[int, tuple[tuple[int, int], int]] = {end: ((0, -1), end)}  # of an instruction: worth, next one
    for at in range(end - 1, begin - 1, -1):
        here = instructions[at]
        ways = [] if here.code == BRA and here.always else [at + 1]
        if at < here.target <= end:
            ways.append(here.target)
        ways = [way for way in ways if way in best and here.code != EXIT]
        if not ways:
            continue
        way = max(ways, key=lambda way: best[way][0])
        useful = here.code == HMMA or here.bits == 128
        best[at] = ((best[way][0][0] + useful, best[way][0][1] - 1), way)
    path, at = [], begin
    while at != end:
        path.append(at)
        if begin < instructions[at].target <= at:
            path += [i for i in path if instructions[at].target <= i] * (inner_trips - 1)
        at = best[at][1]
    return [instructions[i] for i in [*path, end]]


def count_hmma(instructions: list[Instruction]) -> int:
    return sum(i.code == HMMA for i in instructions)


def cycles(loop: list[Instruction]) -> dict[str, int]:
    """For how long one trip of four warps keeps each part of an SM busy."""
    count = Counter(i.code for i in loop)
    wavefronts = sum(i.bits // 32 for i in loop if i.code in MEMORY) + count[SHFL]
    alu = sum(n for code, n in count.items() if code not in FMA_PIPE | NO_PIPE)
    return {
        "tensor": 2 * count[HMMA],
        "issue": len(loop),
        "fma": 2 * sum(count[code] for code in FMA_PIPE),
        "alu": 2 * alu,
        "xu": 8 * (count[MUFU] + count[F2F]),
        "lsu": 4 * wavefronts,
    }


def smem_bytes(header: str, arguments: list[str]) -> int:
    """As the Traits of the header have it."""
    head_dim, block_m, block_n = map(int, arguments[:3])
    queries, keys = 2 * head_dim * block_m, 2 * head_dim * block_n
    if header == "volta_fwd":  # Q, K, V
        return queries + 2 * keys
    return 2 * keys + 64 * block_n + 2 * queries + 8 * block_m  # K, V, dS, Q, dO, lse, delta


def instances() -> list[tuple[str, list[str]]]:
    table = (nvrtc.ROOT / "csrc/fa1/instances.inc").read_text()
    lines = re.findall(r"^INSTANCE\((volta_\w+), (.+)\)", table, re.MULTILINE)
    return [(header, arguments.split(", ")) for header, arguments in lines]


def report(compiler: nvrtc.Nvrtc, header: str, arguments: list[str]) -> list[str]:
    """Prints a line of the table; returns the rules that the kernel breaks."""
    source = f'#include "fa1/{header}.cuh"\nINSTANCE({header}, {", ".join(arguments)})\n'
    cubin, log = compiler.compile(source, "sm_70")
    ptx = compiler.compile(source, "compute_70")[0].decode()
    entry = re.search(rf"\.entry \S*{header}_kernel.*?\.maxntid (\d+).*?\.minnctapersm (\d+)", ptx, re.DOTALL)
    threads, blocks = map(int, entry.groups())
    name = f"{header} {', '.join(arguments)}"
    broken = kernel_report.faults(name, log)
    (kernel,) = (k for k in kernel_report.read_log(name, log) if f"{header}_kernel" in k.name)
    instructions = decode(text_section(cubin, kernel.name))
    loop = main_loop(instructions, int(arguments[2]) // 16)
    busy = cycles(loop)
    bound = max(busy, key=busy.get)
    smem = smem_bytes(header, arguments) + kernel.smem
    peak = busy["tensor"] / max(busy.values())
    parts = "".join(f"{n:7}" for n in busy.values())
    print(
        f"{name:34}{kernel.registers:5}{kernel.spill_stores + kernel.spill_loads:7}{smem / 1024:7.1f}"
        f"{blocks * threads // 32:6}{count_hmma(loop) // 4:6}{parts}  {bound:7}{peak:5.0%}"
    )
    if not count_hmma(instructions):
        broken.append(f"{name}: no HMMA")
    if arguments[0] in ("64", "128") and peak < LEAST_PEAK[header]:
        broken.append(f"{name}: {peak:.0%} of the peak, at least {LEAST_PEAK[header]:.0%}")
    if blocks * smem > SM_SMEM:
        broken.append(f"{name}: {blocks} CTAs of {smem} bytes of shared memory, an SM has {SM_SMEM}")
    if blocks * threads * -(-kernel.registers // 8) * 8 > SM_REGISTERS:
        broken.append(f"{name}: {blocks} CTAs of {threads} threads with {kernel.registers} registers")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--library", help="a libnvrtc.so")
    parser.add_argument("--include", default="", help="the folder with cuda_fp16.h")
    options = parser.parse_args()
    compiler = nvrtc.Nvrtc(options.library, options.include) if options.library else nvrtc.find()
    if compiler is None:
        sys.exit("no NVRTC 12: pip install nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79")
    print(f"NVRTC {compiler.version} for sm_70; cycles of an unmasked block, of four warps")
    columns = "".join(f"{name:>7}" for name in ("tensor", "issue", "fma", "alu", "xu", "lsu"))
    print(f"{'kernel':34} regs  spill     KB warps   mma{columns}  bound   peak")
    broken = [fault for instance in instances() for fault in report(compiler, *instance)]
    print("\n".join(f"broken rule: {fault}" for fault in broken) or "build rules: in order")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
