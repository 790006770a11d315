"""Makes the project's own environment: python3 tools/make_env.py FOLDER [torch for pip to install]

A Python that already has torch >= 2.10 keeps it: the new environment sees all that this Python sees, nothing
is fetched twice, and a GPU machine keeps its CUDA torch. (--system-site-packages would not do: of a Python
that is itself a virtual environment it shows only what the base has.)
"""

import importlib.util
import subprocess
import sys
from pathlib import Path


def has_torch() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    from importlib.metadata import version

    return tuple(map(int, version("torch").split(".")[:2])) >= (2, 10)


def make(folder: Path) -> tuple[Path, Path]:
    """An empty environment with pip: (its Python, its site-packages)."""
    pip = importlib.util.find_spec("ensurepip") is not None  # Debian keeps it in a package of its own
    subprocess.run(
        [sys.executable, "-m", "venv", "--clear", *([] if pip else ["--without-pip"]), folder], check=True
    )
    python = folder / "bin/python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    if not pip:
        subprocess.run([sys.executable, "-m", "pip", "install", "--target", packages, "pip"], check=True)
    return python, Path(packages)


def main() -> None:
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    python, packages = make(folder)
    if has_torch():
        theirs = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        lines = [f"import site; site.addsitedir({path!r})\n" for path in theirs]
        (packages / "outer.pth").write_text("".join(lines))
    elif wanted:
        subprocess.run([python, "-m", "pip", "install", *wanted], check=True)


if __name__ == "__main__":
    main()
