"""Which memory is read and written: guard bands, isolation, views, and offsets beyond 2^31 elements."""

import functools

import bed
import compare
import pytest
import table
import torch
from strategies import LAYOUTS, with_layout

BAND = 4096  # bytes on each side of a tensor
PATTERN = 0x7FE5  # a NaN of float16 and of bfloat16, twice a NaN of float32: what is not written shows
GUARDED = {
    "padded": {"lengths_q": (200, 130), "lengths_k": (130, 333), "sinks": True},
    "packed": {"packed_q": True, "packed_k": True, "lengths_q": (5, 129, 70), "lengths_k": (65, 0, 200), "causal": True},
    "spare rows": {"spare": 9, "lengths_q": (1, 127), "lengths_k": (63, 257), "window": (50, 9)},
}  # fmt: skip


class Room:
    """A tensor between two bands of the pattern; until it is written its own memory holds the pattern too."""

    def __init__(self, shape, dtype: torch.dtype):
        size = torch.Size(shape).numel() * dtype.itemsize
        self.words = torch.full((-(-size // 2) + BAND,), PATTERN, dtype=torch.int16, device=bed.DEVICE)
        self.inside = self.words.view(torch.uint8)[BAND : BAND + size]
        self.tensor = self.inside.view(dtype).view(shape)

    @classmethod
    def holding(cls, x: torch.Tensor) -> "Room":
        room = cls(x.shape, x.dtype)
        room.tensor.copy_(x)
        return room

    def bands(self) -> torch.Tensor:
        before, after = self.words[: BAND // 2], self.words[-(BAND // 2) :]
        return torch.cat([before, after])


def guarded_forward(kernel: bed.Kernel, max_ctas: int, q, k, v, **options):
    """The forward with everything it gets between bands, and exactly the workspace that it planned."""
    backend, options = table.load(kernel.backend), kernel.options(options, q)
    given = {"q": q, "k": k, "v": v} | {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    inputs = {name: Room.holding(x) for name, x in given.items()}
    tensors = {name: room.tensor for name, room in inputs.items()}
    options |= {name: x for name, x in tensors.items() if name in options}
    problem = table.describe(tensors, options, max_ctas, kernel.tile)
    outputs = {
        "out": Room((*q.shape[:-1], v.shape[-1]), q.dtype),
        "lse": Room((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.float32),
        "workspace": Room((table.planned_bytes(backend, problem),), torch.uint8),
    }
    before = {name: room.words.clone() for name, room in inputs.items()}
    table.forward(backend, problem, tensors | {name: room.tensor for name, room in outputs.items()})
    for name, room in inputs.items():
        assert torch.equal(room.words, before[name]), f"{name}, an input, was written"
    for name, room in outputs.items():
        assert (room.bands() == PATTERN).all(), f"memory beside {name} was written"
    return outputs["out"].tensor.clone(), outputs["lse"].tensor.clone()


@pytest.mark.parametrize("max_ctas", [0, *bed.FEW_CTAS])
@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
@pytest.mark.parametrize("name", GUARDED)
def test_guard_bands(name, kernel, max_ctas):
    less = 0 if name == "padded" else 8  # than the bucket: the rest of a row is somebody else's
    dims = {"head_dim": kernel.head_dim - less, "head_dim_v": kernel.head_dim_v - less}
    inputs, options, _, _ = kernel.fits(**GUARDED[name], **dims).tensors(bed.DEVICE)
    bed.CHECKED[kernel.backend] += 1
    compare.check(inputs, options, function=functools.partial(guarded_forward, kernel, max_ctas))


@pytest.mark.parametrize("max_ctas", [0, *bed.FEW_CTAS])
@pytest.mark.parametrize("kernel", bed.WITH_BACKWARD, ids=str)
@pytest.mark.parametrize("name", GUARDED)
def test_guard_bands_backward(name, kernel, max_ctas):
    """The backward with everything it gets between bands, on exactly the workspace that it planned, full of NaN."""
    less = 0 if name == "padded" else 8
    dims = {"head_dim": kernel.head_dim - less, "head_dim_v": kernel.head_dim_v - less}
    inputs, options, dout, d_lse = kernel.fits(**GUARDED[name], **dims).tensors(bed.DEVICE)
    out, lse = kernel.forward(**inputs, **options)
    options["deterministic"] = True
    want = torch.ops.flash_ext.bwd(
        dout, d_lse, *(inputs[n] for n in "qkv"), out, lse, version=kernel.backend,
        **options, **{n: x for n, x in inputs.items() if n == "sinks"},
    )  # fmt: skip
    backend = table.load(kernel.backend)
    given = inputs | {"dout": dout, "d_lse": d_lse, "out": out, "lse": lse}
    given |= {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    rooms = {name: Room.holding(x) for name, x in given.items()}
    before = {name: room.words.clone() for name, room in rooms.items()}
    outputs = {f"d{n}": Room(inputs[n].shape, kernel.dtype) for n in "qkv"}
    if "sinks" in inputs:
        outputs["d_sink"] = Room(inputs["sinks"].shape, torch.float32)
    tensors = {name: room.tensor for name, room in (rooms | outputs).items()}
    problem = table.describe(tensors, options, max_ctas)
    table.describe_backward(problem, tensors, deterministic=True)
    outputs["workspace"] = Room((table.planned_bytes(backend, problem),), torch.uint8)
    table.backward(backend, problem, tensors | {"workspace": outputs["workspace"].tensor})
    for name, room in rooms.items():
        assert torch.equal(room.words, before[name]), f"{name}, an input, was written"
    for name, room in outputs.items():
        assert (room.bands() == PATTERN).all(), f"memory beside {name} was written"
    names = [name for name in outputs if name != "workspace"]
    bed.assert_same(tuple(outputs[name].tensor for name in names), want[: len(names)], tuple(names))
    bed.CHECKED[f"{kernel.backend} backward"] += 1


def among_rubbish(kernel: bed.Kernel, packed: bool, rubbish: float):
    """Inputs, the same with rubbish in all but one sequence's rows, where that sequence lies, options, dout twice."""
    lengths = {"lengths_q": (129, 70, 200), "lengths_k": (65, 93, 257), "spare": 2}
    problem = kernel.fits(**lengths, packed_q=packed, packed_k=packed, causal=True)
    inputs, options, dout, _ = problem.tensors(bed.DEVICE)
    others, mine = {}, {}
    for name, x in (inputs | {"dout": dout}).items():
        cu_seqlens = options.get(f"cu_seqlens_{'k' if name in 'kv' else 'q'}")
        mine[name] = 1 if cu_seqlens is None else slice(int(cu_seqlens[1]), int(cu_seqlens[2]) - 2)
        others[name] = torch.full_like(x, rubbish)
        others[name][mine[name]] = x[mine[name]]
    return inputs, others, mine, options, (dout, others.pop("dout"))


@pytest.mark.parametrize("kernel", bed.WITH_BACKWARD, ids=str)
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, 1e4])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_gradients_never_depend_on_other_sequences(packed, rubbish, kernel):
    inputs, others, mine, options, douts = among_rubbish(kernel, packed, rubbish)
    results = [
        tuple(
            g[mine[n]] for g, n in zip(bed.gradients(kernel, **x, dout=dout, **options), "qkv", strict=True)
        )
        for x, dout in zip((inputs, others), douts, strict=True)
    ]
    bed.assert_same(results[1], results[0], bed.GRADIENTS)
    assert all(torch.isfinite(x).all() for x in results[0])


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, 1e4])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_sequence_never_depends_on_others(packed, rubbish, kernel):
    """Whatever lies in the other sequences and in spare rows, the results are the same bits."""
    inputs, others, mine, options, _ = among_rubbish(kernel, packed, rubbish)

    def own(out, lse):
        return out[mine["q"]], lse[:, mine["q"]] if packed else lse[mine["q"]]

    results = own(*kernel.forward(**inputs, **options))
    bed.assert_same(own(*kernel.forward(**others, **options)), results)
    assert torch.isfinite(results[0]).all()


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, "misaligned", "odd row stride"])
def test_same_values_in_other_memory(layout, kernel):
    def laid_out(x):
        if layout in ("misaligned", "odd row stride"):  # copied once
            room = x.new_full((*x.shape[:-1], x.shape[-1] + (8 if layout == "misaligned" else 3)), torch.nan)
            start = 1 if layout == "misaligned" else 0
            room[..., start : start + x.shape[-1]] = x
            return room[..., start : start + x.shape[-1]]
        return with_layout(x, layout)

    tensors = [laid_out(x) for x in bed.qkv(kernel, seqlen_q=150, seqlen_k=333)]
    plain = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
    bed.assert_same(kernel.forward(*tensors, causal=True), kernel.forward(*plain, causal=True))


@pytest.mark.parametrize("kernel", bed.WITH_BACKWARD, ids=str)
@pytest.mark.parametrize("layout", ["heads first", "inside NaN", "expanded heads", "all strides 0"])
def test_gradients_of_any_dout(layout, kernel):
    """dO where no tensor map steps through it is copied by the backward itself."""
    q, k, v = bed.qkv(kernel, seqlen_q=150, seqlen_k=333)
    dout = torch.randn(*q.shape[:3], v.shape[-1], dtype=kernel.dtype, device=bed.DEVICE)
    dout = dout[:1, :1, :1, :1].expand_as(dout) if layout == "all strides 0" else with_layout(dout, layout)
    want = bed.gradients(kernel, q, k, v, dout.clone(memory_format=torch.contiguous_format), causal=True)
    bed.assert_same(bed.gradients(kernel, q, k, v, dout, causal=True), want, bed.GRADIENTS)


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_views_of_packed_qkv_are_used_in_place(kernel):
    qkv = torch.randn(2, 300, 3, 4, kernel.head_dim_v, dtype=kernel.dtype, device=bed.DEVICE)
    want = kernel.forward(*(x.contiguous() for x in qkv.unbind(2)))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = kernel.forward(*qkv.unbind(2))
    assert torch.cuda.max_memory_allocated() - before <= sum(x.nbytes for x in got) + 2048
    bed.assert_same(got, want)


@pytest.mark.parametrize("kernel", bed.KERNELS, ids=str)
def test_hints_change_nothing(kernel):
    inputs, options, _, _ = kernel.fits(packed_q=True, packed_k=True, causal=True).tensors(bed.DEVICE)
    want = kernel.forward(**inputs, **options)
    for hint in 0, 1, 10**6:
        bed.assert_same(kernel.forward(**inputs, **options, max_seqlen_q=hint, max_seqlen_k=hint), want)


# ---- More than 2^31 elements: a kernel with 32-bit offsets reads elsewhere. ----

ONE_A_BUCKET = {
    (kernel.backend, kernel.head_dim, kernel.head_dim_v): kernel
    for kernel in bed.KERNELS
    if not kernel.modified
}.values()


def assert_close(got, want) -> None:
    """The same rows in other places of a tile: a rounding may differ."""
    assert torch.allclose(got[0].float(), want[0].float(), atol=2e-2)
    assert torch.allclose(got[1], want[1], atol=1e-4)


def tensor(kernel: bed.Kernel, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=kernel.dtype, device=bed.DEVICE).normal_()


@pytest.mark.parametrize("kernel", ONE_A_BUCKET, ids=str)
def test_queries_beyond_2_31_elements(kernel):
    rows = 2**31 // (8 * kernel.head_dim) + 130
    q, k, v = (
        tensor(kernel, 1, rows, 8, kernel.head_dim),
        tensor(kernel, 1, 70, 2, kernel.head_dim),
        tensor(kernel, 1, 70, 2, kernel.head_dim_v),
    )
    out, lse = kernel.forward(q, k, v)
    for part in slice(0, 100), slice(rows - 200, rows):
        assert_close((out[:, part], lse[..., part]), kernel.forward(q[:, part].contiguous(), k, v))
    kernel.check({"q": q[:, -100:], "k": k, "v": v}, {})


@pytest.mark.parametrize("kernel", ONE_A_BUCKET, ids=str)
def test_keys_beyond_2_31_elements(kernel):
    keys = 2**31 // (8 * kernel.head_dim) + 130
    q = tensor(kernel, 1, 64, 8, kernel.head_dim)
    k, v = (tensor(kernel, 1, keys, 8, dim) for dim in (kernel.head_dim, kernel.head_dim_v))
    got = kernel.forward(q, k, v, causal=True, window_left=300)
    last = [x[:, -500:].contiguous() for x in (k, v)]
    assert_close(got, kernel.forward(q, *last, causal=True, window_left=300))


@pytest.mark.parametrize("kernel", ONE_A_BUCKET, ids=str)
def test_strides_beyond_2_31_elements(kernel):
    """Rows of k and v, or batches of q, that lie far apart."""
    far = torch.empty(2**31 + 2**29, dtype=kernel.dtype, device=bed.DEVICE)

    def spread(x: torch.Tensor, batch_stride: int, row_stride: int) -> torch.Tensor:
        view = far.as_strided(x.shape, (batch_stride, row_stride, x.shape[3], 1))
        return view.copy_(x)

    q, k, v = bed.qkv(kernel, batch=1, seqlen_q=130, seqlen_k=200)
    want = kernel.forward(q, k, v)
    row_stride = far.numel() // 200 // 512 * 512
    bed.assert_same(kernel.forward(q, spread(k, 0, row_stride), v), want)
    bed.assert_same(kernel.forward(q, k, spread(v, 0, row_stride)), want)
    q, k, v = bed.qkv(kernel, batch=3, seqlen_q=130, seqlen_k=200)
    bed.assert_same(kernel.forward(spread(q, 2**30, q.stride(1)), k, v), kernel.forward(q, k, v))
