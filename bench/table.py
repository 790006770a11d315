"""python -m bench.table RESULT.json: Markdown tables, a line for each cell, a column for each contender."""

import json
import sys
from dataclasses import fields
from pathlib import Path

from bench.cells import Cell


def table(result: dict) -> str:
    """Times and TFLOPS, ours with the ratio to the best peer; then peak memory where it was measured."""
    head = result["header"]
    text = f"{head['gpu'] or head['cpu']}, torch {head['torch']}, commit {head['commit']}\n\n"
    text += _lines(result["rows"], _time)
    if result["memory"]:
        text += "\n" + _lines(result["memory"], lambda row: f"{row['peak_bytes'] / 2**20:.1f} MiB")
    return text


def _time(row) -> str:
    text = f"{row['us'] / 1000:.2f} ms, {row['tflops']:.3g} TFLOPS"
    if row["best_peer"] not in (row["contender"], None):
        text += f", {row['x_best_peer']:.2f} × {row['best_peer']}"
    if row.get("beside"):
        text += f", {row['x_beside']:.2f} × plain"
    return text


def _lines(rows, show) -> str:
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    cells = {}
    for row in rows:
        cells.setdefault(_cell(row), {})[row["contender"]] = show(row)
    lines = [["cell", *contenders], ["---"] * (1 + len(contenders))]
    lines += [[cell, *(shown.get(name, "-") for name in contenders)] for cell, shown in cells.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row) -> str:
    known = {field.name: row[field.name] for field in fields(Cell) if field.name in row}
    cell = Cell(pass_=row["pass"], **known | {"window": tuple(row["window"])})
    heads = f"{cell.nheads} heads" if cell.nheads == cell.nheads_k else f"{cell.nheads}/{cell.nheads_k} heads"
    mask = "causal" if cell.causal else "full"
    window = "" if cell.window == (-1, -1) else f" window {cell.window}"
    dims = (
        f"d {cell.head_dim}" if cell.head_dim == cell.head_dim_v else f"d {cell.head_dim}, {cell.head_dim_v}"
    )
    shape = f"batch {cell.batch}, {cell.seqlen_q} × {cell.seqlen_k}, {heads}, {dims}"
    return f"{cell.pass_} {cell.dtype} {mask}{window}{cell.options}: {shape}"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())), end="")
