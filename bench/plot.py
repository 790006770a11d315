"""python -m bench.plot RESULT.json PICTURE.svg: TFLOPS in a panel for each pass, head_dim and mask."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg" if sys.argv[-1].endswith(".svg") else "agg")

import matplotlib.pyplot as plt  # noqa: E402

matplotlib.rcParams["svg.hashsalt"] = "flash_ext"  # the same numbers give the same file
COLOURS = {
    "cpu": "#d1495b",
    "fa1": "#edae49",
    "fa2": "#e07a5f",
    "fa3": "#d1495b",
}  # ours are warm, peers cold
PEER_COLOURS = ("#30638e", "#66a182", "#8d96a3", "#003d5b", "#9cc5a1")


def panel_of(row):
    mask = "causal" if row["causal"] else "full"
    if row["window"] != [-1, -1]:
        mask += f", window {tuple(row['window'])}"
    return f"{row['pass']}, head_dim {row['head_dim']}, {mask}"


def plot(result: dict, path: Path):
    rows = result["rows"]
    panels = list(dict.fromkeys(map(panel_of, rows)))
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    peers = [name for name in contenders if name not in COLOURS]
    colours = COLOURS | dict(zip(peers, PEER_COLOURS, strict=False))
    columns = 2 if len(panels) > 1 else 1
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5.5 * columns, 2.4 * lines), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw(axis, panel, [row for row in rows if panel_of(row) == panel], contenders, colours)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in contenders]
    figure.legend(handles, contenders, loc="lower center", ncols=len(contenders), frameon=False)
    head = result["header"]
    figure.suptitle(
        f"{head['gpu'] or head['cpu']}, torch {head['torch']}, commit {head['commit']}", fontsize=10
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    plt.close(figure)


def _draw(axis, panel, rows, contenders, colours):
    one_length = len({row["seqlen_k"] for row in rows}) == 1
    groups = list(dict.fromkeys(_group(row, one_length) for row in rows))
    width = 0.8 / len(contenders)
    unit, scale = ("TFLOPS", 1) if max(row["tflops"] for row in rows) > 1 else ("GFLOPS", 1000)
    for row in rows:
        position = contenders.index(row["contender"])
        x = groups.index(_group(row, one_length)) + (position - (len(contenders) - 1) / 2) * width
        axis.bar(x, scale * row["tflops"], width, color=colours[row["contender"]])
        axis.text(
            x, scale * row["tflops"], f"{scale * row['tflops']:.0f}", ha="center", va="bottom", fontsize=6
        )
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.tick_params(axis="y", labelsize=7)
    axis.set_ylabel(unit, fontsize=8)
    axis.set_title(panel, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def _group(row, one_length):
    heads = "" if row["nheads"] == row["nheads_k"] else f"\n{row['nheads']}/{row['nheads_k']} heads"
    return (row["dtype"] if one_length else f"{row['seqlen_k']}") + heads


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
