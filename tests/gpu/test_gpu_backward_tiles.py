"""Every tile of every backward: those that another card would take are forced here."""

import bed
import compare
import pytest
import torch
from strategies import Problem

PROBLEMS = {
    "full": {"lengths_q": (130, 77), "lengths_k": (193, 300)},
    "causal": {"lengths_q": (200, 333), "lengths_k": (270, 150), "causal": True, "sinks": True},
    "packed window": {"packed_q": True, "packed_k": True, "window": (70, 20), "spare": 3},
}
MODIFIED = {"softcap": 4.0, "alibi": 2, "dropout_p": 0.2, "causal": True}


def find_tiles() -> list[tuple]:
    """(backend, dtype, head_dim, modified, tile) of what runs on this card."""
    found = []
    for backend in bed.BACKENDS:
        for dtype in bed.DTYPES:
            for dims in bed.BUCKETS:
                for modified in False, True:
                    options = bed.FEATURES["softcap"] if modified else {}
                    plans = (
                        bed.plan(backend, dtype, *dims, tile=tile, backward=True, **options)
                        for tile in range(1, 5)
                    )
                    tiles = [i for i, plan in enumerate(plans, 1) if isinstance(plan, dict)]
                    found += [(backend, dtype, dims, modified, tile) for tile in tiles]
    return found


class Forced(torch.autograd.Function):
    """Attention whose gradients come from one backend and tile, its out and lse from any."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, backend, tile, options):
        options = options | ({} if sinks is None else {"sinks": sinks})
        out, lse = torch.ops.flash_ext.fwd(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = backend, tile, options
        return out, lse

    @staticmethod
    def backward(ctx, dout, d_lse):
        backend, tile, options = ctx.call
        with bed.forced(tile):
            *gradients, d_sinks = torch.ops.flash_ext.bwd(
                dout, d_lse, *ctx.saved_tensors, **options, version=backend
            )
        return *gradients, d_sinks if "sinks" in options else None, None, None, None


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("backend, dtype, dims, modified, tile", find_tiles())
def test_every_tile_of_a_backward(backend, dtype, dims, modified, tile, name):
    options = PROBLEMS[name] | (MODIFIED if modified else {})
    problem = Problem(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], **options)
    inputs, options, dout, d_lse = problem.tensors(bed.DEVICE)

    def function(q, k, v, sinks=None, **options):
        return Forced.apply(q, k, v, sinks, backend, tile, options)

    compare.check(inputs, options, dout, d_lse, function=function)
