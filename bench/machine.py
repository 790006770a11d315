"""The header of a result: which machine, which build, which clocks."""

import datetime
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import torch

import flash_ext  # noqa: F401  (its operators)

ROOT = Path(__file__).parent.parent


def _output(*command) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str:
    """Short commit of the library that runs, "-dirty" when the checkout is of that commit and was changed."""
    built = build_info().get("commit") or "unknown"
    text = _output("git", "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*")
    is_built = text is not None and (built.startswith(text.split("-")[0]) or built == "unknown")
    return text if is_built else built


def build_info() -> dict:
    return json.loads(torch.ops.flash_ext.build_info())


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _tool_version(tool: str) -> str | None:
    text = _output(tool, "--version") if shutil.which(tool) else None
    found = re.search(r"V(\d+\.\d+\.\d+)", text or "")
    return found.group(1) if found else None


def _smi(query: str) -> list[str]:
    """nvidia-smi's command that asks the GPU in use, of perhaps several."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    return ["nvidia-smi", f"--id={gpu}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]


def header(name: str, device: str, copy_tbs=None, cublas_tflops=None, clocks_mhz=None) -> dict:
    is_cuda = device == "cuda"
    return {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "gpu": device_name(device) if is_cuda else None,
        "cpu": device_name("cpu"),
        "threads": torch.get_num_threads(),
        "driver": _output(*_smi("driver_version")) if is_cuda else None,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "nvcc": _tool_version("nvcc"),
        "ptxas": _tool_version("ptxas"),
        "clocks_mhz": clocks_mhz,
        "copy_tbs": copy_tbs,
        "cublas_tflops": cublas_tflops,
        "flash_ext": build_info(),
    }


def save(folder: Path, head: dict, rows: list[dict], memory: list[dict]) -> Path:
    """Write FOLDER/<gpu or cpu>/<date>-<commit>-<name>.json."""
    device = re.sub(r"[^a-z0-9]+", "-", (head["gpu"] or "cpu").lower()).strip("-")
    path = folder / device / f"{head['date']}-{head['commit']}-{head['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"header": head, "rows": rows, "memory": memory}
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


class Clocks:
    """The GPU's clocks in MHz while the block runs, sampled twice a second: [lowest, median, highest]."""

    def __init__(self, device: str):
        self.command = None
        if device == "cuda" and shutil.which("nvidia-smi"):
            self.command = [*_smi("clocks.sm"), "-lms", "500"]
        self.mhz = None

    def __enter__(self):
        self.process = self.command and subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *exception):
        if self.process:
            self.process.terminate()
            seen = sorted(int(line) for line in self.process.communicate()[0].split() if line.isdigit())
            self.mhz = [seen[0], statistics.median(seen), seen[-1]] if seen else None
