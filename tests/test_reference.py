"""The reference itself, against torch's own attention, known answers and its definition written out slowly."""

import math

import pytest
import torch
from compare import SEED
from strategies import Problem

from flash_ext import reference

SDPA = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("options", [{}, {"causal": True, "top_left": True}, {"softmax_scale": 0.3}])
def test_agrees_with_torch(options):
    q, k, v = torch.randn(2, 33, 4, 16), torch.randn(2, 47, 2, 16), torch.randn(2, 47, 2, 24)
    out, _ = reference.attention(q, k, v, **options)
    want = SDPA(
        *(x.transpose(1, 2).double() for x in (q, k, v)),
        is_causal="causal" in options,
        scale=options.get("softmax_scale"),
        enable_gqa=True,
    )
    torch.testing.assert_close(out, want.transpose(1, 2))


def slowly(q, k, v, b, h, i, j_range, options):
    """One row of one head by the definition, in Python floats: (lse, [out])."""
    scale, cap = options["softmax_scale"] or q.shape[-1] ** -0.5, options["softcap"]
    group = q.shape[2] // k.shape[2]
    used_q = int(options["seqused_q"][b]) if "seqused_q" in options else q.shape[1]
    used_k = int(options["seqused_k"][b]) if "seqused_k" in options else k.shape[1]
    offset = 0 if options["top_left"] else used_k - used_q
    left, right = options["window_left"], 0 if options["causal"] else options["window_right"]
    weights = {}
    for j in j_range:
        if j >= used_k or (left >= 0 and j < i + offset - left) or (right >= 0 and j > i + offset + right):
            continue
        score = scale * sum(float(x) * float(y) for x, y in zip(q[b, i, h], k[b, j, h // group], strict=True))
        if cap > 0:
            score = cap * math.tanh(score / cap)
        if "alibi_slopes" in options:
            slopes = options["alibi_slopes"]
            score -= float(slopes[h] if slopes.ndim == 1 else slopes[b, h]) * abs(i + offset - j)
        weights[j] = math.exp(score)
    total = sum(weights.values()) + (math.exp(float(options["sinks"][h])) if "sinks" in options else 0.0)
    if i >= used_q or total == 0:
        return -math.inf, [0.0] * v.shape[-1]
    out = [
        sum(w * float(v[b, j, h // group, d]) for j, w in weights.items()) / total for d in range(v.shape[-1])
    ]
    return math.log(total), out


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True},
        {"causal": True, "top_left": True},
        {"window": (2, 1)},
        {"window": (0, -1), "top_left": True},
        {"softcap": 0.7},
        {"alibi": 1},
        {"alibi": 2, "top_left": True},
        {"sinks": True, "causal": True},
        {"causal": True, "lengths_q": (6, 3), "lengths_k": (2, 7), "spare": 1},
        {"scale": 0.9, "softcap": 2.0, "alibi": 1, "sinks": True, "window": (3, 0)},
    ],
    ids=str,
)
def test_agrees_with_the_definition(changes):
    problem = Problem(
        **{"lengths_q": (5, 5), "lengths_k": (7, 7), "head_dim": 4, "head_dim_v": 3, "seed": SEED, **changes}
    )
    inputs, options, _, _ = problem.tensors()
    q, k, v = (inputs[name] for name in "qkv")
    options |= {"sinks": inputs["sinks"]} if "sinks" in inputs else {}
    out, lse = reference.attention(q, k, v, **options)
    for b in range(2):
        for h in range(4):
            for i in range(q.shape[1]):
                want_lse, want_out = slowly(q, k, v, b, h, i, range(k.shape[1]), options)
                assert float(lse[b, h, i]) == pytest.approx(want_lse, rel=1e-9)
                assert out[b, i, h].tolist() == pytest.approx(want_out, rel=1e-9, abs=1e-12)


def test_packed_is_padded_sequence_by_sequence():
    q, k = torch.randn(9, 2, 8), torch.randn(12, 1, 8)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([1, 4, 4, 8], [0, 5, 7, 11]))
    out, lse = reference.attention(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone, alone_lse = reference.attention(q[None, rows], k[None, keys], k[None, keys], causal=True)
        assert torch.equal(out[rows], alone[0]) and torch.equal(lse[:, rows], alone_lse[0])
    assert (out[[0, 8]] == 0).all() and (lse[:, [0, 8]] == -math.inf).all()


def test_isolation():
    """NaN behind the used rows reaches neither results nor gradients."""
    problem = Problem(
        torch.float64, (5, 3), (4, 6), spare=2, sinks=True, causal=True, head_dim=8, head_dim_v=8
    )
    inputs, options, dout, d_lse = problem.tensors()
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    sinks = inputs.pop("sinks")
    out, lse = reference.attention(**inputs, sinks=sinks, **options)
    gradients = torch.autograd.grad((out, lse), [*inputs.values(), sinks], (dout, d_lse))
    assert inputs["q"].isnan().any() and dout.isnan().any()
    assert not any(x.isnan().any() for x in (out, lse, *gradients))


def test_gradients_are_those_of_the_definition():
    q, k, v = (torch.randn(1, 4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.tensor([0.3, -math.inf], dtype=torch.float64)

    def function(q, k, v, finite_sink):
        both = torch.stack([finite_sink, sinks[1]])
        options = {"window_left": 0, "window_right": 1, "softcap": 2.0, "sinks": both}
        out, lse = reference.attention(q, k, v, alibi_slopes=torch.tensor([0.1, 0.2]), **options)
        return out, lse

    assert torch.autograd.gradcheck(function, (q, k, v, sinks[0].clone().requires_grad_()))


def test_philox_known_answers():
    """The first vectors of Random123's known-answer file for philox4x32 with 7 rounds."""
    for counter, key, want in (
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ):
        got = reference._philox(tuple(torch.tensor([c]) for c in counter), key)
        assert tuple(int(word) for word in got) == want


def test_dropout_slots_are_those_of_the_fragment():
    """Element (i, j) uses the documented counter, word and half: computed here one element at a time."""
    seed, offset, nheads = 0x0123456789ABCDEF, 0x7FEDCBA987, 3
    state = torch.tensor([seed, offset])
    mask = reference.dropout_keep_mask(state, 0.4, 2, nheads, 37, 53)
    for b, h, i, j in (
        (0, 0, 0, 0),
        (0, 1, 3, 9),
        (1, 2, 36, 52),
        (1, 0, 17, 30),
        (0, 2, 8, 8),
        (1, 1, 31, 15),
    ):
        slot = 4 * (i % 8) + (j % 8) // 2
        counter = (32 * (j // 16) + slot, i // 16, b * nheads + h, offset & 0xFFFFFFFF)
        words = reference._philox(tuple(torch.tensor([c]) for c in counter), (seed & 0xFFFFFFFF, seed >> 32))
        word = int(words[(i % 16) // 8 + 2 * ((j % 16) // 8)])
        bits = (word >> 16) if j % 2 else (word & 0xFFFF)
        assert bool(mask[b, h, i, j]) == (bits >= round(65536 * 0.4))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout_statistics(dropout_p):
    state = torch.randint(0, 2**62, (2,))
    mask = reference.dropout_keep_mask(state, dropout_p, 2, 4, 256, 320).double()
    count = mask.numel()
    spread = math.sqrt(dropout_p * (1 - dropout_p))
    assert abs(float(mask.mean()) - (1 - dropout_p)) < 5 * spread / math.sqrt(count)
    # Every position within the 16x16 block alike, neighbours uncorrelated.
    places = mask.view(8, 16, 16, 20, 16).mean((0, 1, 3))
    assert float((places - (1 - dropout_p)).abs().max()) < 6 * spread / math.sqrt(count / 256)
    centred = mask - mask.mean()
    for other in (
        centred.roll(1, -1),
        centred.roll(1, -2),
        centred.roll(8, -1),
        centred.roll(8, -2),
        centred.roll(1, 1),
    ):
        assert abs(float((centred * other).mean())) < 6 * spread**2 / math.sqrt(count)


def test_signed_probabilities():
    problem = Problem(
        torch.float32, (5, 3), (7, 2), packed_q=True, packed_k=True, dropout_p=0.5, head_dim=8, head_dim_v=8
    )
    inputs, options, _, _ = problem.tensors()
    signed = reference.signed_probabilities(inputs["q"], inputs["k"], **options)
    assert signed.shape == (2, 4, 5, 7)
    torch.testing.assert_close(signed[0].abs().sum(-1), torch.ones(4, 5, dtype=torch.float64))
    assert (signed[1, :, 3:] == 0).all() and (signed[1, :, :, 2:] == 0).all()
    keep = reference.dropout_keep_mask(options["rng_state"], 0.5, 2, 4, 5, 7)
    assert torch.equal(signed[0] < 0, ~keep[0])
    out, _ = reference.attention(**inputs, **options)
    v = inputs["v"].double().repeat_interleave(2, 1)[:7]
    want = torch.einsum("hij,jhd->ihd", signed[0].clamp(min=0) * 2, v)
    torch.testing.assert_close(out[:5], want)
