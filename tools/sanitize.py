"""Runs the CUDA kernels, both passes, under compute-sanitizer's four tools and writes what they found.

  python tools/sanitize.py [-j N] [TEXT ...] on a GPU, of kernels whose name contains a TEXT ("fa1",
                                             "bfloat16"), N runs side by side; writes
                                             bench/results/<gpu>/<date>-<commit>-sanitizer.json;
                                             --package FOLDER: another build, such as build/volta
  python tools/sanitize.py --calls GROUP     the calls themselves, which each tool watches; GROUP is
                                             fa2-bfloat16-64 or the like; --forward: no gradients;
                                             --whole-tiles: the problem where all warps do the same

Every tensor is its own allocation, so that memcheck sees a step outside; inputs are made on the CPU and
copied, so that no other kernel needs to be watched; two CTAs share the tiles, so that pipelines wrap.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/gpu")]

TOOLS = {
    "memcheck": ["--leak-check=no"],
    "racecheck": ["--racecheck-report=analysis"],
    "synccheck": [],
    "initcheck": [],
}
CALLS = {
    "full": {"lengths_q": (130, 129), "lengths_k": (193, 193)},
    "causal, spare rows": {"lengths_q": (129, 40), "lengths_k": (200, 65), "causal": True, "spare": 3},
    "window, sinks": {"lengths_q": (200,), "lengths_k": (200,), "window": (60, 10), "sinks": True},
    "packed": {
        "packed_q": True,
        "packed_k": True,
        "lengths_q": (1, 140, 0),
        "lengths_k": (70, 129, 5),
        "causal": True,
        "spare": 2,
    },
}
# All warps do the same: no row or key is missing, and no score passes the first block's maximum by far.
WHOLE_TILES = {"whole tiles": {"lengths_q": (256,), "lengths_k": (192,), "alibi": 0}}


def compute_sanitizer() -> str:
    found = shutil.which("compute-sanitizer")
    return found or str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin/compute-sanitizer")


def group_of(kernel) -> str:
    """Kernels that one run of a tool watches: those of one backend, element type and bucket."""
    return "-".join(str(kernel).split("-")[:3])


def calls(group: str, problems: dict, with_gradients: bool) -> None:
    """Every kernel of the group on every problem; a result that is plainly wrong ends it."""
    import bed
    import compare
    import torch

    from flash_ext import reference

    def on_cpu(tensors: dict) -> dict:
        return {k: x.cpu() if isinstance(x, torch.Tensor) else x for k, x in tensors.items()}

    count = 0
    for kernel in bed.KERNELS:
        if group_of(kernel) != group:
            continue
        modified = {"softcap": 5.0, "alibi": 1, "dropout_p": 0.2} if kernel.modified else {}
        for name, problem in problems.items():
            problem = modified | problem
            inputs, options, dout, _ = kernel.fits(**problem, nheads_k=1).tensors(bed.DEVICE)
            got = {"out": kernel.forward(**inputs, **options, max_ctas=2)[0]}
            if has_backward := kernel.has_backward and with_gradients:
                found = bed.gradients(kernel, **inputs, dout=dout, max_ctas=2, **options)
                got |= dict(zip(("d_q", "d_k", "d_v"), found, strict=True))
            dout = dout.cpu() if has_backward else None
            want = compare.run(reference.attention, on_cpu(inputs), on_cpu(options), dout)
            for result, x in got.items():
                error = float((x.cpu() - want[result]).abs().max())
                assert error < 0.05 * max(1, float(want[result].abs().max())), f"{kernel}, {name}: {result}"
            count += 1
    print(f"{count} calls")


def runs(tool: str, group: str) -> list[tuple[str, ...]]:
    """What a tool watches in a group: a part of the kernels' names, and what the calls are asked for.

    racecheck knows no TMA and no wgmma: fa3 is left to the jitter build (tests/README.md). In fa2's forward
    above 128 columns warps meet in pairs, each pair as often as its rows need; where that differs it loses
    the block's barriers too, and reports what one thread writes before __syncthreads() and all read behind.
    initcheck does not see what a bulk copy writes to global memory, fa3's sums of dQ: its gradients are left
    to the guard band tests, whose workspace is full of NaN.
    """
    if group.startswith("fa3"):
        return {"racecheck": [], "initcheck": [("flash_ext", "--forward")]}.get(tool, [("flash_ext",)])
    if tool == "racecheck" and group.startswith("fa2") and group.endswith(("-192", "-256")):
        return [("bwd_kernel",), ("fwd_kernel", "--forward", "--whole-tiles")]
    return [("flash_ext",)]


def watch(job: tuple[str, ...]) -> dict:
    """Runs calls of a group of kernels under one tool."""
    package, tool, group, kernels, *asked = job
    library = Path(package) / f"flash_ext/lib/{group.partition('-')[0]}.so"
    assert kernels.encode() in library.read_bytes(), f"no kernel of {library} is named {kernels}"
    command = [
        compute_sanitizer(),
        f"--tool={tool}",
        "--print-limit=20",
        *TOOLS[tool],
        f"--kernel-name=kns={kernels}",
    ]
    command += [sys.executable, __file__, "--calls", group, "--package", package, *asked]
    start = time.monotonic()
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    text = ran.stdout + ran.stderr
    summary = re.search(r"========= ((?:ERROR|RACECHECK) SUMMARY: .*)", text)
    counted = re.search(r"^(\d+) calls$", text, re.MULTILINE)
    result = {
        "tool": tool,
        "kernels": " ".join([group, *asked]),
        "calls": int(counted[1]) if counted else 0,
        "summary": summary[1] if summary else "none",
        "seconds": round(time.monotonic() - start),
    }
    clean = ran.returncode == 0 and re.search(r"SUMMARY: 0 (errors|hazards)", result["summary"])
    result["clean"] = bool(clean and result["calls"])
    print("{tool}, {kernels}: {summary} in {calls} calls, {seconds} s".format(**result), flush=True)
    if not result["clean"]:
        print(f"==== {tool}, {group} (exit code {ran.returncode})\n{text[-6000:]}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-j", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--calls", metavar="GROUP")
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--whole-tiles", action="store_true")
    parser.add_argument("--package", metavar="FOLDER", default=ROOT, type=Path)
    parser.add_argument("texts", metavar="TEXT", nargs="*", default=[""])
    options = parser.parse_args()
    sys.path.insert(0, str(options.package.resolve()))
    if options.calls:
        calls(options.calls, WHOLE_TILES if options.whole_tiles else CALLS, not options.forward)
        return 0
    import bed

    wanted = (kernel for kernel in bed.KERNELS if any(text in str(kernel) for text in options.texts))
    groups = dict.fromkeys(group_of(kernel) for kernel in wanted)
    jobs = [
        (str(options.package), tool, group, *run)
        for tool in sorted(TOOLS, key=lambda tool: tool != "racecheck")  # the slowest first
        for group in groups
        for run in runs(tool, group)
    ]
    with ThreadPoolExecutor(options.j) as pool:
        results = list(pool.map(watch, jobs))
    from bench import machine

    head = machine.header("sanitizer", "cuda")
    version = subprocess.run([compute_sanitizer(), "--version"], capture_output=True, text=True).stdout
    other = "" if options.package.samefile(ROOT) else options.package.name
    head["kernels"], head["package"] = " or ".join(options.texts) or "all", other or None
    head["compute_sanitizer"] = version.strip().splitlines()[-1] if version.strip() else None
    folder = ROOT / "bench/results" / re.sub(r"[^a-z0-9]+", "-", head["gpu"].lower())
    folder.mkdir(parents=True, exist_ok=True)
    name = f"sanitizer-{other}" if other else "sanitizer"
    path = folder / f"{head['date']}-{head['commit']}-{name}.json"
    path.write_text(json.dumps({"header": head, "runs": results}, indent=1) + "\n")
    clean = sum(result["clean"] for result in results)
    print(f"{clean} of {len(results)} runs clean, {sum(result['calls'] for result in results)} calls\n{path}")
    return clean < len(results)


if __name__ == "__main__":
    sys.exit(main())
