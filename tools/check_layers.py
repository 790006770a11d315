"""Holds csrc against the layers of docs/architecture.md: python tools/check_layers.py [root]

A folder of csrc knows its room by what it may include. Files also keep to their length.
"""

import re
import sys
from pathlib import Path

CUTLASS = [
    "cute/arch/",
    "cutlass/arch/",
]  # the instruction layer; cute/tensor.hpp costs minutes of compile time
CUDA = ["cuda.h", "cuda_runtime.h", "cuda_runtime_api.h", "cuda_fp16.h", "cuda_bf16.h"]
# torch's stable ABI: its C++ half, the types that need no library, and its C half.
TORCH = ["torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/"]
SYSTEM = ["dlfcn.h", "immintrin.h", "pthread.h", "sched.h", "stdlib.h", "unistd.h", "sys/"]
MAY_INCLUDE = {
    "core": ["core/"],
    "cpu": ["core/", "cpu/"],
    "device": ["core/", "device/", *CUTLASS, *CUDA],
    **{fa: ["core/", "device/", f"{fa}/", *CUTLASS, *CUDA] for fa in ("fa1", "fa2", "fa3")},
    "bindings": ["core/", "bindings/", "pybind11/", "Python.h", *TORCH],
}
SOURCES = {".h", ".cpp", ".cuh", ".cu", ".inc"}
LINES, MAINLOOP_LINES, SETUP_LINES = 400, 600, 250


def check_includes(root: Path, path: Path) -> list[str]:
    folder = path.relative_to(root / "csrc").parts[0]
    allowed = MAY_INCLUDE.get(folder)
    name = path.relative_to(root)
    if allowed is None:
        return [f"{name}: csrc/{folder} is no layer; the layers are {', '.join(MAY_INCLUDE)}"]
    faults = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        include = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
        if not include or re.fullmatch(r"[a-z_0-9]+", include[1]):  # a header of C++ itself has no dot
            continue
        if not include[1].startswith(tuple(allowed + SYSTEM)):
            rule = f"csrc/{folder} may include the standard library, {', '.join(allowed)}"
            faults.append(f"{name}:{number}: includes {include[1]}, but {rule}")
    return faults


def check_length(root: Path, path: Path) -> list[str]:
    limit = MAINLOOP_LINES if "mainloop" in path.name else SETUP_LINES if path.name == "setup.py" else LINES
    lines = len(path.read_text().splitlines())
    return [f"{path.relative_to(root)}: {lines} lines, at most {limit}"] if lines > limit else []


def check(root: Path) -> list[str]:
    """One sentence for each fault."""
    csrc = sorted((root / "csrc").rglob("*"))
    code = [path for path in csrc if path.suffix in SOURCES]
    python = [root / "setup.py"]
    for folder in ("flash_ext", "tests", "bench", "examples", "tools"):
        python += sorted((root / folder).rglob("*.py"))
    faults = [fault for path in code for fault in check_includes(root, path)]
    faults += [
        f"{path.relative_to(root)}: a folder of this name would take the place of <{path.name}/...> of others"
        for path in csrc
        if path.is_dir() and path.name in ("torch", "cuda")
    ]
    return faults + [fault for path in code + python for fault in check_length(root, path)]


if __name__ == "__main__":
    found = check(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    print("\n".join(found) or "layers and file lengths: in order")
    sys.exit(bool(found))
