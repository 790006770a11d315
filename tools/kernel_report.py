"""Registers, spills and shared memory of every kernel that was built, and the rules they must keep.

python tools/kernel_report.py [build folder]

Reads what ptxas said of each object (setup.py keeps it as OBJECT.log). Exit code 1 when ptxas warned that it
serialised or slowed a kernel (C75xx), or when a kernel spills; one of modified scores ("modified" in its
instance's name) may spill up to 64 bytes.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

MODIFIED_SPILL = 64


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
    """One sentence for each broken rule."""
    found = [f"{instance}: {line.strip()}" for line in text.splitlines() if re.search(r"\bC75\d\d\b", line)]
    allowed = MODIFIED_SPILL if "modified" in instance.lower() else 0
    for kernel in read_log(instance, text):
        if (spilled := max(kernel.spill_stores, kernel.spill_loads, kernel.stack)) > allowed:
            found.append(
                f"{instance} on {kernel.arch}: {spilled} bytes of spills or stack, at most {allowed}"
            )
    return found


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
    logs = {o[4:-5]: (folder / f"{o}.log").read_text() for o in objects if (folder / f"{o}.log").exists()}
    kernels = [kernel for instance, text in logs.items() for kernel in read_log(instance, text)]
    print(f"{len(kernels)} kernels in {folder}")
    if kernels:
        print(f"{'arch':7}{'regs':>5}{'spill st/ld':>13}{'stack':>7}{'smem':>7}  kernel")
    for k in kernels:
        spills = f"{k.spill_stores}/{k.spill_loads}"
        print(f"{k.arch:7}{k.registers:5}{spills:>13}{k.stack:7}{k.smem:7}  {demangle(k.name)}")
    broken = [fault for instance, text in logs.items() for fault in faults(instance, text)]
    print("\n".join(f"broken rule: {fault}" for fault in broken) or "build rules: in order")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
