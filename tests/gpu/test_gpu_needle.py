"""Every query sees one key alone: a key that is dropped, doubled, permuted or leaked shows in its row.

Keys are random signs, query i is key π(i), and the scale makes the weight of that key 1 - 1e-6 at least, so
out[i] is V[π(i)] to one rounding. π covers every key of every block; under masks the first and the last
visible one, and those one step outside, which must not be found.
"""

from collections.abc import Iterator

import bed
import pytest
import torch
from strategies import Problem

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "causal, top left": {"causal": True, "top_left": True},
    "window": {"window": (45, 17)},
    "left window": {"window": (64, -1)},
    "narrow window": {"window": (0, 2), "top_left": True},
}
LENGTHS = {"square": (333, 333), "more queries": (300, 129), "more keys": (65, 515)}


def sequences(problem: Problem, inputs: dict, options: dict):
    """Batch index, and views of the rows of q, k and v that count."""
    for b, (rows, keys) in enumerate(zip(problem.lengths_q, problem.lengths_k, strict=True)):
        views = []
        for name, n in (("q", rows), ("k", keys), ("v", keys)):
            cu_seqlens = options.get(f"cu_seqlens_{'q' if name == 'q' else 'k'}")
            whole = inputs[name][b] if cu_seqlens is None else inputs[name][int(cu_seqlens[b]) :]
            views.append(whole[:n])
        yield b, *views


def visible(problem: Problem, rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that each query sees, [begin, end)."""
    i = torch.arange(rows, device=bed.DEVICE) + (0 if problem.top_left else keys - rows)
    left, right = problem.window[0], 0 if problem.causal else problem.window[1]
    begin = (i - left).clamp(0, keys) if left >= 0 else torch.zeros_like(i)
    end = (i + right + 1).clamp(0, keys) if right >= 0 else torch.full_like(i, keys)
    return begin, end


def aim(where: str, begin, end, heads: int) -> torch.Tensor:
    """π: the key that each (query, head) looks for."""
    heads = torch.arange(heads, device=begin.device)
    begin, end, i = begin[:, None], end[:, None], torch.arange(len(begin), device=begin.device)[:, None]
    match where:
        case "every":
            return begin + (i + len(begin) * heads) % (end - begin).clamp(min=1)
        case "first":
            return begin + 0 * heads
        case "last":
            return end - 1 + 0 * heads
        case "before":
            return begin - 1 + 0 * heads
        case "after":
            return end + 0 * heads
    raise ValueError(where)


def plant(problem: Problem, inputs: dict, options: dict, where: str):
    """Write the needles into q and k; returns for each sequence (π, whether it is visible), both (rows, heads)."""
    dim, crosstalk, aims = problem.head_dim, 0.0, []
    for _, q, k, _ in sequences(problem, inputs, options):
        k[:] = torch.randint(0, 2, k.shape, device=k.device) * 2 - 1
        dots = torch.einsum("ihd,jhd->hij", k.float(), k.float())
        crosstalk = max(crosstalk, float((dots - 2 * dim * torch.eye(len(k), device=k.device)).max()))
        begin, end = visible(problem, len(q), len(k))
        target = aim(where, begin, end, q.shape[1])
        seen = (target >= begin[:, None]) & (target < end[:, None])
        heads = torch.arange(q.shape[1], device=k.device) // problem.group
        q[:] = k[target.clamp(0, len(k) - 1), heads]
        aims.append((target, seen))
    options["softmax_scale"] = 30 / (dim - crosstalk)
    return aims


def check_needles(kernel: bed.Kernel, problem: Problem, wheres: tuple[str, ...]) -> None:
    inputs, options, _, _ = problem.tensors(bed.DEVICE)
    for where in wheres:
        aims = plant(problem, inputs, options, where)
        got = kernel.check(inputs, options)
        assert_found(problem, inputs, options, aims, got)


def assert_found(problem: Problem, inputs: dict, options: dict, aims: list, got: dict) -> None:
    """The visible ones of the keys that were looked for are what out holds."""
    step = torch.finfo(problem.dtype).eps
    for b, _, _, v in sequences(problem, inputs, options):
        target, seen = aims[b]
        start = 0 if not problem.packed_q else int(options["cu_seqlens_q"][b])
        out = (got["out"] if problem.packed_q else got["out"][b])[start : start + len(target)].float()
        heads = torch.arange(out.shape[1], device=out.device) // problem.group
        want = v[target.clamp(0, len(v) - 1), heads].float()
        missed = ((out - want).abs() > step * want.abs() + 1e-5).any(-1) & seen
        assert not missed.any(), (
            f"sequence {b}: {int(missed.sum())} queries did not find their key, first (query, head) "
            f"{missed.nonzero()[0].tolist()}, which looked for key {int(target[missed][0])}"
        )


def every_key(kernel: bed.Kernel, packed: bool) -> Iterator[Problem]:
    """More queries than keys, over all heads."""
    for lengths in (333, 260), (700, 129), (64, 64):
        yield kernel.fits(
            lengths_q=lengths, lengths_k=lengths[::-1], group=4, packed_q=packed, packed_k=packed
        )


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_every_key_is_found(kernel, packed):
    for problem in every_key(kernel, packed):
        check_needles(kernel, problem, ("every",))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kernel", bed.WITH_BACKWARD, ids=str)
def test_every_key_gets_its_gradients(kernel, packed):
    """dV[j] is the sum of dO over the queries that look for key j."""
    for problem in every_key(kernel, packed):
        inputs, options, dout, d_lse = problem.tensors(bed.DEVICE)
        aims = plant(problem, inputs, options, "every")
        kernel.check(inputs, options, dout, d_lse)
        dv = bed.gradients(kernel, **inputs, dout=dout, **options)[2]
        for b, (target, _) in enumerate(aims):
            starts = [0, 0] if not packed else [int(options[f"cu_seqlens_{x}"][b]) for x in "qk"]
            mine, theirs = (x if packed else x[b] for x in (dv, dout))
            theirs = theirs[starts[0] : starts[0] + len(target)].float()
            got = mine[starts[1] : starts[1] + problem.lengths_k[b]].float()
            want = torch.zeros_like(got)
            heads = torch.arange(target.shape[1], device=got.device) // problem.group
            want.index_put_((target, heads), theirs, accumulate=True)
            step = torch.finfo(problem.dtype).eps
            missed = ((got - want).abs() > step * want.abs() + 2e-3).any(-1)
            assert not missed.any(), (
                f"sequence {b}: dV of (key, head) {missed.nonzero()[0].tolist()} is wrong"
            )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", bed.WITH_BACKWARD, ids=str)
def test_edges_of_the_mask_backward(kernel, mask):
    lengths_q, lengths_k = zip(*LENGTHS.values(), strict=True)
    problem = kernel.fits(lengths_q=lengths_q, lengths_k=lengths_k, **MASKS[mask])
    inputs, options, dout, d_lse = problem.tensors(bed.DEVICE)
    for where in "first", "last", "before", "after":
        plant(problem, inputs, options, where)
        kernel.check(inputs, options, dout, d_lse)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_edges_of_the_mask(kernel, packed, mask):
    lengths_q, lengths_k = zip(*LENGTHS.values(), strict=True)
    lengths = {"lengths_q": lengths_q, "lengths_k": lengths_k, "spare": 3 if packed else 0}
    problem = kernel.fits(**lengths, packed_q=packed, packed_k=packed, **MASKS[mask])
    check_needles(kernel, problem, ("first", "last", "before", "after"))
