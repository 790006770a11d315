"""Problems for hypothesis: shapes, masks, lengths and memory layouts, with NaN wherever nobody may look."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from compare import DTYPES, accumulator
from hypothesis import strategies as st
from torch import Tensor

LAYOUTS = ("contiguous", "heads first", "inside NaN", "transposed", "expanded heads", "odd strides")
# Around the edges of 16-, 64- and 128-row tiles.
LENGTHS = st.one_of(st.integers(0, 200), st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 193]))


@dataclass(frozen=True)
class Problem:
    """One attention problem; `tensors` makes its inputs. Printed whole by hypothesis when it fails."""

    dtype: torch.dtype = torch.float32
    lengths_q: tuple[int, ...] = (100, 70)  # rows that count, by sequence
    lengths_k: tuple[int, ...] = (90, 130)
    packed_q: bool = False
    packed_k: bool = False
    spare: int = 0  # rows of NaN behind (packed: also before) each sequence
    nheads_k: int = 2
    group: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    top_left: bool = False
    softcap: float = 0.0
    alibi: int = 0  # 0 none, 1 (nheads), 2 (batch, nheads)
    sinks: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    layouts: tuple[str, ...] = ("contiguous",) * 4  # of q, k, v and dout
    seed: int = field(default=0, repr=True)

    def tensors(self, device: str = "cpu") -> tuple[dict[str, Tensor], dict, Tensor, Tensor]:
        """Inputs (q, k, v, sinks), options, dout and d_lse."""
        g = torch.Generator().manual_seed(self.seed)
        nheads, batch = self.nheads_k * self.group, len(self.lengths_q)
        options = {"causal": self.causal, "window_left": self.window[0], "window_right": self.window[1]}
        options |= {"top_left": self.top_left, "softcap": self.softcap, "softmax_scale": self.scale}
        shapes = {
            "q": (self.lengths_q, self.packed_q, nheads, self.head_dim),
            "k": (self.lengths_k, self.packed_k, self.nheads_k, self.head_dim),
            "v": (self.lengths_k, self.packed_k, self.nheads_k, self.head_dim_v),
            "dout": (self.lengths_q, self.packed_q, nheads, self.head_dim_v),
            "d_lse": (self.lengths_q, self.packed_q, nheads, 1),
        }
        made = {name: self._rows(g, *shape) for name, shape in shapes.items()}
        for side, lengths, packed in (
            ("q", self.lengths_q, self.packed_q),
            ("k", self.lengths_k, self.packed_k),
        ):
            if packed:
                starts = [self.spare]
                for n in lengths:
                    starts.append(starts[-1] + n + self.spare)
                options[f"cu_seqlens_{side}"] = torch.tensor(starts, dtype=torch.int32, device=device)
            if self.spare or (not packed and len(set(lengths)) > 1):
                options[f"seqused_{side}"] = torch.tensor(lengths, dtype=torch.int32, device=device)
        if self.alibi:
            shape = (nheads,) if self.alibi == 1 else (batch, nheads)
            options["alibi_slopes"] = torch.rand(shape, generator=g).to(device)
        if self.dropout_p:
            options["dropout_p"] = self.dropout_p
            options["rng_state"] = torch.randint(0, 2**62, (2,), generator=g).to(device)
        inputs = {
            name: with_layout(made[name].to(device, self.dtype), layout)
            for name, layout in zip(("q", "k", "v", "dout"), self.layouts, strict=True)
        }
        dout = inputs.pop("dout")
        if self.sinks:
            sinks = torch.randn(nheads, generator=g, dtype=torch.float64)
            sinks[torch.rand(nheads, generator=g) < 0.2] = -math.inf
            inputs["sinks"] = sinks.to(device, accumulator(self.dtype))
        d_lse = made["d_lse"].squeeze(-1).transpose(-1, -2).contiguous().to(device, accumulator(self.dtype))
        return inputs, options, dout, d_lse

    def _rows(
        self, g: torch.Generator, lengths: tuple[int, ...], packed: bool, heads: int, dim: int
    ) -> Tensor:
        longest = max(lengths, default=0) + self.spare
        parts = []
        for n in lengths:
            part = torch.full(
                (n + self.spare if packed else longest, heads, dim), math.nan, dtype=torch.float64
            )
            part[:n] = torch.randn(n, heads, dim, generator=g, dtype=torch.float64)
            parts.append(part)
        if not packed:
            return torch.stack(parts) if parts else torch.empty(0, 0, heads, dim, dtype=torch.float64)
        return torch.cat([torch.full((self.spare, heads, dim), math.nan, dtype=torch.float64), *parts])


def with_layout(x: Tensor, layout: str) -> Tensor:
    """The same values (for "expanded heads": the first head's for all) in other memory."""
    if layout == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "inside NaN":
        rows, heads, dim = x.shape[-3:]
        room = x.new_full((*x.shape[:-3], rows + 3, heads + 1, dim + 16), math.nan)
        room[..., 1 : rows + 1, :heads, 8 : dim + 8] = x
        return room[..., 1 : rows + 1, :heads, 8 : dim + 8]
    if layout == "transposed":  # the last dimension is not contiguous: copied once
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded heads" and x.shape[-2] > 0:
        return x[..., :1, :].contiguous().expand(x.shape)
    if layout == "odd strides":  # strides of dimensions of size 1 mean nothing
        strides = [
            7777 if n == 1 and i < x.ndim - 1 else s
            for i, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True))
        ]
        return torch.as_strided(x, x.shape, strides)
    return x


@st.composite
def problems(draw, dtypes=DTYPES) -> Problem:
    batch = draw(st.integers(1, 2))
    group = draw(st.integers(1, 16))
    lengths_q, lengths_k = (tuple(draw(st.lists(LENGTHS, min_size=batch, max_size=batch))) for _ in "qk")
    window = st.integers(-1, 200)
    return Problem(
        dtype=draw(st.sampled_from(dtypes)),
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        packed_q=draw(st.booleans()),
        packed_k=draw(st.booleans()),
        spare=draw(st.sampled_from([0, 0, 1, 5])),
        nheads_k=draw(st.integers(1, 3)) if group < 5 else 1,
        group=group,
        head_dim=draw(st.integers(1, 256)),
        head_dim_v=draw(st.integers(1, 256)),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.just((-1, -1)), st.tuples(window, window))),
        top_left=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        alibi=draw(st.sampled_from([0, 0, 1, 2])),
        sinks=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3])),
        scale=draw(st.sampled_from([None, 0.2])),
        layouts=tuple(draw(st.lists(st.sampled_from(LAYOUTS), min_size=4, max_size=4))),
        seed=draw(st.integers(0, 2**31)),
    )
