"""Builds flash_ext: one ninja file makes every library, then setuptools packs them.

  python setup.py build_ext --inplace              the libraries, into flash_ext/
  python setup.py build_ext --inplace --only=fa2   only those whose name begins so; the rest stays
  pip install --no-build-isolation .               also -e, and pip wheel

FLASH_EXT_CUDA_ARCHS  "native" (default), "none" or a list such as "80;90a"
FLASH_EXT_CUTLASS     a CUTLASS checkout (default: third_party/cutlass, fetched when absent)
MAX_JOBS, CXX and CUDA_HOME mean what they mean elsewhere; ccache is used when it is on the PATH.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import cuda_archs  # noqa: E402
import toolchain  # noqa: E402

TORCH = toolchain.find_torch()
from torch.utils.cpp_extension import BuildExtension  # noqa: E402

COMMON = "-O3 -std=c++17 -fPIC -pthread -fvisibility=hidden -Wall -Wextra"
# The CPU backend reads neither errno nor floating-point traps; both would stop the vectoriser.
CPU_FLAGS = "-fopenmp-simd -fno-math-errno -fno-trapping-math"
CPU_ISAS = {
    "cpu_avx2": "-march=x86-64-v3",
    "cpu_avx512": "-march=x86-64-v4",
    "cpu_avx512_bf16": "-march=x86-64-v4 -mavx512bf16",
}
NVCC_FLAGS = f"-O3 -std=c++17 --expt-relaxed-constexpr -Xptxas -v -Xcompiler={','.join(COMMON.split()[2:])}"
TORCH_TARGET = (
    "-DTORCH_TARGET_VERSION=0x020a000000000000"  # the stable ABI of 2.10, which every later torch has
)
EXPORTS = "{ global: flash_ext_backend*; PyInit_*; local: *; };\n"
NO_UNDEFINED = "-Xlinker -z -Xlinker defs"  # a backend that misses a symbol fails here, not at dlopen


class Object(NamedTuple):
    path: str
    rule: str
    source: str
    flags: str


class Library(NamedTuple):
    rule: str
    objects: list[Object]
    flags: str


class Plan:
    """What this build makes: `libraries` maps the dotted name of each to its recipe."""

    def __init__(self, folder: Path, version: str, only: str = "", kernels: str = ""):
        self.folder, self.version, self.commit = folder, version, toolchain.git_commit()
        # Of the libraries whose name begins with `only` the kernels whose line matches `kernels`.
        self.only, self.kernels = only, kernels if only else ""
        self.cxx = toolchain.find_cxx()
        try:
            line, archs, self.nvcc, self.nvcc_version = cuda_archs.choose()
        except cuda_archs.ArchError as error:
            toolchain.stop(str(error))
        self.archs = {name: a for name, a in archs.items() if (ROOT / f"csrc/{name}/backend.cpp").exists()}
        print(f"flash_ext {version}: {line}; CUDA backends: {', '.join(self.archs) or 'none'}", flush=True)
        self.cutlass = toolchain.find_cutlass() if self.archs else None
        self.libraries = {**self.cpu(), **self.doors(), **self.cuda()}

    def relative(self, path: str | Path) -> str:
        """Paths inside the checkout are told from the build folder, so that ccache hits from any checkout."""
        inside = ROOT in Path(path).parents
        return shlex.quote(os.path.relpath(path, self.folder) if inside else str(path))

    def compile(self, group: str, rule: str, sources, flags: str = "", archs: str = "") -> list[Object]:
        """One object a source. Only the files that tell versions get them: a commit rebuilds nothing else."""
        facts = {"COMMIT": self.commit, "VERSION": self.version, "ARCHS": archs or "none"}
        defines = " ".join(shlex.quote(f'-DFLASH_EXT_{name}="{value}"') for name, value in facts.items())
        objects = []
        for source in sources:
            own = f"{flags} {defines}" if source.name in ("backend.cpp", "build_info.cpp") else flags
            objects.append(Object(f"obj/{group}/{source.name}.o", rule, self.relative(source), own))
        return objects

    def cpu(self) -> dict[str, Library]:
        """A library for each instruction set: within one, the linker would mix their copies of templates."""
        isas = CPU_ISAS if platform.machine() == "x86_64" else {"cpu_generic": ""}
        sources = sorted(ROOT.glob("csrc/cpu/*.cpp"))
        objects = {
            name: self.compile(name, "cxx", sources, f"{CPU_FLAGS} {isa}") for name, isa in isas.items()
        }
        return {f"flash_ext.lib.{name}": Library("link_cxx", o, NO_UNDEFINED) for name, o in objects.items()}

    def doors(self) -> dict[str, Library]:
        archs = ", ".join(f"{name} {' '.join(mine)}" for name, mine in self.archs.items())
        core = self.compile("core", "cxx", sorted(ROOT.glob("csrc/core/*.cpp")), archs=archs)
        flags = f"{TORCH_TARGET} -isystem {self.relative(TORCH / 'include')}"
        torch_ops = self.compile("torch_ops", "cxx", sorted(ROOT.glob("csrc/bindings/torch_*.cpp")), flags)
        # The door must need libtorch.so itself: it brings torch's CUDA half, where there is one, into reach.
        libtorch = f"-L{self.relative(TORCH / 'lib')} -Wl,--no-as-needed -ltorch -Wl,--as-needed"
        doors = {"flash_ext.lib.torch_ops": Library("link_cxx", torch_ops + core, libtorch)}

        python = Path(sysconfig.get_path("include"))
        if not (python / "Python.h").exists():
            print(f"flash_ext: no {python}/Python.h (install python3-dev): _C is left out", flush=True)
            return doors
        flags = f"-isystem {self.relative(toolchain.find_pybind11())} -isystem {self.relative(python)}"
        module = self.compile("_C", "cxx", sorted(ROOT.glob("csrc/bindings/[!t]*.cpp")), flags)
        return {**doors, "flash_ext._C": Library("link_cxx", module + core, "")}

    def cuda(self) -> dict[str, Library]:
        libraries = {}
        for name, archs in self.archs.items():
            codes = cuda_archs.gencodes(name, archs)
            code = " ".join(codes.values())
            # What the backend looks its cards up in: "nvcc 13.0.88, sm_80 sm_90 compute_90".
            told = f"nvcc {self.nvcc_version}, " + " ".join(re.findall(r",code=(\w+)", code))
            has = " ".join(f"-DFLASH_EXT_HAS_{arch}" for arch in archs)
            objects = self.compile(name, "nvcc", sorted(ROOT.glob(f"csrc/{name}/*.cpp")), has, archs=told)
            for kernel in self.instances(name):
                prefix = next((p for p in cuda_archs.OWN if kernel.name.startswith(p)), "")
                objects += self.compile(name, "nvcc", [kernel], codes[prefix]) if prefix in codes else []
            # nvcc's link would add an empty image of its default architecture if it did not know these.
            libraries[f"flash_ext.lib.{name}"] = Library("link_nvcc", objects, f"{NO_UNDEFINED} {code}")
        return libraries

    def instances(self, backend: str) -> list[Path]:
        """Writes one small .cu for each line INSTANCE(header, ...) of csrc/<backend>/instances.inc.

        And the table of those lines, which the backend includes.
        """
        folder, paths = self.folder / f"instances/{backend}", []
        table = (ROOT / f"csrc/{backend}/instances.inc").read_text().splitlines()
        pattern = self.kernels if backend.startswith(self.only) else ""
        wanted = [line for line in table if not line.startswith("INSTANCE(") or re.search(pattern, line)]
        lines = [line for line in wanted if line.startswith("INSTANCE(")]
        if not lines:
            toolchain.stop(f"no line of csrc/{backend}/instances.inc matches {pattern!r}")
        for line in lines:
            words = re.findall(r"\w+", line)[1:]
            paths.append(folder / f"{'_'.join(words)}.cu")
            toolchain.write_if_changed(paths[-1], f'#include "{backend}/{words[0]}.cuh"\n\n{line}\n')
        toolchain.write_if_changed(folder / "instances.inc", "\n".join(wanted) + "\n")
        for left_over in set(folder.glob("*.cu")) - set(paths):
            left_over.unlink()
        return paths

    def ninja_file(self) -> str:
        ccache = "ccache " if shutil.which("ccache") else ""
        include = f"-Iinstances -I{self.relative(ROOT / 'csrc')}"
        tail = "$flags -MD -MF $out.d -c $in -o $out"
        told = "\n description = $out"
        deps = f"\n depfile = $out.d\n deps = gcc{told}"
        link = "-shared $in -o $out -Xlinker --version-script=exports.map $flags"
        lines = [
            f"rule cxx\n command = {ccache}{self.cxx} {COMMON} {include} {tail}{deps}",
            f"rule link_cxx\n command = {self.cxx} {link}{told}",
        ]
        if self.archs:
            nvcc = f"{self.nvcc} -ccbin {self.cxx}"
            python = shlex.quote(sys.executable)
            nvcc = f"{ccache}{nvcc} {NVCC_FLAGS} {include}"
            measured = f"{python} {self.relative(ROOT / 'tools/compile_kernel.py')} $out.log {nvcc}"
            cutlass = f"-isystem {self.relative(self.cutlass)}"
            lines += [
                f"rule nvcc\n command = {measured} {cutlass} {tail}{deps}",
                f"rule link_nvcc\n command = {self.nvcc} -ccbin {self.cxx} -cudart static {link}{told}",
            ]
        objects = {o for library in self.libraries.values() for o in library.objects}
        lines += [f"build {o.path}: {o.rule} {o.source}\n flags = {o.flags}" for o in sorted(objects)]
        for name, (rule, parts, flags) in self.libraries.items():
            inputs = " ".join(o.path for o in parts)
            lines.append(f"build out/{name}.so: {rule} {inputs} | exports.map\n flags = {flags}")
        return "\n".join(lines) + "\n"


class Build(BuildExtension):
    """BuildExtension with one parallel, incremental ninja run in place of its loop over extensions."""

    user_options = BuildExtension.user_options + [
        ("only=", None, "build the libraries whose name begins so and leave the others alone"),
        ("kernels=", None, "with --only: build only the kernels whose line in instances.inc matches"),
    ]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, use_ninja=False, **kwargs)

    def initialize_options(self):
        super().initialize_options()
        self.only, self.kernels = "", ""

    def finalize_options(self):
        folder = ROOT / f"build/ninja-{sys.implementation.cache_tag}"  # fixed: pip empties its own
        self.plan = Plan(folder, self.distribution.get_version(), self.only, self.kernels)
        names = [name for name in self.plan.libraries if name.rpartition(".")[2].startswith(self.only)]
        self.distribution.ext_modules = [Extension(name, []) for name in names]
        super().finalize_options()

    def get_ext_filename(self, ext_name):
        """The files of lib/ are no Python modules and carry no Python's suffix."""
        if ext_name.endswith("_C"):
            return super().get_ext_filename(ext_name)
        return os.path.join(*ext_name.split(".")) + ".so"

    def build_extensions(self):
        folder, names = self.plan.folder, [extension.name for extension in self.extensions]
        toolchain.write_if_changed(folder / "exports.map", EXPORTS)
        toolchain.write_if_changed(folder / "build.ninja", self.plan.ninja_file())
        jobs = os.environ.get("MAX_JOBS") or str(toolchain.default_jobs())
        ninja = [*toolchain.find_ninja(), "-C", folder, "-j", jobs, *(f"out/{name}.so" for name in names)]
        environment = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1", **os.environ}
        if subprocess.run(ninja, env=environment).returncode != 0:
            toolchain.stop("the build failed, see above")
        self.clear(Path(self.build_lib))
        for name in names:
            target = Path(self.get_ext_fullpath(name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / f"out/{name}.so", target)

    def copy_extensions_to_source(self):
        self.clear(ROOT)
        super().copy_extensions_to_source()

    def clear(self, root: Path) -> None:
        """A library of an earlier build must not pass for one of this build."""
        if not self.only:
            shutil.rmtree(root / "flash_ext/lib", ignore_errors=True)
        (root / "flash_ext/lib").mkdir(parents=True, exist_ok=True)


setup(ext_modules=[Extension("flash_ext._C", [])], cmdclass={"build_ext": Build})
