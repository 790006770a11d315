"""python -m bench --grid cpu: measure a grid, print a table, write a JSON file."""

import argparse
import contextlib
import statistics
import sys
from dataclasses import asdict
from operator import truediv
from pathlib import Path

import torch

from bench import check, machine, memory, timing
from bench.cells import DTYPES, GRIDS
from bench.contenders import Unable, find, is_ours, make_call


def main(arguments=None) -> int:
    options = _parse(arguments)
    device = "cuda" if torch.cuda.is_available() and options.grid != "cpu" else "cpu"
    grid = GRIDS[options.grid]()
    cells = [cell for cell in grid.cells if options.only in cell.name]
    contenders = _find_contenders(options.contenders or grid.contenders, device, options.fa3_upstream)
    # The default stream cannot be captured in a CUDA graph, and a backward runs on the stream of its forward.
    stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
    print(f"{machine.device_name(device)}, torch {torch.__version__}, commit {machine.commit()}")
    rows, is_right, matmul_tflops = [], True, []
    with stream, machine.Clocks(device) as clocks:
        copy_tbs = timing.copy_bytes_per_second() / 1e12 if device == "cuda" else None
        for cell in cells:
            beside = grid.beside.get(cell)
            cell_rows, tflops, cell_is_right = run_cell(cell, contenders, device, options.rounds, beside)
            rows += cell_rows
            matmul_tflops += tflops
            is_right &= cell_is_right
    measured = _memory(grid.memory, contenders) if not options.only else []
    cublas = statistics.median(matmul_tflops) if matmul_tflops else None
    head = machine.header(options.name or options.grid, device, copy_tbs, cublas, clocks.mhz)
    print(f"\nwritten to {machine.save(Path(options.out), head, rows, measured)}")
    return 0 if is_right else 1


def _parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--grid", choices=GRIDS, default="smoke")
    parser.add_argument("--only", default="", help="only cells whose name contains this")
    parser.add_argument("--contenders", type=lambda text: text.split(","), help="names, separated by commas")
    parser.add_argument("--fa3-upstream", metavar="DIR", help="folder of a prebuilt FlashAttention-3: _C.so")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS)
    parser.add_argument("--name", help="name of the result, the grid's by default")
    parser.add_argument("--out", default=str(machine.ROOT / "bench/results"))
    return parser.parse_args(arguments)


def _find_contenders(names, device, fa3_upstream) -> dict:
    found, reasons = {}, []
    for name in names:
        try:
            found[name] = find(name, device, fa3_upstream)
        except Unable as reason:
            reasons.append(str(reason))
    if reasons:
        print(f"left out: {'; '.join(reasons)}")
    return found


def run_cell(cell, contenders: dict, device: str, rounds: int, beside=None):
    """Check the contenders, time them: rows, cuBLAS TFLOPS a round, are ours right?

    Each of ours also runs the plain cell of `beside` (see Grid) in the same rounds.
    """
    print(f"\n{cell.name}")
    torch.manual_seed(0)
    calls, errors, baseline_error, is_right = _check(cell, contenders, device)
    if not calls:
        return [], [], is_right
    others = {}
    if beside is not None:
        plain, at_least = beside
        inputs = plain.inputs(device)
        ours = [name for name in calls if is_ours(name)]
        others = {(name, "plain"): make_call(contenders[name], plain, *inputs) for name in ours}
    cpu_us = {}
    if device == "cuda":
        cpu_us = {name: timing.eager_cpu_seconds(call) * 1e6 for name, call in calls.items()}
        others["cublas"] = timing.make_matmul(DTYPES[cell.dtype])
    seconds = timing.measure(calls | others, device, rounds)
    rows = []
    for name in calls:
        row = make_row(cell, name, seconds, errors[name], baseline_error, cpu_us.get(name))
        if (name, "plain") in seconds:
            x_beside = cell.flops / plain.flops * _ratio(seconds[name, "plain"], seconds[name])
            row |= {"beside": plain.name, "x_beside": x_beside, "at_least": at_least}
        print_row(row)
        rows.append(row)
    return rows, [timing.MATMUL_FLOPS / s * 1e-12 for s in seconds.get("cublas", ())], is_right


def _check(cell, contenders, device):
    """The calls that are to be timed, the error of each, plain attention's error, are ours right?"""
    inputs = cell.inputs(device)
    expected = check.expect(cell, *inputs)
    baseline_error = None if expected is None else expected.baseline_error
    calls, errors, is_right = {}, {}, True
    for name, contender in contenders.items():
        try:
            call = make_call(contender, cell, *inputs)
            errors[name], passed = check.check(expected, call())
        except (Unable, RuntimeError, NotImplementedError) as reason:
            print(f"  {name:15s} cannot: {str(reason).splitlines()[0]}")
            continue
        if not passed:
            print(f"  {name:15s} WRONG: {_describe_error(errors[name], baseline_error)}")
        if passed or not is_ours(name):  # a peer's error is its own; its time is still what we compare with
            calls[name] = call
        else:
            is_right = False
    return calls, errors, baseline_error, is_right


def _ratio(seconds, own_seconds) -> float:
    """How much faster than others: the median of the rounds' ratios."""
    return statistics.median(map(truediv, seconds, own_seconds))


def make_row(cell, name, seconds, max_err, baseline_err, cpu_us) -> dict:
    """A row of the result. x_best_peer: best peer's time / own time; x_cublas: own TFLOPS / cuBLAS's."""
    median = statistics.median(seconds[name])
    peers = [
        other for other in seconds if isinstance(other, str) and not is_ours(other) and other != "cublas"
    ]
    best = min(peers, key=lambda other: statistics.median(seconds[other]), default=None)
    cublas = None
    if "cublas" in seconds:
        cublas = cell.flops / timing.MATMUL_FLOPS * _ratio(seconds["cublas"], seconds[name])
    problem = asdict(cell)
    return {
        "contender": name,
        "pass": problem.pop("pass_"),
        **problem,
        "us": median * 1e6,
        "tflops": cell.flops / median * 1e-12,
        "max_err": max_err,
        "baseline_err": baseline_err,
        "cpu_us": cpu_us,
        "best_peer": best,
        "x_best_peer": best and _ratio(seconds[best], seconds[name]),
        "x_cublas": cublas,
        "beside": None,
        "x_beside": None,
        "at_least": None,
    }


def _describe_error(error, baseline_error) -> str:
    return "not checked" if error is None else f"error {error:.1e} (baseline {baseline_error:.1e})"


def print_row(row):
    peer = f"{row['x_best_peer']:.2f} x {row['best_peer']}" if row["best_peer"] else "-"
    columns = [f"{row['us']:11.1f} us", f"{row['tflops']:8.3f} TFLOPS", f"{peer:22s}"]
    if row["x_cublas"] is not None:
        columns.append(f"{100 * row['x_cublas']:3.0f} % of cuBLAS")
    if row["cpu_us"] is not None:
        columns.append(f"CPU {row['cpu_us']:5.0f} us")
    if row["beside"] is not None:
        wanted = "" if row["at_least"] is None else f" (at least {row['at_least']})"
        columns.append(f"{row['x_beside']:.3f} x plain{wanted}")
    columns.append(_describe_error(row["max_err"], row["baseline_err"]))
    print(f"  {row['contender']:15s} {' | '.join(columns)}")


def _memory(cells, contenders) -> list[dict]:
    measured = []
    for cell in cells:
        print(f"\npeak memory, {cell.name}")
        for name in contenders:
            peak = memory.peak_bytes(name, cell)
            problem = asdict(cell)
            measured.append({"contender": name, "pass": problem.pop("pass_"), **problem, "peak_bytes": peak})
            print(f"  {name:15s} {peak / 2**20:9.1f} MiB")
    return measured


if __name__ == "__main__":
    sys.exit(main())
