"""Compiles CUDA device code through NVRTC, where no nvcc knows the card: CUDA 13 dropped 7.0."""

import ctypes
import glob
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = "-std=c++17 -default-device --ptxas-options=-v --define-macro=FLASH_EXT_NVRTC"

# What kernels need of headers that NVRTC does not have; it knows CUDA's own names without one.
HEADERS = {
    "cstdint": """#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned uint32_t;
typedef unsigned long long uint64_t;
""",
    "cmath": "#pragma once\n#define INFINITY __int_as_float(0x7f800000)\n",
    "cuda_runtime.h": "#pragma once\n",
}


class Nvrtc:
    """One libnvrtc.so: a CUDA toolkit's, or that of a wheel nvidia-cuda-nvrtc-cu12 (or -cu11)."""

    def __init__(self, library: str, include: str):
        self.api, self.include = ctypes.CDLL(library), include
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.check(self.api.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    def check(self, code: int) -> None:
        if code:
            self.api.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"NVRTC: {self.api.nvrtcGetErrorString(code).decode()}")

    def compile(self, source: str, arch: str) -> tuple[bytes, str]:
        """The cubin (arch "sm_70") or PTX (arch "compute_70") of a source, and what ptxas said."""
        names = (ctypes.c_char_p * len(HEADERS))(*(name.encode() for name in HEADERS))
        texts = (ctypes.c_char_p * len(HEADERS))(*(text.encode() for text in HEADERS.values()))
        program = ctypes.c_void_p()
        self.check(
            self.api.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), b"instance.cu", len(HEADERS), texts, names
            )
        )
        words = [*FLAGS.split(), f"-arch={arch}", f"-I{ROOT / 'csrc'}", f"-I{self.include}"]
        flags = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        code = self.api.nvrtcCompileProgram(program, len(words), flags)
        log = self.text(program, "ProgramLog").decode(errors="replace").rstrip("\0")
        if code:
            raise RuntimeError(f"NVRTC {self.version} cannot compile for {arch}:\n{log}")
        kind = "CUBIN" if arch.startswith("sm") else "PTX"
        return self.text(program, kind), log

    def text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self.check(getattr(self.api, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.api, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw


def find() -> Nvrtc | None:
    """The newest NVRTC 12 among this Python's packages and /usr/local; None when there is none."""
    places = [f"{path}/nvidia" for path in [os.environ.get("FLASH_EXT_NVRTC", ""), *sys.path]]
    for place in places:
        for library in glob.glob(f"{place}/cuda_nvrtc/lib/libnvrtc.so.12"):
            return Nvrtc(library, f"{place}/cuda_runtime/include")
    for library in sorted(glob.glob("/usr/local/cuda-12*/lib64/libnvrtc.so.12"), reverse=True):
        return Nvrtc(library, str(Path(library).parent.parent / "include"))
    return None
