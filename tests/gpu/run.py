"""Runs the GPU suite in several processes side by side, for one alone waits for Python most of the time.

  python tests/gpu/run.py [-j N] [--package FOLDER] [pytest's arguments]

FOLDER holds another build of the package, such as build/volta. Each process takes every N-th test (`--part` of
conftest.py) on one of the GPUs here, in turn. The exit code is the worst of theirs.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def end_early(*_) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice: to the process and to its group
    sys.exit(1)


def main() -> int:
    parser = argparse.ArgumentParser()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = shown.split(",") if shown else [str(i) for i in range(max(1, torch.cuda.device_count()))]
    parser.add_argument("-j", type=int, default=max(1, min(12 * len(gpus), (os.cpu_count() or 1) - 2)))
    parser.add_argument("--package", default=ROOT, type=Path)
    options, pytest_args = parser.parse_known_args()
    if not (options.package / "flash_ext").is_dir():
        parser.error(f"{options.package} holds no flash_ext")
    start, parts = time.monotonic(), []
    for part in range(options.j):
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests/gpu"), "-m", "gpu", "-q", *pytest_args]
        command += [f"--part={part}/{options.j}", "-p", "no:cacheprovider"]
        mine = gpus[part % len(gpus) :] + gpus[: part % len(gpus)]  # its own first
        environment = os.environ | {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ",".join(mine)}
        output = tempfile.TemporaryFile("w+")
        # Run in its folder, Python finds that package before any other.
        process = subprocess.Popen(
            command, cwd=options.package, env=environment, stdout=output, stderr=output
        )
        parts.append((process, output))
    signal.signal(signal.SIGTERM, end_early)
    codes = []
    try:
        codes += (process.wait() for process, _ in parts)
    finally:  # also when somebody ends it early: what they have said so far
        for part, (process, output) in enumerate(parts):
            process.kill()
            code = process.wait()
            output.seek(0)
            lines = output.read().splitlines()
            # Of a part that passed, the summary: what stands behind the dots.
            told = lines if code else [line for line in lines if " passed" in line or "held against" in line]
            print(f"---- part {part} of {options.j}", *told, sep="\n", flush=True)
    worst = max(map(abs, codes))
    print(f"---- {'passed' if not worst else 'FAILED'} in {time.monotonic() - start:.0f} s")
    return worst


if __name__ == "__main__":
    sys.exit(main())
