"""Which GPU architectures to build for: what is asked, what each backend takes, what nvcc can do."""

import ctypes
import os
import re
import shutil
import subprocess
from typing import NamedTuple

# The one table of who takes what. Code for 8.0 runs on every 8.x too.
TAKES = {"fa1": r"7[05]", "fa2": r"8\d|9\d|1\d\d", "fa3": r"90a"}
# Kernels that are compiled for one architecture alone, by how their header's name begins.
OWN = {"volta_": "70"}
TAKES_IN_WORDS = "fa1 takes 70 and 75, fa2 takes 80 and newer, fa3 takes 90a"


class ArchError(ValueError):
    """FLASH_EXT_CUDA_ARCHS cannot be built here; the text says what to do."""


def find_nvcc() -> str | None:
    """Path of nvcc: $CUDA_HOME/bin, then PATH, then /usr/local/cuda/bin."""
    home = os.environ.get("CUDA_HOME")
    folders = [f"{home}/bin"] if home else []
    return next(
        filter(None, (shutil.which("nvcc", path=p) for p in [*folders, None, "/usr/local/cuda/bin"])), None
    )


def nvcc_version(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"\bV(\d+\.\d+\.\d+)", text)[1]


def nvcc_codes(nvcc: str) -> list[str]:
    """What `nvcc` makes machine code for, e.g. ["75", "80"]; suffixed forms (90a) are not in its list."""
    text = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    return sorted(re.findall(r"sm_(\d+)\b", text), key=int)


def local_gpus() -> list[str]:
    """Compute capabilities of the GPUs of this machine, e.g. ["90"], asked of the driver itself."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, value = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []

    def attribute(number: int, ordinal: int) -> int:
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    major, minor = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
    return sorted({f"{attribute(major, i)}{attribute(minor, i)}" for i in range(count.value)}, key=int)


def parse(text: str, gpus: list[str]) -> list[str]:
    """The architectures of a FLASH_EXT_CUDA_ARCHS: "native", "none" or a list such as "70;75;80;90a"."""
    if text == "none":
        return []
    if text == "native":  # on Hopper fa3 needs 90a, and fa2, which fills its gaps, 90
        return [arch for gpu in gpus for arch in ([gpu, "90a"] if gpu == "90" else [gpu])]
    archs = [word for word in re.split(r"[;,\s]+", text) if word]
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}[af]?", arch):
            forms = '"native", "none" or a list such as "70;75;80;90a"'
            raise ArchError(f'FLASH_EXT_CUDA_ARCHS must be {forms}, got "{arch}" in "{text}"')
        if not any(re.fullmatch(pattern, arch) for pattern in TAKES.values()):
            raise ArchError(f"no backend takes {arch} of FLASH_EXT_CUDA_ARCHS={text}: {TAKES_IN_WORDS}")
    return archs


def check_nvcc(archs: list[str], codes: list[str], nvcc: str, version: str) -> None:
    """Raises when nvcc cannot compile for one of archs."""
    for arch in archs:
        if arch.rstrip("af") in codes:
            continue
        dropped = arch in ("70", "72")
        advice = "CUDA 13 dropped 7.0 and 7.2: use an nvcc up to 12.9" if dropped else "Use a newer nvcc"
        raise ArchError(
            f"{nvcc} is version {version} and cannot compile for {arch} (it knows {', '.join(codes)}). "
            f"{advice}, named by CUDA_HOME or PATH, or take {arch} out of FLASH_EXT_CUDA_ARCHS"
        )


def by_backend(archs: list[str]) -> dict[str, list[str]]:
    """{"fa2": ["80", "90"], ...}: the backends to build; one that gets no architecture is left out."""
    taken = {name: [a for a in archs if re.fullmatch(pattern, a)] for name, pattern in TAKES.items()}
    if "75" in taken["fa1"]:  # code for 7.5 is tested and compared on a Hopper too
        taken["fa1"] += [a for a in archs if a == "90"]
    return {name: mine for name, mine in taken.items() if mine}


def gencodes(backend: str, archs: list[str]) -> dict[str, str]:
    """{"volta_": "-gencode=...", "": "..."}: the flags of each kernel, by how its header's name begins."""
    kinds = {prefix: [arch] for prefix, arch in OWN.items() if arch in archs}
    if rest := [arch for arch in archs if arch not in OWN.values()]:
        kinds[""] = rest
    # Built alone, kernels for 7.0 can be tested on a later card.
    ptx = backend == "fa2" or archs == ["70"]
    # What fa1 has for 9.0 is its code for 7.5, no more.
    return {
        prefix: gencode(mine, ptx, "75" if backend == "fa1" and "75" in mine else "")
        for prefix, mine in kinds.items()
    }


def gencode(archs: list[str], ptx: bool, language: str = "") -> str:
    """The -gencode flags for archs, with PTX of the newest: the driver compiles it for later cards.

    language: the one architecture that all code is written for, else each for its own.
    """
    flags = [f"-gencode=arch=compute_{language or a},code=sm_{a}" for a in archs]
    if ptx:
        newest = max(archs, key=int)
        flags.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    return " ".join(flags)


class Choice(NamedTuple):
    line: str  # for the user
    backends: dict[str, list[str]] = {}  # the architectures of each backend to build
    nvcc: str = ""
    version: str = ""  # of nvcc, "13.0.88"


def choose() -> Choice:
    """What this machine and its environment ask for; raises ArchError."""
    asked = os.environ.get("FLASH_EXT_CUDA_ARCHS", "").strip() or "native"
    archs = parse(asked, local_gpus() if asked == "native" else [])
    if not archs:
        return Choice("CPU only, as asked" if asked == "none" else "CPU only, no GPU on this machine")
    nvcc = find_nvcc()
    if nvcc is None and asked == "native":
        return Choice(f"CPU only, no nvcc for this machine's GPU ({', '.join(archs)})")
    if nvcc is None:
        raise ArchError(f"FLASH_EXT_CUDA_ARCHS={asked} needs nvcc: none in CUDA_HOME, PATH, /usr/local/cuda")
    version = nvcc_version(nvcc)
    check_nvcc(archs, nvcc_codes(nvcc), nvcc, version)
    return Choice(f"nvcc {version} for {', '.join(archs)}", by_backend(archs), nvcc, version)
