"""python -m bench.table RESULT.json: Markdown tables, a line for each cell, a column for each contender."""

import json
import sys
from pathlib import Path


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
    is_peer = row["best_peer"] in (row["contender"], None)
    return text if is_peer else f"{text}, {row['x_best_peer']:.2f} × {row['best_peer']}"


def _lines(rows, show) -> str:
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    cells = {}
    for row in rows:
        cells.setdefault(_cell(row), {})[row["contender"]] = show(row)
    lines = [["cell", *contenders], ["---"] * (1 + len(contenders))]
    lines += [[cell, *(shown.get(name, "-") for name in contenders)] for cell, shown in cells.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row) -> str:
    heads = (
        f"{row['nheads']} heads"
        if row["nheads"] == row["nheads_k"]
        else f"{row['nheads']}/{row['nheads_k']} heads"
    )
    mask = "causal" if row["causal"] else "full"
    window = "" if row["window"] == [-1, -1] else f" window {tuple(row['window'])}"
    shape = f"batch {row['batch']}, {row['seqlen_q']} × {row['seqlen_k']}, {heads}, d {row['head_dim']}"
    return f"{row['pass']} {row['dtype']} {mask}{window}: {shape}"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())), end="")
