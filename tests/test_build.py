"""The build's own rules: layers, format, architectures, symbols, kernel report."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "setup.py").exists():
    pytest.skip("needs the checkout", allow_module_level=True)

sys.path.insert(0, str(ROOT / "tools"))
import check_layers  # noqa: E402
import check_wheel  # noqa: E402
import cuda_archs  # noqa: E402
import kernel_report  # noqa: E402
import toolchain  # noqa: E402

CODES = ["75", "80", "86", "90", "100", "120"]  # what an nvcc 13 lists


@pytest.fixture
def copy(tmp_path):
    """The files that lint reads, to be spoilt."""
    for name in ("csrc", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("Makefile", "pyproject.toml", "setup.py", ".clang-format"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def append(path, text):
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(text)


@pytest.mark.parametrize(
    ("name", "include", "fault"),
    [
        (
            "core/status.h",
            "<torch/csrc/stable/tensor.h>",
            "csrc/core may include the standard library, core/",
        ),
        ("core/status.h", '"cpu/simd.h"', "includes cpu/simd.h"),
        ("core/status.h", '"status.h"', "includes status.h"),
        ("cpu/backend.cpp", "<cuda_runtime.h>", "csrc/cpu may include"),
        ("fa2/backend.cpp", '"cute/tensor.hpp"', "includes cute/tensor.hpp"),
        ("fa2/backend.cpp", '"fa3/launch.cuh"', "includes fa3/launch.cuh"),
        ("bindings/torch_ops.cpp", "<torch/extension.h>", "includes torch/extension.h"),
        ("cuda/x.h", "<cstdint>", "a folder of this name would take the place of <cuda/...>"),
        ("utils/x.h", "<cstdint>", "csrc/utils is no layer"),
    ],
)
def test_layers(copy, name, include, fault):
    append(copy / "csrc" / name, f"#include {include}\n")
    found = check_layers.check(copy)
    assert any(sentence.startswith("csrc/") and fault in sentence for sentence in found), found


def test_length(copy):
    append(copy / "csrc/core/long.h", "\n" * 401)
    append(copy / "csrc/fa2/fwd_mainloop.cuh", "\n" * 401)
    found = check_layers.check(copy)
    assert "csrc/core/long.h: 401 lines, at most 400" in found
    assert not any("fwd_mainloop" in sentence for sentence in found)


@pytest.mark.skipif(not (ROOT / ".venv/lint").exists(), reason="make lint has not set up its tools")
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("#include <torch/csrc/stable/tensor.h>\n", "includes torch/csrc/stable/tensor.h"),
        ("inline int  f( ) {return 1;}\n", "code should be clang-formatted"),
    ],
)
def test_make_lint_fails(copy, text, fault):
    (copy / ".venv").symlink_to(ROOT / ".venv")
    append(copy / "csrc/core/status.h", text)
    lint = subprocess.run(["make", "-o", ".venv/lint", "lint"], cwd=copy, capture_output=True, text=True)
    assert lint.returncode != 0
    assert fault in lint.stdout + lint.stderr


@pytest.mark.parametrize(
    ("text", "gpus", "archs"),
    [
        ("none", ["80"], []),
        ("native", [], []),
        ("native", ["80", "90"], ["80", "90", "90a"]),
        ("70;75;80;90a", [], ["70", "75", "80", "90a"]),
        ("80, 90", [], ["80", "90"]),
    ],
)
def test_archs(text, gpus, archs):
    assert cuda_archs.parse(text, gpus) == archs


def test_archs_by_backend():
    backends = cuda_archs.by_backend(["70", "75", "80", "86", "90a", "120"])
    assert backends == {"fa1": ["70", "75"], "fa2": ["80", "86", "120"], "fa3": ["90a"]}
    assert cuda_archs.by_backend(["75", "90", "90a"])["fa1"] == ["75", "90"]
    assert cuda_archs.by_backend(["90a"]) == {"fa3": ["90a"]}
    assert cuda_archs.gencodes("fa3", ["90a"])[""] == "-gencode=arch=compute_90a,code=sm_90a"
    assert cuda_archs.gencodes("fa2", ["80", "120"])[""].endswith(
        " -gencode=arch=compute_120,code=compute_120"
    )
    apart = cuda_archs.gencodes("fa1", ["70", "75"])
    assert apart == {p: f"-gencode=arch=compute_{a},code=sm_{a}" for p, a in {"volta_": 70, "": 75}.items()}
    assert cuda_archs.gencodes("fa1", ["70"])["volta_"].endswith(",code=compute_70"), (
        "for tests on later cards"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("8.0", 'must be "native", "none" or a list such as "70;75;80;90a", got "8.0" in "8.0"'),
        ("80;sm_90", 'got "sm_90"'),
        ("61", "no backend takes 61 of FLASH_EXT_CUDA_ARCHS=61: fa1 takes 70 and 75"),
        ("100a", "no backend takes 100a"),
        (
            "70;80",
            "is version 13.0.88 and cannot compile for 70 (it knows 75, 80, 86, 90, 100, 120). CUDA 13 dropped 7.0",
        ),
        ("121", "Use a newer nvcc"),
    ],
)
def test_archs_refused(text, sentence):
    with pytest.raises(cuda_archs.ArchError) as error:
        cuda_archs.check_nvcc(cuda_archs.parse(text, []), CODES, "nvcc", "13.0.88")
    assert sentence in str(error.value)


def test_archs_need_nvcc(monkeypatch):
    monkeypatch.setattr(cuda_archs, "find_nvcc", lambda: None)
    monkeypatch.setenv("FLASH_EXT_CUDA_ARCHS", "80")
    with pytest.raises(cuda_archs.ArchError, match="needs nvcc"):
        cuda_archs.choose()
    monkeypatch.setenv("FLASH_EXT_CUDA_ARCHS", "native")
    monkeypatch.setattr(cuda_archs, "local_gpus", lambda: ["90"])
    assert cuda_archs.choose() == cuda_archs.Choice("CPU only, no nvcc for this machine's GPU (90, 90a)")


def test_missing_tools(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(
        SystemExit, match=r"flash_ext: the build needs torch >= 2.10, got 2.9.1\+cu128: pip install"
    ):
        toolchain.find_torch()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match=r"flash_ext: the build needs torch >= 2.10, and .* has none"):
        toolchain.find_torch()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match="no C\\+\\+ compiler on the PATH \\(no-such-compiler\\)"):
        toolchain.find_cxx()


def test_symbols():
    if not shutil.which("nm"):
        pytest.skip("no nm")
    import flash_ext

    package = Path(flash_ext.__file__).parent
    assert list(package.glob("lib/cpu_*.so")) and (package / "lib/torch_ops.so").exists()
    assert check_wheel.symbol_faults(package) == []


PTXAS = """ptxas info    : Compiling entry function '_Z6kernelv' for 'sm_90a'
ptxas info    : Function properties for _Z6kernelv
    {stack} bytes stack frame, {stack} bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, {stack} bytes stack, 1024 bytes smem
"""


def test_kernel_report():
    (kernel,) = kernel_report.read_log("fa3/fwd_plain", PTXAS.format(stack=16))
    assert kernel == kernel_report.Kernel("fa3/fwd_plain", "sm_90a", "_Z6kernelv", 168, 16, 8, 16, 1024)
    assert kernel_report.faults("fa3/fwd_modified", PTXAS.format(stack=64)) == []
    for instance, stack in (("fa3/fwd_plain", 16), ("fa3/fwd_modified", 72)):
        assert "bytes of spills or stack" in kernel_report.faults(instance, PTXAS.format(stack=stack))[0]
    warning = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    )
    assert "C7510" in kernel_report.faults("fa3/fwd_plain", warning)[0]


def test_kernel_report_of_a_compilation():
    plain = PTXAS.format(stack=0).replace("8 bytes", "0 bytes")
    text = plain + plain.replace("sm_90a", "sm_80")
    assert kernel_report.cost(f"{text}cost: 30.0 CPU s, 0.50 GiB\n") == (15.0, 0.5)  # two architectures
    assert kernel_report.faults("fa2/fwd", f"{text}cost: 40.0 CPU s, 1.00 GiB\n") == []
    for cost in ("42.0 CPU s, 0.50 GiB", "3.0 CPU s, 1.25 GiB"):
        (fault,) = kernel_report.faults("fa2/fwd", f"{text}cost: {cost}\n")
        assert "to compile, at most 20 s and 1.0 GiB" in fault


SASS = """
	code for sm_90a
		Function : _ZN9flash_ext3fa36kernelEv
        /*0000*/                   LDC R1, c[0x0][0x28] ;           /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 UTMALDG.4D [UR8], [UR4] ;        /* 0x00000a00ff017b82 */
        /*0020*/              @UP1 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24 ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24 ;
"""


def test_kernel_report_of_instructions():
    ((key, counter),) = kernel_report.read_instructions(SASS).items()
    assert key == ("sm_90a", "_ZN9flash_ext3fa36kernelEv")
    assert [kernel_report.total(counter, i) for i in ("HGMMA", "UTMALDG", "MUFU", "")] == [2, 1, 0, 4]
    assert kernel_report.missing("fa3/fwd", *key, counter) == []
    counter = kernel_report.Counter({"HMMA.1688.F32": 3})
    assert kernel_report.missing("fa3/fwd", *key, counter) == [
        "fa3/fwd on sm_90a: has no HGMMA",
        "fa3/fwd on sm_90a: has no UTMALDG",
    ]
    assert kernel_report.missing("fa3/fwd", "sm_90a", "_ZN9flash_ext6device6finishEv", counter) == []


def test_a_compilation_is_measured(tmp_path):
    script = "import sys; print('ptxas info : fine'); print('warning: mind this'); sys.exit(3)"
    command = [
        sys.executable,
        ROOT / "tools/compile_kernel.py",
        tmp_path / "log",
        sys.executable,
        "-c",
        script,
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (3, "warning: mind this\n")
    log = (tmp_path / "log").read_text()
    assert "ptxas info : fine" in log and kernel_report.cost(log)[1] > 0
