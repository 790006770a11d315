"""Tries a wheel outside the checkout: python tools/check_wheel.py dist/NAME.whl torch==2.13.0 torch==2.14.1

First its size and the symbols of its libraries; then, for each torch named, the wheel and the smoke part of
the tests in a fresh environment.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import make_env

ROOT = Path(__file__).resolve().parent.parent
MAX_MB = 100


def nm(path: Path, *options: str) -> list[str]:
    """Names of the dynamic symbols, as they are in the file."""
    text = subprocess.run(["nm", "-D", *options, path], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1].partition("@")[0] for line in text.splitlines()]


def symbol_faults(package: Path) -> list[str]:
    """One sentence for each library of `package` (a folder flash_ext) with a symbol it must not have."""
    faults = []
    for path in sorted(package.glob("lib/*.so")):
        if path.name == "torch_ops.so":
            unstable = [name for name in nm(path) if re.match(r"_Z\w*?(3c10|2at)\d", name)]
            if unstable:
                faults.append(f"{path.name} leans on unstable symbols of torch: {', '.join(unstable[:5])}")
        elif (exported := nm(path, "--defined-only")) != ["flash_ext_backend"]:
            faults.append(
                f"{path.name} must export flash_ext_backend alone, exports {', '.join(exported[:5])}"
            )
    return faults


def wheel_faults(wheel: Path, folder: Path) -> list[str]:
    megabytes = wheel.stat().st_size / 1e6
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    libraries = sorted(path.name for path in (folder / "flash_ext/lib").glob("*.so"))
    print(f"{wheel.name}: {megabytes:.1f} MB, {', '.join(libraries)}", flush=True)
    faults = symbol_faults(folder / "flash_ext")
    return faults + ([f"{megabytes:.0f} MB, at most {MAX_MB}"] if megabytes > MAX_MB else [])


def try_with(torch: str, wheel: Path, folder: Path) -> bool:
    """Whether the smoke tests pass in a fresh environment with this torch."""
    python, _ = make_env.make(folder / "env")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *torch.split(), "numpy", "pytest", "hypothesis", wheel], check=True)
    shutil.copytree(ROOT / "tests", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)  # the markers
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    where = (
        "import torch, flash_ext; print('torch', torch.__version__, 'flash_ext in', flash_ext.__path__[0])"
    )
    subprocess.run([python, "-c", where], cwd=folder, env=environment, check=True)
    tests = [python, "-m", "pytest", "-q", "-m", "smoke", "-p", "no:cacheprovider", "tests"]
    return subprocess.run(tests, cwd=folder, env=environment).returncode == 0


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="flash_ext-wheel-") as name:
        folder = Path(name)
        faults = wheel_faults(wheel, folder / "unpacked")
        for torch in sys.argv[2:]:
            own = folder / re.sub(r"\W+", "-", torch)
            own.mkdir()
            if not try_with(torch, wheel, own):
                faults.append(f"the smoke tests fail with {torch}")
            shutil.rmtree(own)  # a torch with CUDA takes 5 GB
    sys.exit("\n".join(faults) if faults else None)


if __name__ == "__main__":
    main()
