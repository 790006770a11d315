"""Markers and the seed: fresh random inputs each run, reproducible with FLASH_EXT_TEST_SEED."""

import zlib

import pytest
import torch
from compare import SEED


def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: the short part that a wheel must pass outside the checkout")
    config.addinivalue_line("markers", "gpu: needs a GPU and a CUDA backend")


def pytest_report_header():
    return f"FLASH_EXT_TEST_SEED={SEED}"


@pytest.fixture(autouse=True)
def _seeded(request):
    """Every test draws its own numbers from the run's seed, whatever ran before it."""
    torch.manual_seed(SEED ^ zlib.crc32(request.node.nodeid.rpartition("/")[2].encode()))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed:
        report.sections.append(("random inputs", f"run again with FLASH_EXT_TEST_SEED={SEED}"))
