"""``python -m flash_ext``: what the doctor prints, and its advice for machines that are not this one."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flash_ext
from flash_ext.__main__ import Facts, advice, report, serves

CPU = {"name": "cpu", "loaded": True, "file": "cpu_avx2.so", "build": "gcc 12.2.0, avx2", "reason": ""}
FA2 = {"name": "fa2", "loaded": True, "file": "fa2.so", "build": "nvcc 13.0.88, sm_80 sm_90", "reason": ""}
FA3 = {
    "name": "fa3",
    "loaded": False,
    "file": "fa3.so",
    "build": "",
    "reason": "not built: lib/fa3.so is missing",
}
H200 = {"ordinal": 0, "name": "NVIDIA H200", "cc": 90, "sm_count": 132}


def facts(backends=(FA3, FA2, CPU), gpus=(H200,), driver=13000, **changes):
    machine = {"backends": list(backends), "driver": "", "driver_version": driver, "devices": list(gpus)}
    fields = {
        "python": "3.12.3",
        "torch": "2.11.0",
        "torch_cuda": "13.0",
        "nvcc": "13.0.88",
        "machine": machine,
    }
    fields |= {
        "build": {"commit": "0123456", "compiler": "gcc 12.2.0"},
        "self_tests": {"fa2": "right: it is"},
    }
    return Facts(**(fields | changes))


def test_report_of_a_machine_where_all_is_well():
    assert report(facts()) == (
        f"flash_ext {flash_ext.__version__} (commit 0123456, gcc 12.2.0)\n"
        "  python    3.12.3\n"
        "  torch     2.11.0, CUDA 13.0\n"
        "  operators ready\n"
        "  _C        ready\n"
        "  driver    CUDA 13.0\n"
        "  gpus      NVIDIA H200, 9.0, 132 SMs\n"
        "  nvcc      13.0.88\n"
        "  fa3       not built: lib/fa3.so is missing\n"
        "  fa2       fa2.so: nvcc 13.0.88, sm_80 sm_90\n"
        "  cpu       cpu_avx2.so: gcc 12.2.0, avx2\n"
        "  test fa2  right: it is\n"
        "all is well"
    )


def card(cc, name="a card"):
    return {"ordinal": 0, "name": name, "cc": cc, "sm_count": 1}


@pytest.mark.parametrize(
    "found, sentence",
    [
        (facts(torch=""), "torch is not installed: pip install torch (2.10 or newer), then install flash_ext again"),
        (facts(torch="2.9.1"), "torch 2.9.1 is older than 2.10: upgrade it"),
        (facts(door_problem="undefined symbol: x"), "the torch operators do not load: undefined symbol: x"),
        (facts(backends=(FA3, FA2, CPU | {"loaded": False, "reason": "gone"})), "the CPU backend does not load: gone"),
        (facts(driver=12080), "the driver (CUDA 12.8) is too old for a build with CUDA 13: install driver 580 or newer, or a build with an older CUDA"),
        (facts(backends=(FA2 | {"build": "nvcc 12.4.1, sm_90"}, CPU), driver=11080), "the driver (CUDA 11.8) is too old for a build with CUDA 12: install driver 525 or newer, or a build with an older CUDA"),
        (facts(torch_cuda=""), "GPU 0 (NVIDIA H200, 9.0) is there, but torch 2.11.0 has no CUDA: install a CUDA build of torch"),
        (facts(gpus=(card(61, "GTX 1080"),)), "GPU 0 (GTX 1080, 6.1) has no kernel yet: use torch's scaled_dot_product_attention"),
        (facts(gpus=(card(75, "Tesla T4"),)), "GPU 0 (Tesla T4, 7.5) has no kernel yet: use torch's scaled_dot_product_attention"),
        (facts(backends=(FA3, CPU), gpus=(card(86, "RTX 3090"),)), "GPU 0 (RTX 3090, 8.6) has no backend built for it: build with FLASH_EXT_CUDA_ARCHS=86 pip install --no-build-isolation . in the source tree"),
        (facts(backends=(FA3, CPU)), "GPU 0 (NVIDIA H200, 9.0) has no backend built for it: build with FLASH_EXT_CUDA_ARCHS=90a pip install --no-build-isolation . in the source tree"),
        (facts(nvcc="11.7.99"), "nvcc 11.7.99 is older than 11.8: it cannot build the CUDA backends; install CUDA 11.8 or newer (12.4 for Hopper)"),
        (facts(self_tests={"fa2": "WRONG: far off"}), "fa2 computes wrong results here: WRONG: far off"),
    ],
)  # fmt: skip
def test_advice(found, sentence):
    assert advice(found) == [sentence]
    assert report(found).endswith(f"what to do\n  - {sentence}")


def test_which_cards_a_build_serves():
    assert serves("nvcc 13.0.88, sm_80 sm_90", 80) and serves("sm_80", 86) and not serves("sm_86", 80)
    assert not serves("sm_80", 90) and serves("sm_80 compute_80", 120) and not serves("compute_90", 80)
    assert serves("sm_90a", 90) and not serves("sm_90a", 100)


def doctor(folder: Path):
    return subprocess.run(
        [sys.executable, "-m", "flash_ext"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def copied(tmp_path):
    """The package in a folder of its own, where files can be taken away."""
    source = Path(flash_ext.__file__).parent
    shutil.copytree(source, tmp_path / "flash_ext", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_doctor_on_this_machine(copied):
    run = doctor(copied)
    assert f"flash_ext {flash_ext.__version__} (commit " in run.stdout and run.stderr == ""
    assert re.search(r"^  operators ready$", run.stdout, re.M) and re.search(
        r"^  _C +ready$", run.stdout, re.M
    )
    assert re.search(r"^  cpu       cpu_\w+\.so: ", run.stdout, re.M)
    assert re.search(
        r"^  test cpu  right: forward and backward differ from float64 by \de-0\d at most$", run.stdout, re.M
    )
    assert run.returncode == (0 if run.stdout.rstrip().endswith("all is well") else 1)


def test_doctor_with_a_backend_deleted(copied):
    for file in (copied / "flash_ext/lib").glob("cpu_*.so"):
        file.unlink()
    run = doctor(copied)
    assert run.returncode == 1 and run.stderr == ""
    missing = r"lib/cpu_\w+\.so is missing \(x86-64 needs a CPU with AVX2\): reinstall, or build from source"
    assert re.search(rf"^  cpu       {missing}$", run.stdout, re.M)
    assert re.search(rf"^  - the CPU backend does not load: {missing}$", run.stdout, re.M)


def test_doctor_with_a_damaged_backend(copied):
    for file in (copied / "flash_ext/lib").glob("cpu_*.so"):
        file.write_bytes(b"not a library")
    run = doctor(copied)
    assert run.returncode == 1 and re.search(
        r"^  cpu       lib/cpu_\w+\.so does not load: .*", run.stdout, re.M
    )


def test_doctor_without_the_door(copied):
    (copied / "flash_ext/lib/torch_ops.so").unlink()
    run = doctor(copied)
    assert run.returncode == 1 and run.stderr == ""
    assert re.search(r"^  operators do not load: .*torch_ops\.so is missing", run.stdout, re.M)
    assert re.search(r"^  cpu       cpu_\w+\.so: ", run.stdout, re.M), (
        "the other door still tells about backends"
    )


NOT_BUILT = {
    name: f"not built: lib/{name}.so is missing (build with FLASH_EXT_CUDA_ARCHS={arch})"
    for name, arch in {"fa3": "90a", "fa2": "80", "fa1": "75"}.items()
}


def planned(folder: Path):
    """What plan prints, or raises, in a process of its own with one thread."""
    code = "import torch, flash_ext; torch.set_num_threads(1); q = torch.zeros(2, 128, 8, 64); print(flash_ext.plan(q, q, q))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def test_plan_where_no_arch_was_built(copied):
    for file in (copied / "flash_ext/lib").glob("fa*.so"):
        file.unlink()
    assert re.sub(r"[\d.]+ KiB", "N KiB", planned(copied).stdout) == (
        "backend    cpu\n"
        "tile       256 queries x 128 keys: the largest tile that leaves two to each of 1 threads\n"
        "grid       16, 1 launch\n"
        "memory     workspace N KiB, shared 0 bytes, 1 stage\n"
    ) + "".join(f"not {name}    {reason}\n" for name, reason in NOT_BUILT.items())


def test_plan_with_every_backend_deleted(copied):
    for file in (copied / "flash_ext/lib").glob("[cf]*.so"):
        file.unlink()
    run = planned(copied)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in NOT_BUILT.items())
    text = f"RuntimeError: flash_ext: no backend can run this problem: {reasons}; cpu: lib/cpu_"
    assert run.returncode == 1 and text in run.stderr
