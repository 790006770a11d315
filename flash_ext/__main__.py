"""The doctor: ``python -m flash_ext`` says what is installed, what works, and what to do about the rest."""

from __future__ import annotations

import importlib
import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

from .version import VERSION

# CUDA major of the build -> (oldest driver's CUDA version, oldest driver release).
DRIVERS = {11: (11080, "520"), 12: (12000, "525"), 13: (13000, "580")}
OLDEST_TORCH = (2, 10)
OLDEST_NVCC = (11, 8)


@dataclass
class Facts:
    """What the doctor found. Strings that end in _problem are empty when there is none."""

    python: str
    torch: str = ""  # torch.__version__
    torch_cuda: str = ""  # torch.version.cuda
    nvcc: str = ""  # "13.0.88"; empty: not on the PATH
    door_problem: str = ""
    module_problem: str = ""
    build: dict = field(default_factory=dict)  # build_info()
    machine: dict = field(default_factory=dict)  # backends()
    self_tests: dict[str, str] = field(
        default_factory=dict
    )  # backend -> result, "right: ..." or "WRONG: ..."


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def find_nvcc() -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return ""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found.group(1) if found else ""


def collect() -> Facts:
    """Look at this machine. Never raises: what cannot be loaded becomes a sentence."""
    facts = Facts(python=platform.python_version(), nvcc=find_nvcc())
    source = None
    try:
        import torch

        facts.torch, facts.torch_cuda = torch.__version__, torch.version.cuda or ""
        importlib.import_module("flash_ext.ops")
        source = torch.ops.flash_ext
    except (ImportError, OSError, RuntimeError) as error:
        facts.door_problem = first_line(error)
    try:
        module = importlib.import_module("flash_ext._C")
    except ImportError as error:
        facts.module_problem = first_line(error)
    else:
        facts.build, facts.machine = module.build_info(), module.backends()
    if source is not None:
        facts.build, facts.machine = json.loads(source.build_info()), json.loads(source.backends())
        facts.self_tests = self_test(facts.machine)
    return facts


def first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].removeprefix("flash_ext: ")


def self_test(machine: dict) -> dict[str, str]:
    """Forward and backward of each backend that can run here, against the float64 reference."""
    import torch

    results = {}
    for backend in (b["name"] for b in machine["backends"] if b["loaded"]):
        device = "cpu" if backend == "cpu" else "cuda"
        if device == "cuda" and not torch.cuda.is_available():
            continue
        dtype = torch.float32 if backend == "cpu" else torch.float16
        try:
            passes, error = largest_error(device, dtype, backend)
        except (RuntimeError, NotImplementedError) as problem:
            results[backend] = f"not run: {first_line(problem)}"
            continue
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        verdict = "right" if error < bound else "WRONG"
        results[backend] = f"{verdict}: {passes} from float64 by {error:.0e} at most"
    return results


def has_backward(q, k, v, version: str) -> bool:
    from . import plan

    try:
        plan(q, k, v, backward=True, version=version)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def largest_error(device: str, dtype, version: str) -> tuple[str, float]:
    """Which passes were run, and how far out and the gradients are from float64."""
    import torch

    from . import flash_attn_func, reference

    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 130, 4, 64), (2, 150, 2, 64), (2, 150, 2, 64), (2, 130, 4, 64)]
    *inputs, dout = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    backward = has_backward(*inputs, version)
    results = []
    for function, kind in ((flash_attn_func, dtype), (reference.attention, torch.float64)):
        leaves = [t.detach().to(kind).requires_grad_(backward) for t in inputs]
        options = {"version": version} if function is flash_attn_func else {}
        out = function(*leaves, causal=True, **options)
        out = out[0] if isinstance(out, tuple) else out
        if backward:
            out.backward(dout.to(kind))
        results.append([out.detach(), *(leaf.grad for leaf in leaves if backward)])
    error = max(float((a.double() - b.double()).abs().max()) for a, b in zip(*results, strict=True))
    return "forward and backward differ" if backward else "forward differs", error


def serves(build: str, cc: int) -> bool:
    """Whether a library built for `build` ("nvcc 13.0.88, sm_80 sm_90 compute_90") runs on a card of `cc`."""
    for kind, number, suffix in re.findall(r"\b(sm|compute)_(\d+)([af]?)", build):
        arch = int(number)
        if suffix == "a" and arch == cc:
            return True
        if not suffix and (arch <= cc if kind == "compute" else arch // 10 == cc // 10 and arch <= cc):
            return True
    return False


def advice(facts: Facts) -> list[str]:
    """What to do, a sentence each, most urgent first; empty when all is well."""
    todo = []
    if not facts.torch:
        todo.append("torch is not installed: pip install torch (2.10 or newer), then install flash_ext again")
    elif numbers(facts.torch)[:2] < OLDEST_TORCH:
        todo.append(f"torch {facts.torch} is older than 2.10: upgrade it")
    elif facts.door_problem:
        todo.append(f"the torch operators do not load: {facts.door_problem}")
    backends = {b["name"]: b for b in facts.machine.get("backends", [])}
    if backends and not backends["cpu"]["loaded"]:
        todo.append(f"the CPU backend does not load: {backends['cpu']['reason']}")
    todo += driver_advice(facts, backends)
    for gpu in facts.machine.get("devices", []):
        todo += gpu_advice(facts, backends, gpu)
    if facts.nvcc and numbers(facts.nvcc)[:2] < OLDEST_NVCC:
        todo.append(
            f"nvcc {facts.nvcc} is older than 11.8: it cannot build the CUDA backends; "
            "install CUDA 11.8 or newer (12.4 for Hopper)"
        )
    todo += [
        f"{name} computes wrong results here: {r}" for name, r in facts.self_tests.items() if "WRONG" in r
    ]
    return todo


def driver_advice(facts: Facts, backends: dict) -> list[str]:
    driver = facts.machine.get("driver_version", 0)
    for backend in backends.values():
        built_with = re.search(r"nvcc (\d+)", backend["build"])
        if not (driver and built_with):
            continue
        major = int(built_with.group(1))
        oldest, release = DRIVERS.get(major, (0, ""))
        if driver < oldest:
            return [
                f"the driver (CUDA {driver // 1000}.{driver % 1000 // 10}) is too old for a build with "
                f"CUDA {major}: install driver {release} or newer, or a build with an older CUDA"
            ]
    return []


def gpu_advice(facts: Facts, backends: dict, gpu: dict) -> list[str]:
    cc, name = gpu["cc"], f"GPU {gpu['ordinal']} ({gpu['name']}, {gpu['cc'] // 10}.{gpu['cc'] % 10})"
    todo = []
    if facts.torch and not facts.torch_cuda:
        todo.append(f"{name} is there, but torch {facts.torch} has no CUDA: install a CUDA build of torch")
    if cc < 80:
        return [*todo, f"{name} has no kernel yet: use torch's scaled_dot_product_attention"]
    if any(serves(b["build"], cc) for b in backends.values() if b["loaded"]):
        return todo
    arch = "90a" if cc == 90 else str(cc)
    return [
        *todo,
        f"{name} has no backend built for it: build with FLASH_EXT_CUDA_ARCHS={arch} "
        "pip install --no-build-isolation . in the source tree",
    ]


def report(facts: Facts) -> str:
    machine, build = facts.machine, facts.build
    version = machine.get("driver_version", 0)
    driver = (
        f"CUDA {version // 1000}.{version % 1000 // 10}"
        if version
        else f"none: {machine.get('driver', 'unknown')}"
    )
    gpus = [
        f"{g['name']}, {g['cc'] // 10}.{g['cc'] % 10}, {g['sm_count']} SMs"
        for g in machine.get("devices", [])
    ]
    torch_text = (
        f"{facts.torch}, {'CUDA ' + facts.torch_cuda if facts.torch_cuda else 'without CUDA'}"
        if facts.torch
        else "missing"
    )
    rows = [
        ("python", facts.python),
        ("torch", torch_text),
        ("operators", f"do not load: {facts.door_problem}" if facts.door_problem else "ready"),
        ("_C", f"does not load: {facts.module_problem}" if facts.module_problem else "ready"),
        ("driver", driver),
        ("gpus", "; ".join(gpus) or "none"),
        ("nvcc", facts.nvcc or "not on the PATH"),
    ]
    for backend in machine.get("backends", []):
        state = f"{backend['file']}: {backend['build']}" if backend["loaded"] else backend["reason"]
        rows.append((backend["name"], state))
    rows += [(f"test {name}", result) for name, result in facts.self_tests.items()]
    title = (
        f"flash_ext {VERSION} (commit {build.get('commit', 'unknown')}, {build.get('compiler', 'not built')})"
    )
    todo = advice(facts)
    lines = [title, *(f"  {name:<10}{text}" for name, text in rows)]
    lines += ["what to do", *(f"  - {sentence}" for sentence in todo)] if todo else ["all is well"]
    return "\n".join(lines)


def main() -> int:
    facts = collect()
    print(report(facts))
    return 1 if advice(facts) else 0


if __name__ == "__main__":
    sys.exit(main())
