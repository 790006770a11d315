"""Dropout's mask is one and the same on every backend, in the forward and in the backward."""

import bed
import pytest
import torch

DROPOUT = 0.4
MODIFIED = [kernel for kernel in bed.KERNELS if kernel.modified]


def tensors(kernel, seqlen_q=150, seqlen_k=210):
    """Queries and keys with equal scores: no probability is 0 but by dropout."""
    q, k, v = (torch.zeros_like(x) for x in bed.qkv(kernel, 2, seqlen_q, seqlen_k, 2, 2))
    return q, k, v, {"dropout_p": DROPOUT, "rng_state": torch.randint(0, 2**62, (2,), device=bed.DEVICE)}


def kept_by_forward(q, k, v, options, version) -> torch.Tensor:
    """(batch, head, query, key): with a one in a column for each key, out is the probabilities themselves."""
    parts = []
    for first in range(0, k.shape[1], v.shape[-1]):
        v.zero_()
        v[:, first:].diagonal(dim1=1, dim2=3).fill_(1)
        out, _ = torch.ops.flash_ext.fwd(q, k, v, **options, version=version)
        parts.append(out.transpose(1, 2) != 0)
    return torch.cat(parts, -1)[..., : k.shape[1]]


def kept_by_backward(q, k, v, options, version) -> torch.Tensor:
    """The same of dV = Pᵀ dO, with a one in a column of dO for each query."""
    out, lse = torch.ops.flash_ext.fwd(q, k, v, **options, version=version)
    parts = []
    for first in range(0, q.shape[1], v.shape[-1]):
        dout = torch.zeros_like(out)
        dout[:, first:].diagonal(dim1=1, dim2=3).fill_(1)
        dv = torch.ops.flash_ext.bwd(dout, None, q, k, v, out, lse, **options, version=version)[2]
        parts.append(dv.permute(0, 2, 3, 1) != 0)
    return torch.cat(parts, -2)[..., : q.shape[1], :]


@pytest.mark.parametrize("kernel", MODIFIED, ids=str)
def test_the_mask_is_that_of_the_cpu(kernel):
    q, k, v, options = tensors(kernel)
    on_cpu = options | {"rng_state": options["rng_state"].cpu()}
    want = kept_by_forward(*(x.cpu() for x in (q, k, v)), on_cpu, "cpu")
    assert 0.5 < float(want.double().mean()) < 0.7
    with bed.forced(kernel.tile):
        assert torch.equal(kept_by_forward(q, k, v, options, kernel.backend).cpu(), want)
    if kernel.has_backward:
        assert torch.equal(kept_by_backward(q, k, v, options, kernel.backend).cpu(), want)
