"""Builds the ablation of fa2's forward (csrc/fa2/ablation), which bench/ablation.py measures.

FLASH_EXT_CUDA_ARCHS names the GPUs, as for the package; by default those of this machine.
"""

import subprocess
from pathlib import Path

import cuda_archs
import toolchain

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build/ablation/fa2_ablation.so"


def main() -> None:
    try:
        choice = cuda_archs.choose()
    except cuda_archs.ArchError as error:
        toolchain.stop(str(error))
    archs = choice.backends.get("fa2") or toolchain.stop(f"no GPU that runs fa2 ({choice.line})")
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    flags = (
        "-O3 -std=c++17 --expt-relaxed-constexpr -Xcompiler=-fPIC,-fvisibility=hidden -cudart static -shared"
    )
    command = [choice.nvcc, "-ccbin", toolchain.find_cxx(), *flags.split(), f"-I{ROOT}/csrc"]
    command += ["-isystem", toolchain.find_cutlass(), *cuda_archs.gencode(archs, ptx=True).split()]
    subprocess.run([*command, ROOT / "csrc/fa2/ablation/ablation.cu", "-o", LIBRARY], check=True)
    print(LIBRARY.relative_to(ROOT))


if __name__ == "__main__":
    main()
