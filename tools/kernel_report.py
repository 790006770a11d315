"""Registers, spills, shared memory and instructions of every kernel that was built, and the rules they keep.

python tools/kernel_report.py [build folder]

Reads what ptxas said of each object (setup.py keeps it as OBJECT.log) and, with cuobjdump, its instructions.
Exit code 1 when ptxas warned that it serialised or slowed a kernel (C75xx), when a kernel spills (one of
modified scores, "modified" in its instance's name, and one of fa1 on 9.0 may spill up to 64 bytes), when a
generation's kernel lacks the instructions that make it one, or when an instance took too long or too much
memory to compile.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

MOST_SPILL = 64
MOST_SECONDS, MOST_GIBIBYTES = 20, 1.0  # of the CPU, to compile an instance
SHOWN = ("HGMMA", "HMMA", "MUFU", "UTMALDG", "LDGSTS", "LDSM")
# What a main kernel of a generation cannot be without.
NEEDED = {"fa1": ("HMMA.1688", "LDSM"), "fa2": ("HMMA.16816", "LDGSTS"), "fa3": ("HGMMA", "UTMALDG")}


class Kernel(NamedTuple):
    instance: str  # fa2/probe_16
    arch: str
    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem: int  # static; what a launch asks for beside it is in the plan


def read_log(instance: str, text: str) -> list[Kernel]:
    kernels = []
    for part in re.split(r"Compiling entry function ", text)[1:]:
        name, arch = re.match(r"'(\S+)' for '(\S+)'", part).groups()

        def number(pattern: str, part=part) -> int:
            found = re.search(pattern, part)
            return int(found[1]) if found else 0

        stores, loads = number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes spill loads")
        stack, smem = number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem")
        kernels.append(Kernel(instance, arch, name, number(r"Used (\d+) reg"), stores, loads, stack, smem))
    return kernels


def faults(instance: str, text: str) -> list[str]:
    """One sentence for each broken rule in what ptxas and the build said."""
    found = [f"{instance}: {line.strip()}" for line in text.splitlines() if re.search(r"\bC75\d\d\b", line)]
    for kernel in read_log(instance, text):
        # What fa1 has for 9.0 is its code for 7.5, for tests and comparisons: it is cut for 7.5's registers.
        elsewhere = instance.startswith("fa1/") and kernel.arch == "sm_90"
        allowed = MOST_SPILL * (("modified" in instance.lower()) + elsewhere)
        if (spilled := max(kernel.spill_stores, kernel.spill_loads, kernel.stack)) > allowed:
            found.append(
                f"{instance} on {kernel.arch}: {spilled} bytes of spills or stack, at most {allowed}"
            )
    seconds, gibibytes = cost(text)
    if seconds > MOST_SECONDS or gibibytes > MOST_GIBIBYTES:
        most = f"at most {MOST_SECONDS} s and {MOST_GIBIBYTES} GiB"
        found.append(f"{instance}: took {seconds} CPU s and {gibibytes} GiB to compile, {most}")
    return found


def cost(text: str) -> tuple[float, float]:
    """CPU seconds for each architecture, and GiB, of a compilation; near nothing when a cache had it."""
    found = re.search(r"^cost: ([\d.]+) CPU s, ([\d.]+) GiB$", text, re.MULTILINE)
    archs = len(set(re.findall(r"' for '(\w+)'", text))) or 1
    return (round(float(found[1]) / archs, 1), float(found[2])) if found else (0.0, 0.0)


def find_cuobjdump() -> str | None:
    wheel = Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu*/bin")
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    # It looks for nvdisasm on the PATH.
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], str(cuda), *map(str, wheel)])
    return shutil.which("cuobjdump")


def read_instructions(sass: str) -> dict[tuple[str, str], Counter]:
    """(architecture, kernel) -> how often each instruction stands there."""
    counts: dict[tuple[str, str], Counter] = {}
    arch, counter = "", Counter()
    for line in sass.splitlines():
        if found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            counter[found[1]] += 1
        elif found := re.match(r"\s*Function : (\S+)", line):
            counter = counts.setdefault((arch, found[1]), Counter())
        elif found := re.match(r"\s*code for (\w+)", line):
            arch = found[1]
    return counts


def total(counter: Counter, prefix: str) -> int:
    return sum(count for name, count in counter.items() if name.startswith(prefix))


def missing(instance: str, arch: str, name: str, counter: Counter) -> list[str]:
    """One sentence for each kind of instruction that a main kernel lacks."""
    backend = instance.partition("/")[0]
    shared = "6device10bwd_kernel" in name  # device/mma_bwd.cuh
    if not shared and f"9flash_ext3{backend}" not in name:  # the row kernels multiply nothing
        return []
    needed = NEEDED.get(backend, ())
    return [f"{instance} on {arch}: has no {i}" for i in needed if not total(counter, i)]


def demangle(name: str) -> str:
    try:
        text = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return name
    return re.sub(r"\(.*\)$", "", text).removeprefix("void ").replace("flash_ext::", "")


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    default = root / f"build/ninja-{sys.implementation.cache_tag}"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    objects = re.findall(r"^build (obj/\S+\.cu\.o):", (folder / "build.ninja").read_text(), re.MULTILINE)
    logs = {o: (folder / f"{o}.log").read_text() for o in objects if (folder / f"{o}.log").exists()}
    logs = {o[4:-5]: text for o, text in logs.items()}  # by instance
    kernels = [kernel for instance, text in logs.items() for kernel in read_log(instance, text)]
    broken = [fault for instance, text in logs.items() for fault in faults(instance, text)]
    counts = {}
    if kernels and not (cuobjdump := find_cuobjdump()):
        broken.append("no cuobjdump to read instructions with: pip install -r requirements-report.txt")
    elif kernels:

        def dump(instance: str) -> str:
            command = [cuobjdump, "-sass", folder / f"obj/{instance}.cu.o"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for instance, sass in zip(logs, pool.map(dump, logs), strict=True):
                for (arch, name), counter in read_instructions(sass).items():
                    counts[instance, arch, name] = counter
                    broken += missing(instance, arch, name, counter)
    print(f"{len(kernels)} kernels in {folder}")
    if kernels:
        mix = "".join(f"{name:>9}" for name in (*SHOWN, "all"))
        print(f"{'arch':7}{'regs':>5}{'spill st/ld':>13}{'stack':>7}{'smem':>7}{mix}  kernel")
    for k in kernels:
        counter = counts.get((k.instance, k.arch, k.name), Counter())
        mix = "".join(f"{total(counter, name):9}" for name in (*SHOWN, ""))
        spills = f"{k.spill_stores}/{k.spill_loads}"
        print(f"{k.arch:7}{k.registers:5}{spills:>13}{k.stack:7}{k.smem:7}{mix}  {demangle(k.name)}")
    if logs:
        seconds, memory = (max(values) for values in zip(*map(cost, logs.values()), strict=True))
        print(f"most for one instance and architecture: {seconds} CPU s, {memory} GiB")
    print("\n".join(f"broken rule: {fault}" for fault in broken) or "build rules: in order")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
