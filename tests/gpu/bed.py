"""What every GPU test leans on: which kernels there are, what they can run, and how one of them is forced."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import compare
import torch
from strategies import Problem
from torch import Tensor

DEVICE = "cuda"
# Collected on a machine without a GPU, the tests are those of the card they are mostly run on.
TARGET = DEVICE if torch.cuda.is_available() else "sm_90"
DTYPES = (torch.bfloat16, torch.float16)
FEW_CTAS = (1, 3)  # each works on many tiles then: pipelines wrap, epilogues meet the next tile's loads


@contextmanager
def forced(tile: int = 0, max_ctas: int = 0) -> Iterator[None]:
    """Run with one tile of the table (1, 2, ...; 0: the backend's choice) and at most so many CTAs."""
    wanted = {"FLASH_EXT_TILE": str(tile), "FLASH_EXT_MAX_CTAS": str(max_ctas)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@functools.cache
def dtype_of(backend: str) -> torch.dtype:
    """One that the backend takes."""
    return next((dtype for dtype in DTYPES if isinstance(plan(backend, dtype), dict)), DTYPES[0])


def plan(
    backend: str, dtype=None, head_dim=64, head_dim_v=0, tile=0, backward=False, **options
) -> dict | str:
    """What the backend plans for a small problem, or why it cannot run it."""
    q = torch.empty(1, 16, 2, head_dim, dtype=dtype or dtype_of(backend), device="meta")
    v = q.new_empty(1, 16, 2, head_dim_v or head_dim)
    with forced(tile):
        try:
            text = torch.ops.flash_ext.plan(
                q, q, v, **options, version=backend, backward=backward, device=TARGET
            )
            return json.loads(text)
        except RuntimeError as error:
            return str(error)


@functools.cache
def can(backend: str, feature: str = "", **problem) -> bool:
    """Whether the backend can run a problem, with `feature` ("softcap", "alibi", "dropout", ...)."""
    return isinstance(plan(backend, **(problem | FEATURES[feature])), dict)


FEATURES = {
    "": {},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": torch.empty(2, device="meta")},
    "dropout": {"dropout_p": 0.1, "rng_state": torch.empty(2, dtype=torch.int64, device="meta")},
    "odd head_dim": {"head_dim": 63},
    "head_dim 256": {"head_dim": 256},
    "backward": {"backward": True},
}
BACKENDS = [name for name in ("fa3", "fa2", "fa1") if can(name)]


class Kernel(NamedTuple):
    backend: str
    dtype: torch.dtype
    head_dim: int  # the largest that it takes
    head_dim_v: int
    tile: int
    modified: bool = False  # the form with softcap, ALiBi and dropout

    def __str__(self) -> str:
        dims = (
            f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim},{self.head_dim_v}"
        )
        form = "-modified" if self.modified else ""
        return f"{self.backend}-{str(self.dtype)[6:]}-{dims}-{self.tile}{form}"

    def fits(self, **problem) -> Problem:
        """A problem for this kernel; head dimensions that are not given fill it."""
        return Problem(
            **({"dtype": self.dtype, "head_dim": self.head_dim, "head_dim_v": self.head_dim_v} | problem)
        )

    @property
    def has_backward(self) -> bool:
        """Whether its backend has gradients for such problems; asked for one of its tiles only."""
        dims = {"head_dim": self.head_dim, "head_dim_v": self.head_dim_v}
        form = "softcap" if self.modified else ""
        return self.tile <= 1 and can(self.backend, form, backward=True, dtype=self.dtype, **dims)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, max_ctas: int = 0, **options) -> tuple[Tensor, Tensor]:
        options = self.options(options, q)
        with forced(self.tile, max_ctas):
            return torch.ops.flash_ext.fwd(q, k, v, **options, version=self.backend)

    def options(self, options: dict, q: Tensor) -> dict:
        """With what makes the backend choose this form: slopes of 0 change nothing."""
        plain = not any(options.get(name) for name in ("softcap", "dropout_p"))
        if self.modified and plain and options.get("alibi_slopes") is None:
            return options | {"alibi_slopes": torch.zeros(q.shape[-2], device=q.device)}
        return options

    def check(
        self,
        inputs: dict[str, Tensor],
        options: dict,
        dout: Tensor | None = None,
        d_lse: Tensor | None = None,
    ) -> compare.Results:
        """One call, held against float64; with few CTAs it must give the same bits.

        With dout, and where the backend has gradients, those through out and lse too.
        """
        with_gradients = dout is not None and self.has_backward
        expected = compare.Expected(inputs, options, *((dout, d_lse) if with_gradients else ()))
        got = expected.hold(self.forward)
        for max_ctas in FEW_CTAS:
            assert_same(self.forward(**inputs, **options, max_ctas=max_ctas), (got["out"], got["lse"]))
        CHECKED[self.backend] += 1
        if with_gradients:
            self.check_same_gradients(expected)
        return got

    def check_same_gradients(self, expected: compare.Expected) -> None:
        """Deterministic gradients are right, and the same with few CTAs."""
        got = expected.hold(self.forward, deterministic=True)
        options = expected.options | {"deterministic": True}
        for max_ctas in FEW_CTAS:
            with forced(max_ctas=max_ctas):  # autograd calls the backward, on a thread of its own
                again = compare.run(self.forward, expected.inputs, options, *expected.gradients)
            assert_same(tuple(again.values()), tuple(got.values()), tuple(got))
        CHECKED[f"{self.backend} backward"] += 1

    def check_problem(self, **problem) -> None:
        self.check(*self.fits(**problem).tensors(DEVICE))


CHECKED: Counter[str] = Counter()  # backend -> calls held against float64


BUCKETS = ((256, 256), (192, 192), (192, 128), (128, 128), (96, 96), (64, 64), (32, 32))


def find_kernels() -> list[Kernel]:
    """Every kernel of every backend here, told apart by bucket, tile and shared memory."""
    kernels = {}
    for backend in BACKENDS:
        for dtype in DTYPES:
            for dims in BUCKETS:
                for modified, tile in itertools.product((False, True), range(1, 9)):
                    options = FEATURES["softcap"] if modified else {}
                    planned = plan(backend, dtype, *dims, tile=tile, **options)
                    if isinstance(planned, str):
                        continue
                    bucket = planned["why"].partition(" holds")[0]
                    shape = bucket, tuple(planned["tile"]), planned["smem_bytes"], planned["stages"]
                    kernel = Kernel(backend, dtype, *dims, tile, modified)
                    kernels.setdefault((backend, dtype, modified, *shape), kernel)
    return list(kernels.values())


KERNELS = find_kernels()
WITH_BACKWARD = [kernel for kernel in KERNELS if kernel.has_backward]


def fitted(problem: Problem, backend: str) -> Problem:
    """The nearest problem that the backend takes."""
    dtypes = {kernel.dtype for kernel in KERNELS if kernel.backend == backend}
    dtype = problem.dtype if problem.dtype in dtypes else dtypes.pop()
    most = max(kernel.head_dim for kernel in KERNELS if (kernel.backend, kernel.dtype) == (backend, dtype))

    def dim(n: int) -> int:
        n = min(n, most)
        return n if can(backend, "odd head_dim") else -(-n // 8) * 8

    off = {"softcap": {"softcap": 0.0}, "alibi": {"alibi": 0}, "dropout": {"dropout_p": 0.0}}
    changes = {"dtype": dtype, "head_dim": dim(problem.head_dim), "head_dim_v": dim(problem.head_dim_v)}
    for feature, without in off.items():
        changes |= {} if can(backend, feature) else without
    return replace(problem, **changes)


GRADIENTS = ("dq", "dk", "dv")


def qkv(
    kernel: Kernel, batch=2, seqlen_q=200, seqlen_k=200, nheads=4, nheads_k=2
) -> tuple[Tensor, Tensor, Tensor]:
    """Random normal q, k and v for the kernel."""
    shapes = (seqlen_q, nheads), (seqlen_k, nheads_k), (seqlen_k, nheads_k)
    like = {"dtype": kernel.dtype, "device": DEVICE}
    dims = kernel.head_dim, kernel.head_dim, kernel.head_dim_v
    q, k, v = (torch.randn(batch, *shape, dim, **like) for shape, dim in zip(shapes, dims, strict=True))
    return q, k, v


def gradients(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, max_ctas: int = 0, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """Deterministic dq, dk and dv of one call."""
    out, lse = kernel.forward(q, k, v, **options)
    options |= {"deterministic": True, "version": kernel.backend}
    with forced(max_ctas=max_ctas):
        return torch.ops.flash_ext.bwd(dout, None, q, k, v, out, lse, **options)[:3]


def assert_same(
    got: tuple[Tensor, ...], want: tuple[Tensor, ...], names: tuple[str, ...] = ("out", "lse")
) -> None:
    """Bit by bit."""
    for name, x, y in zip(names, got, want, strict=True):
        assert x.shape == y.shape, f"{name}: {tuple(x.shape)}, not {tuple(y.shape)}"
        if torch.equal(x, y):
            continue
        wrong = (x != y) & ~(x.isnan() & y.isnan())
        assert not wrong.any(), (
            f"{name}: {int(wrong.sum())} of {x.numel()} elements differ, first at {wrong.nonzero()[0].tolist()}"
        )
