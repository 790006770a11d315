"""Dropout: the mask of the definition exactly, its statistics, its seeds."""

import pytest
import torch
from compare import DTYPES, check, fwd
from strategies import Problem

from flash_ext import flash_attn_func, flash_attn_varlen_func, reference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_the_mask_is_that_of_the_definition(group, dtype):
    """With equal scores and one-hot values, out[i] is the kept and rescaled row of the softmax itself."""
    batch, rows, keys, heads = 2, 37, 53, 2 * group
    state = torch.randint(0, 2**62, (2,))
    q, k = torch.zeros(batch, rows, heads, 8, dtype=dtype), torch.zeros(batch, keys, 2, 8, dtype=dtype)
    v = torch.eye(keys, 64, dtype=dtype)[None, :, None].expand(batch, keys, 2, 64)
    out, lse = fwd(q, k, v, dropout_p=0.4, rng_state=state)
    keep = reference.dropout_keep_mask(state, 0.4, batch, heads, rows, keys)
    assert torch.equal(out[..., :keys].transpose(1, 2) > 0, keep)
    kept = 1 / (1 - round(65536 * 0.4) / 65536) / keys
    torch.testing.assert_close(
        out[out > 0].double(), torch.full((int(keep.sum()),), kept).double(), rtol=0.01, atol=0
    )
    torch.testing.assert_close(lse.double(), torch.full_like(lse, keys).log().double())


def test_the_mask_counts_from_each_sequence():
    """Packed and padded, with and without rows between, the mask is the same."""
    results = []
    for packed, spare in ((False, 0), (True, 0), (True, 3)):
        problem = Problem(
            torch.float64,
            (40, 40),
            (50, 50),
            packed,
            packed,
            spare=spare,
            dropout_p=0.5,
            head_dim=8,
            head_dim_v=8,
        )
        inputs, options, _, _ = problem.tensors()
        if results:
            options["rng_state"] = results[0][1]
        q, k, v = (torch.ones_like(x) for x in inputs.values())
        v = v * torch.arange(v.shape[-3], dtype=torch.float64)[:, None, None] if not packed else v
        out, _ = fwd(q, k, v, **options)
        if packed:
            out = torch.stack([out[c : c + 40] for c in options["cu_seqlens_q"][:-1].tolist()])
        results.append((out, options["rng_state"]))
    ones = fwd(
        torch.ones(2, 40, 4, 8).double(),
        *[torch.ones(2, 50, 2, 8).double()] * 2,
        dropout_p=0.5,
        rng_state=results[0][1],
    )[0]
    assert torch.equal(results[1][0], ones) and torch.equal(results[2][0], ones)


@pytest.mark.parametrize("dropout_p", [1e-5, 0.02, 0.5, 0.97, 0.99999])
def test_probabilities(dropout_p):
    check(*Problem(torch.float32, (65,), (130,), dropout_p=dropout_p, causal=True).tensors())


def test_zero_threshold_drops_nothing():
    inputs, options, _, _ = Problem(dropout_p=1e-6).tensors()  # below half of 1/65536
    plain = {name: value for name, value in options.items() if name not in ("dropout_p", "rng_state")}
    assert torch.equal(fwd(**inputs, **options)[0], fwd(**inputs, **plain)[0])


def test_expectation():
    """Over many masks the mean of out is out without dropout, within five standard errors."""
    q, k, v = (torch.randn(1, 16, 2, 16, dtype=torch.float64) for _ in range(3))
    outs = torch.stack([flash_attn_func(q, k, v, 0.3) for _ in range(400)])
    error = (outs.mean(0) - flash_attn_func(q, k, v)).abs() / (outs.std(0) / 20)
    assert float(error.max()) < 6


def test_torch_generator():
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    torch.manual_seed(5)
    first, second = flash_attn_func(q, k, v, 0.5), flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(5)
    assert torch.equal(first, flash_attn_func(q, k, v, 0.5))
    assert not torch.equal(first, second)


def test_rng_state_is_used():
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    state = torch.tensor([11, 22])
    first = flash_attn_func(q, k, v, 0.5, rng_state=state)
    assert torch.equal(first, flash_attn_func(q, k, v, 0.5, rng_state=state))
    for other in ([12, 22], [11, 23], [11 + 2**32, 22]):
        assert not torch.equal(first, flash_attn_func(q, k, v, 0.5, rng_state=torch.tensor(other)))
    # the low 32 bits of the offset count
    assert torch.equal(first, flash_attn_func(q, k, v, 0.5, rng_state=torch.tensor([11, 22 + 2**32])))


def test_s_dmask():
    """return_attn_probs: dropped entries negative, and what is kept reproduces out."""
    q, k, v = (torch.randn(2, n, 4, 16) for n in (20, 30, 30))
    out, lse, mask = flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    assert mask.shape == (2, 4, 20, 30) and lse.shape == (2, 4, 20)
    assert 0.4 < float((mask < 0).double().mean()) < 0.6
    torch.testing.assert_close(
        torch.einsum("bhij,bjhd->bihd", mask.clamp(min=0) * 2, v), out, rtol=1e-4, atol=1e-4
    )
    assert flash_attn_func(q, k, v, return_attn_probs=True)[2].numel() == 0


def test_s_dmask_of_packed_sequences():
    q, k, v = (torch.randn(n, 4, 16) for n in (20, 30, 30))
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 5, 20], [0, 18, 30]))
    _, lse, mask = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 15, 18, 0.5, return_attn_probs=True)
    assert mask.shape == (2, 4, 15, 18) and lse.shape == (4, 20)
    assert (mask[0, :, 5:] == 0).all() and (mask[1, :, :, 12:] == 0).all()
