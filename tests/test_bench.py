"""The bench: counts, checks, and the form of its results, on the smoke grid."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
if not (ROOT / "bench").exists():
    pytest.skip("no bench beside the tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from bench import __main__ as bench  # noqa: E402
from bench import check, memory, table, timing  # noqa: E402
from bench.cells import GRIDS, Cell  # noqa: E402
from bench.contenders import Unable, find, make_call  # noqa: E402

CELL = Cell("fwd", "float32", 1, 8, 8, 4, 2, 16, 16)
ROW_TYPES = {
    "contender": str, "pass": str, "dtype": str, "batch": int, "seqlen_q": int, "seqlen_k": int,
    "nheads": int, "nheads_k": int, "head_dim": int, "head_dim_v": int, "causal": bool, "window": list,
    "storage": str, "sinks": bool, "softcap": float, "alibi": bool, "dropout_p": float, "deterministic": bool,
    "us": float, "tflops": float, "max_err": (float, type(None)), "baseline_err": (float, type(None)),
    "cpu_us": (float, type(None)), "best_peer": (str, type(None)), "x_best_peer": (float, type(None)),
    "x_cublas": (float, type(None)),
    "beside": (str, type(None)), "x_beside": (float, type(None)), "at_least": (float, type(None)),
}  # fmt: skip
HEADER = {
    "name", "date", "commit", "gpu", "cpu", "threads", "driver", "torch", "cudnn", "nvcc", "ptxas",
    "clocks_mhz", "copy_tbs", "cublas_tflops", "flash_ext",
}  # fmt: skip


@pytest.mark.parametrize(
    "change, pairs",
    [
        ({}, 64),
        ({"causal": True}, 36),
        ({"causal": True, "seqlen_k": 10}, 8 * 10 - 28),
        ({"causal": True, "seqlen_k": 5}, 15),  # the first three rows see nothing
        ({"window": (2, 0)}, 1 + 2 + 3 * 6),
        ({"window": (-1, 1)}, 36 + 7),
        ({"window": (1, 1)}, 8 + 2 * 7),
        ({"window": (3, 5), "causal": True}, 1 + 2 + 3 + 4 * 5),
    ],
)
def test_masked_work_is_counted_exactly(change, pairs):
    cell = replace(CELL, **change)
    assert cell.visible_pairs == pairs
    visible, _ = check._mask(cell, cell.seqlen_q, cell.seqlen_k, "cpu")
    assert visible is None or int(visible.sum()) == pairs
    assert cell.flops == 4 * 1 * 4 * pairs * 16
    assert replace(cell, pass_="bwd").flops == 2.5 * cell.flops
    assert replace(cell, pass_="fwd+bwd").flops == 3.5 * cell.flops


def test_the_few_grid_has_no_more_blocks_of_keys_than_sms():
    cells = GRIDS["few"]().cells
    assert len(set(cells)) == 16 and {cell.pass_ for cell in cells} == {"bwd"}
    for cell in cells:
        block = 80 if cell.head_dim == 256 else 128
        assert cell.batch * cell.nheads_k * -(-cell.seqlen_k // block) <= 132, cell.name


def test_the_paper_grid_has_forty_shapes():
    cells = GRIDS["paper"]().cells
    for pass_ in ("fwd", "bwd"):
        names = {cell.name for cell in cells if cell.pass_ == pass_}
        assert len(names) == 40
        assert f"{pass_} bfloat16 d128 causal b4 s4096 h16" in names
        assert f"{pass_} bfloat16 d128 full b2 s8192 h64/8" in names
    assert all(cell.batch * cell.seqlen_q == 16384 for cell in cells)


def test_options_are_measured_beside_a_plain_cell():
    grid = GRIDS["options"]()
    assert len(set(grid.cells)) == len(grid.cells)
    for cell, (plain, at_least) in grid.beside.items():
        assert cell in grid.cells and cell != plain and not plain.options
        assert (cell.pass_, cell.causal) == (plain.pass_, plain.causal)
        assert at_least is None or 0.7 < at_least < 1
    asked = {"packed", "qkv", "sinks", "softcap 30", "ALiBi", "dropout 0.1", "ragged"}
    for pass_ in ("fwd", "bwd"):
        cells = [cell for cell in grid.cells if cell.pass_ == pass_]
        assert asked <= {cell.options.strip() for cell in cells}
        assert {(80, 80), (96, 96), (192, 192), (192, 128)} <= {(c.head_dim, c.head_dim_v) for c in cells}
        assert {2047, 2049, 8191} <= {cell.seqlen_q for cell in cells}
        assert {cell.window for cell in cells} == {(-1, -1), (1024, 0)}
    assert sum(cell.pass_ == "fwd+bwd" for cell in grid.cells) == 12


def test_ragged_lengths():
    cell = replace(CELL, batch=7, seqlen_q=4, seqlen_k=4, storage="ragged", causal=True)
    lengths = [length for length, _ in cell.lengths]
    assert sorted(lengths) == [1, 2, 3, 4, 5, 6, 7]
    assert cell.visible_pairs == sum(n * (n + 1) // 2 for n in lengths)
    q, k, _, dout = cell.inputs("cpu")
    assert q.shape == (28, 4, 16) and k.shape == (28, 2, 16) and dout.shape == q.shape
    assert cell.option_tensors("cpu")["cu_seqlens_k"].diff().tolist() == lengths


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_only_the_first_sequences_are_checked(pass_, monkeypatch):
    monkeypatch.setattr(check, "_SEQUENCES", 3)
    cell = replace(CELL, pass_=pass_, batch=7, seqlen_q=4, seqlen_k=4, storage="ragged", causal=True)
    inputs = cell.inputs("cpu")
    expected = check.expect(cell, *inputs)
    assert len(expected.results[0]) == sum(length for length, _ in cell.lengths[:3])
    results = [result.detach().clone() for result in make_call(find("cpu", "cpu"), cell, *inputs)()]
    assert check.check(expected, results)[1]
    results[0][0] += 1
    assert not check.check(expected, results)[1]


def test_turns_are_counted(monkeypatch):
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abcd"}

    class Once:
        def __init__(self, call):
            self.run = lambda: call() or 1.0

    monkeypatch.setattr(timing, "_CpuTurn", Once)
    seconds = timing.measure(calls, "cpu", rounds=3)
    assert "".join(order) == "abdc" + "bcad" + "cdba"
    assert seconds == {name: [1.0] * 3 for name in "abcd"}


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
def test_each_follows_each_other_as_often(n):
    rounds = n if n % 2 == 0 else 2 * n
    orders = [timing.order_of_round(list(range(n)), i) for i in range(rounds)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert set(pairs.values()) <= {rounds // n} and len(pairs) == n * (n - 1)


def test_ratio_is_the_median_of_the_rounds():
    seconds = {"cpu": [1.0, 2.0, 4.0], "slow": [9.0, 9.0, 9.0], "fast": [2.0, 2.0, 2.0], "cublas": [0.1] * 3}
    row = bench.make_row(CELL, "cpu", seconds, 0.0, 0.0, None)
    assert row["best_peer"] == "fast" and row["x_best_peer"] == 1.0 and row["us"] == 2e6
    assert row["x_cublas"] == pytest.approx(CELL.flops / timing.MATMUL_FLOPS * 0.05)
    assert bench.make_row(CELL, "fast", seconds, 0.0, 0.0, None)["x_best_peer"] == 1.0


def test_smoke_grid_writes_its_results(tmp_path):
    command = [sys.executable, "-m", "bench", "--grid", "smoke", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*/*-smoke.json")
    result = json.loads(path.read_text())
    assert set(result) == {"header", "rows", "memory"} and set(result["header"]) == HEADER
    assert path.name == f"{result['header']['date']}-{result['header']['commit']}-smoke.json"
    for row in result["rows"]:
        assert list(row) == list(ROW_TYPES)
        for key, kind in ROW_TYPES.items():
            assert isinstance(row[key], kind), (key, row[key])
    if not torch.cuda.is_available():
        assert path.parent.name == "cpu"
        assert {"cpu", "sdpa_cpu", "sdpa_math"} == {row["contender"] for row in result["rows"]}
        assert len([row for row in result["rows"] if row["contender"] == "cpu"]) == len(
            GRIDS["smoke"]().cells
        )


def test_a_wrong_contender_is_not_timed(capsys):
    def wrong(cell, q, k, v):
        return find("sdpa_math", "cpu")(cell, q, k, v) * 1.001

    rows, _, is_right = bench.run_cell(replace(CELL, nheads_k=4), {"cpu": wrong}, "cpu", 1)
    assert rows == [] and not is_right and "WRONG" in capsys.readouterr().out
    rows, _, is_right = bench.run_cell(replace(CELL, nheads_k=4), {"sdpa_math": wrong}, "cpu", 1)
    assert len(rows) == 1 and is_right and "WRONG" in capsys.readouterr().out, (
        "a peer is timed and told apart"
    )


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
def test_check_agrees_with_torch(pass_):
    cell = Cell(pass_, "float32", 2, 33, 33, 4, 2, 16, 24, causal=True)
    torch.manual_seed(0)
    inputs = cell.inputs("cpu")
    results = make_call(find("sdpa_math", "cpu"), cell, *inputs)()
    error, is_right = check.check(check.expect(cell, *inputs), results)
    assert is_right and error < 1e-4


def test_a_mask_that_torch_lacks_is_a_reason():
    with pytest.raises(Unable, match="no such mask"):
        find("sdpa_cpu", "cpu")(replace(CELL, window=(1, 1)), None, None, None)
    with pytest.raises(Unable, match="does not run on cpu"):
        find("cudnn", "cpu")
    with pytest.raises(Unable, match="--fa3-upstream DIR"):
        find("fa3_upstream", "cuda")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
def test_peak_memory_of_a_child():
    cell = Cell("fwd", "float32", 1, 2048, 2048, 4, 4, 64, 64)
    scores = 4 * 2048 * 2048 * 4
    assert memory.peak_bytes("sdpa_math", cell) > scores
    assert memory.peak_bytes("cpu", cell) < scores / 4


def small_result():
    header = {"gpu": None, "cpu": "a processor", "torch": "2", "commit": "abc"}
    row = {"contender": "cpu", "pass": "fwd", "dtype": "float32", "batch": 1, "seqlen_q": 64, "seqlen_k": 64}
    row |= {"nheads": 2, "nheads_k": 1, "head_dim": 64, "head_dim_v": 64, "causal": True, "window": [-1, -1]}
    row |= {"us": 1500.0, "tflops": 1.5, "best_peer": "sdpa_cpu", "x_best_peer": 0.5}
    packed = {"causal": False, "storage": "packed", "beside": "a plain cell", "x_beside": 0.99}
    rows = [row, row | {"contender": "sdpa_cpu", "us": 750.0, "tflops": 3.0}, row | packed]
    return {"header": header, "rows": rows, "memory": [row | {"peak_bytes": 3 << 20}]}


def test_table():
    lines = table.table(small_result()).splitlines()
    assert lines[0] == "a processor, torch 2, commit abc"
    assert lines[2] == "| cell | cpu | sdpa_cpu |"
    shape = "batch 1, 64 × 64, 2/1 heads, d 64"
    cpu, peer = "1.50 ms, 1.5 TFLOPS, 0.50 × sdpa_cpu", "0.75 ms, 3 TFLOPS"
    assert lines[4] == f"| fwd float32 causal: {shape} | {cpu} | {peer} |"
    assert lines[5] == f"| fwd float32 full packed: {shape} | {cpu}, 0.99 × plain | - |"
    assert lines[-1] == f"| fwd float32 causal: {shape} | 3.0 MiB |"


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "result.json").write_text(json.dumps(small_result()))
    files = [str(tmp_path / "result.json"), str(tmp_path / "picture.svg")]
    subprocess.run([sys.executable, "-m", "bench.plot", *files], cwd=ROOT, check=True)
    assert "<svg" in (tmp_path / "picture.svg").read_text()
