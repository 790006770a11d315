"""The GPU suite: `python -m pytest tests/gpu`, on built libraries. Without a GPU nothing here is collected."""

from pathlib import Path

import bed
import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_addoption(parser):
    parser.addoption("--part", default="0/1", metavar="I/N", help="every N-th GPU test from the I-th on")


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config, items):
    part, parts = map(int, config.getoption("--part", "0/1").split("/"))
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.gpu)
    left_out = {item for i, item in enumerate(mine) if i % parts != part}
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def leave_memory_to_others():
    """Several processes share a GPU: none keeps the gigabytes of a test that is over."""
    yield
    if torch.cuda.memory_reserved() > 2**31:
        torch.cuda.empty_cache()


def pytest_report_header():
    if torch.cuda.is_available():
        return f"GPU: {torch.cuda.get_device_name()}, kernels: {', '.join(map(str, bed.KERNELS)) or 'none'}"


def pytest_terminal_summary(terminalreporter):
    for backend, calls in bed.CHECKED.items():
        terminalreporter.write_line(f"{backend}: {calls} calls held against float64")
