"""Plants faults into the kernels, one at a time, and shows that a named test of tests/gpu catches each.

  python tools/mutants.py build [NAME ...]   build/mutants/NAME/flash_ext, with a few kernels; needs no GPU
  python tools/mutants.py run [NAME ...]     on a GPU: the named test of each must fail
  python tools/mutants.py jitter             build/jitter/flash_ext: no fault, but late waits; of one type
  python tools/mutants.py volta              build/volta, build/volta-jitter: both of fa1's kernels for 7.0

FLASH_EXT_CUDA_ARCHS defaults to "75;90;90a"; kernels for 7.0 are made by tools/volta/bin/nvcc. A "control" is
the unchanged source, which must pass every named test of its backend; they run in parts side by side.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import toolchain
from planted_faults import CONTROLS, MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/mutants"
HANGS, TOO_LONG = 60, 300  # seconds: after which a fault that hangs is caught, and any other is wrong
CONTROL_PARTS = 6


def slug(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def plant(csrc: Path, mutant: Mutant) -> None:
    edits = [(mutant.file, mutant.old, mutant.new)] if mutant.old else []
    if mutant.late:
        edits.append(("device/jitter.cuh", "#pragma once", "#pragma once\n#define FLASH_EXT_JITTER"))
    for file, old, new in edits:
        text = (csrc / file).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"csrc/{file} must hold this text once, not {text.count(old)} times: {old}")
        (csrc / file).write_text(text.replace(old, new))


def build(folder: Path, mutant: Mutant, backends: list[str], needs=lambda instance: True) -> None:
    """A copy of the package in `folder`, with these instances of its backends and the fault.

    fa1 with a fault in the kernels for 7.0 is built for that card alone.
    """
    shutil.rmtree(folder, ignore_errors=True)
    without = shutil.ignore_patterns("__pycache__", "lib", "*.so")
    for name in ("csrc", "flash_ext", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=without)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, folder / name)
    (folder / "flash_ext/lib").mkdir()
    shutil.copy2(ROOT / "flash_ext/lib/torch_ops.so", folder / "flash_ext/lib")
    plant(folder / "csrc", mutant)
    for table in (folder / f"csrc/{backend}/instances.inc" for backend in backends):
        lines = table.read_text().splitlines(keepends=True)
        kept = (line for line in lines if not line.startswith("INSTANCE") or needs(line))
        table.write_text("".join(kept))
    cutlass = toolchain.find_cutlass().parent
    environment = {"FLASH_EXT_CUDA_ARCHS": "75;90;90a", "FLASH_EXT_CUTLASS": str(cutlass), **os.environ}
    if mutant.is_volta:
        environment |= {"FLASH_EXT_CUDA_ARCHS": "70", "CUDA_HOME": str(folder / "tools/volta")}
        environment.setdefault("FLASH_EXT_NVRTC", sysconfig.get_path("purelib"))
    for backend in backends:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", f"--only={backend}"]
        subprocess.run(command, cwd=folder, env=environment, check=True)
    for leftover in ("build", "csrc", "tools"):
        shutil.rmtree(folder / leftover)


def run(mutant: Mutant, part: str = "0/1") -> bool:
    """Prints a line about it, with this part of its tests; whether it went as it must."""
    is_control = not mutant.test
    alike = (m for m in MUTANTS if (m.backend, m.is_volta) == (mutant.backend, mutant.is_volta))
    names = {m.test for m in alike} if is_control else {mutant.test}
    tests = [f"{ROOT}/tests/gpu/{name}" for name in sorted(names)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider", *tests]
    command += [f"--part={part}"]
    start, environment = time.monotonic(), os.environ | {"OMP_NUM_THREADS": "2"}  # several run side by side
    # Run in its folder, Python finds the mutant's package before any other.
    folder = FOLDER / slug(mutant.name)
    limit = HANGS if mutant.hangs else TOO_LONG
    try:
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit
        )
        code, output = ran.returncode, ran.stdout
    except subprocess.TimeoutExpired:
        code, output = "hung", f"did not end in {limit} s"
    # pytest's code for "tests ran and some failed" is 1.
    expected = 0 if is_control else "hung" if mutant.hangs else 1
    outcomes = {0: "passed", 1: "caught", "hung": "caught" if mutant.hangs else "hung"}
    outcome = outcomes.get(code, f"broken (pytest's exit code {code})")
    said = next((line for line in output.splitlines() if line.startswith("FAILED")), "")
    said = said.rpartition("tests/gpu/")[2] or " ".join(output.strip().splitlines()[-1:])
    verdict = outcome if code == expected else f"{outcome}, WRONG"
    name = mutant.name if part == "0/1" else f"{mutant.name}, part {part}"
    print(f"{name}: {verdict} ({time.monotonic() - start:.0f} s): {said}", flush=True)
    return code == expected


def main() -> int:
    mode, *names = sys.argv[1:] or ["help"]
    wanted = [
        mutant
        for mutant in (*CONTROLS, *MUTANTS)
        if not names or mutant.name in names or slug(mutant.name) in names
    ]
    if mode == "jitter":
        backends = [path.stem for path in (ROOT / "flash_ext/lib").glob("fa?.so")]
        late = CONTROLS[0]._replace(late=True)
        build(ROOT / "build/jitter", late, backends, lambda line: "__half" not in line)
    elif mode == "volta":
        unchanged = next(control for control in CONTROLS if control.is_volta)
        build(ROOT / "build/volta", unchanged, ["fa1"])
        build(ROOT / "build/volta-jitter", unchanged._replace(late=True), ["fa1"])
    elif mode == "build":
        for mutant in wanted:
            print(mutant.name, flush=True)
            build(FOLDER / slug(mutant.name), mutant, [mutant.backend], mutant.needs)
    elif mode == "run":
        jobs = [
            (mutant, f"{part}/{parts}")
            for mutant in wanted
            for parts in [1 if mutant.test else CONTROL_PARTS]
            for part in range(parts)
        ]
        with ThreadPoolExecutor(max_workers=min(12, os.cpu_count() or 1)) as pool:
            results = list(pool.map(lambda job: run(*job), jobs))
        print(f"{sum(results)} of {len(results)} as they must be")
        return not all(results)
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
