"""Peak memory of one call, in a process of its own so that nothing that ran before counts.

`python -m bench.memory CONTENDER CELL` is the child: it prints the bytes that the call added to a process
that already holds its inputs. Results count, inputs do not.
"""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from bench.cells import Cell
from bench.contenders import find, make_call


def peak_bytes(contender: str, cell: Cell) -> int:
    """Run the child and read what it printed."""
    command = [sys.executable, "-m", "bench.memory", contender, json.dumps(asdict(cell))]
    root = Path(__file__).parent.parent
    return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout)


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (the most since the last reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"bench: /proc/self/status has no {field}")


def _child(name: str, cell: Cell) -> int:
    contender = find(name, "cpu")
    small = replace(cell, seqlen_q=64, seqlen_k=64)
    make_call(
        contender, small, *small.inputs("cpu")
    )()  # libraries, thread pools and autograd are not the call's
    call = make_call(contender, cell, *cell.inputs("cpu"))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident_bytes("VmRSS")
    results = call()
    peak = resident_bytes("VmHWM") - before
    del results
    return peak


if __name__ == "__main__":
    torch.manual_seed(0)
    fields = json.loads(sys.argv[2])
    print(_child(sys.argv[1], Cell(**fields | {"window": tuple(fields["window"])})))
