"""The list of planted faults (tools/planted_faults.py) fits the sources and the tests that it names."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "tools/mutants.py").exists():
    pytest.skip("needs the checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tools"))
import mutants  # noqa: E402


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_every_fault_can_be_planted(mutant, tmp_path):
    for file in {mutant.file, "device/jitter.cuh"}:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text((ROOT / "csrc" / file).read_text())
    mutants.plant(tmp_path, mutant)
    assert (tmp_path / mutant.file).read_text() != (ROOT / "csrc" / mutant.file).read_text()
    assert ("#define FLASH_EXT_JITTER" in (tmp_path / "device/jitter.cuh").read_text()) == mutant.late


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_every_named_test_exists(mutant):
    module, _, name = mutant.test.partition("::")
    assert f"def {name}(" in (ROOT / "tests/gpu" / module).read_text()
    late = " (late)" if mutant.late else ""
    assert f"| {mutant.name}{late} | `{name}` |" in (ROOT / "tests/README.md").read_text()
