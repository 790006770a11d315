"""What the build needs from the machine; whatever is missing stops it with one sentence."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_MIN = (2, 10)


def stop(sentence: str):
    raise SystemExit(f"flash_ext: {sentence}")


def has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def find_torch() -> Path:
    """Folder of the torch to build against."""
    advice = "pip install torch first, then pip install --no-build-isolation ."
    if not has_package("torch"):
        stop(f"the build needs torch >= 2.10, and its Python ({sys.executable}) has none: {advice}")
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < TORCH_MIN:
        stop(f"the build needs torch >= 2.10, got {torch.__version__}: {advice}")
    return Path(torch.__file__).parent


def find_cxx() -> str:
    named = os.environ.get("CXX")
    names = [named] if named else ["g++", "c++", "clang++"]
    found = next(filter(shutil.which, names), None)
    return found or stop(f"no C++ compiler on the PATH ({', '.join(names)}): install g++ >= 11, or set CXX")


def find_ninja() -> list[str]:
    if has_package("ninja"):
        return [sys.executable, "-m", "ninja"]
    return [shutil.which("ninja") or stop("the build needs ninja: pip install ninja")]


def find_pybind11() -> str:
    if not has_package("pybind11"):
        stop("the build needs pybind11: pip install pybind11")
    import pybind11

    return pybind11.get_include()


def find_cutlass() -> Path:
    """CUTLASS's headers: FLASH_EXT_CUTLASS's, third_party/cutlass's, or the pinned ones, fetched there."""
    named = os.environ.get("FLASH_EXT_CUTLASS")
    include = Path(named or ROOT / "third_party/cutlass").resolve() / "include"
    if not (include / "cute/arch").is_dir():
        if named:
            stop(f"FLASH_EXT_CUTLASS must be a CUTLASS checkout: {include}/cute/arch does not exist")
        fetch_cutlass(include)
    return include


def fetch_cutlass(include: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run([*pip, "-r", ROOT / "third_party/cutlass.txt", "-d", folder]).returncode != 0:
            stop("no CUTLASS fetched: put a 4.2 checkout into third_party/cutlass or set FLASH_EXT_CUTLASS")
        headers = "cutlass_library/source/include/"
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(headers)])
        include.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(folder, headers), include)


def git_commit() -> str:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return "unknown"
    git = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    )
    return git.stdout.strip() if git.returncode == 0 else "unknown"


def default_jobs() -> int:
    """As many compilers as there are cores, with 2 GiB of memory for each."""
    gibibytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return max(1, min(len(os.sched_getaffinity(0)), gibibytes // 2))


def write_if_changed(path: Path, text: str) -> None:
    """Leaves the time stamp of an equal file alone, so that ninja rebuilds nothing."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
