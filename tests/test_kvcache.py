"""flash_attn_with_kvcache: append, rotary embedding, lengths, left padding, batch index and pages."""

import math

import pytest
import torch
from compare import DTYPES

from flash_ext import flash_attn_3, flash_attn_func, flash_attn_with_kvcache, reference

BATCH, CAPACITY, HEADS, HEADS_K, DIM, DIM_V = 3, 70, 4, 2, 32, 24


def cache(dtype=torch.float64, batch=BATCH, capacity=CAPACITY, garbage=math.nan):
    """A cache whose rows are numbers up to `lengths` and garbage behind."""
    lengths = torch.randint(1, capacity - 20, (batch,), dtype=torch.int32)
    k = torch.full((batch, capacity, HEADS_K, DIM), garbage, dtype=dtype)
    v = torch.full((batch, capacity, HEADS_K, DIM_V), garbage, dtype=dtype)
    for b in range(batch):
        k[b, : lengths[b]] = torch.randn(int(lengths[b]), HEADS_K, DIM)
        v[b, : lengths[b]] = torch.randn(int(lengths[b]), HEADS_K, DIM_V)
    return k, v, lengths


def queries(rows=5, dtype=torch.float64, batch=BATCH):
    return torch.randn(batch, rows, HEADS, DIM, dtype=dtype)


def new_rows(rows=4, dtype=torch.float64, batch=BATCH):
    return torch.randn(batch, rows, HEADS_K, DIM, dtype=dtype), torch.randn(
        batch, rows, HEADS_K, DIM_V, dtype=dtype
    )


def expected(q, keys, values, **options):
    """Sequence by sequence by the reference, from lists of the rows that count."""
    rows = [
        reference.attention(q[b : b + 1], keys[b][None], values[b][None], **options) for b in range(len(keys))
    ]
    return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (10, 0)}, {"softcap": 2.0}], ids=str
)
def test_lengths(options, dtype):
    k, v, lengths = cache(dtype)
    q = queries(dtype=dtype)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, return_softmax_lse=True, **options)
    window = options.pop("window_size", (-1, -1))
    want, want_lse = expected(
        q,
        [k[b, :n] for b, n in enumerate(lengths)],
        [v[b, :n] for b, n in enumerate(lengths)],
        window_left=window[0],
        window_right=window[1],
        **options,
    )
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(out.double(), want, rtol=rounding, atol=rounding)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_whole_cache_and_int_lengths():
    k, v, _ = cache(garbage=0.5)
    q = queries()
    whole = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_with_kvcache(q, k, v, causal=True), whole)
    assert torch.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=CAPACITY, causal=True), whole)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=9, num_splits=3)
    assert torch.equal(out, flash_attn_func(q, k[:, :9], v[:, :9]))


@pytest.mark.parametrize("causal", [False, True])
def test_append(causal):
    k_cache, v_cache, lengths = cache()
    before = k_cache.clone(), v_cache.clone()
    q, (k, v) = queries(), new_rows()
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=causal)
    for b, n in enumerate(lengths.tolist()):
        for now, was, new in ((k_cache, before[0], k), (v_cache, before[1], v)):
            assert torch.equal(now[b, n : n + 4], new[b])
            assert torch.equal(now[b, :n], was[b, :n]) and torch.equal(
                now[b, n + 4 :].isnan(), was[b, n + 4 :].isnan()
            )
    keys = [k_cache[b, : n + 4] for b, n in enumerate(lengths)]
    values = [v_cache[b, : n + 4] for b, n in enumerate(lengths)]
    torch.testing.assert_close(out, expected(q, keys, values, causal=causal)[0])


def test_decoding_token_by_token_is_the_prefix():
    """Twenty steps of one token give the rows of one causal call."""
    q, k, v = (torch.randn(2, 20, h, 16) for h in (4, 2, 2))
    whole = flash_attn_func(q, k, v, causal=True)
    k_cache, v_cache = torch.full((2, 32, 2, 16), math.nan), torch.full((2, 32, 2, 16), math.nan)
    for t in range(20):
        step = (x[:, t : t + 1] for x in (q, k, v))
        q_t, k_t, v_t = step
        out = flash_attn_with_kvcache(q_t, k_cache, v_cache, k_t, v_t, cache_seqlens=t, causal=True)
        torch.testing.assert_close(out[:, 0], whole[:, t], rtol=1e-5, atol=1e-5)


def rotated(x, angles, interleaved):
    """Rotary embedding as multiplication of complex numbers."""
    half = angles.shape[-1]
    pairs = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    if not interleaved:
        pairs = pairs.transpose(-1, -2)
    turned = (
        torch.view_as_complex(pairs.double().contiguous())
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    turned = torch.view_as_real(turned)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([turned, x[..., 2 * half :].double()], -1)


@pytest.mark.parametrize("rotary_dim", [16, DIM])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (9, 0)}], ids=str)
@pytest.mark.parametrize("shifted", [False, True])
def test_rotary(mask, interleaved, rotary_dim, shifted):
    k_cache, v_cache, lengths = cache()
    q, (k, v) = queries(), new_rows()
    angles = torch.rand(CAPACITY, rotary_dim // 2, dtype=torch.float64) * 6
    starts = lengths + 2 if shifted else lengths
    out = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        angles.cos(),
        angles.sin(),
        cache_seqlens=lengths,
        rotary_interleaved=interleaved,
        rotary_seqlens=starts if shifted else None,
        **mask,
    )
    turned_q = q.clone()
    for b, (n, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
        torch.testing.assert_close(
            k_cache[b, n : n + 4], rotated(k[b], angles[start : start + 4], interleaved)
        )
        moves = angles[start : start + 5] if mask else angles[start].expand(5, -1)
        turned_q[b] = rotated(q[b], moves, interleaved)
    keys = [k_cache[b, : n + 4] for b, n in enumerate(lengths)]
    values = [v_cache[b, : n + 4] for b, n in enumerate(lengths)]
    window = mask.get("window_size", (-1, -1))
    options = {"causal": mask.get("causal", False), "window_left": window[0], "window_right": window[1]}
    torch.testing.assert_close(out, expected(turned_q, keys, values, **options)[0])


def test_rotary_in_half_precision_rounds_once():
    q, (k, v) = queries(dtype=torch.bfloat16), new_rows(dtype=torch.bfloat16)
    k_cache, v_cache, lengths = cache(torch.bfloat16)
    angles = torch.rand(CAPACITY, DIM // 2)
    flash_attn_with_kvcache(q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), cache_seqlens=lengths)
    n = int(lengths[0])
    want = rotated(k[0].float(), angles[n : n + 4].double(), True)
    torch.testing.assert_close(k_cache[0, n : n + 4].double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("append", [False, True])
def test_batch_index(append):
    k_cache, v_cache, all_lengths = cache(batch=7)
    index = torch.tensor([5, 0, 3], dtype=torch.int32)
    lengths = all_lengths[index.long()]
    q, (k, v) = queries(), new_rows()
    new = (k, v) if append else ()
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, *new, cache_seqlens=lengths, cache_batch_idx=index, causal=True
    )
    more = 4 if append else 0
    keys = [k_cache[i, : n + more] for i, n in zip(index, lengths, strict=True)]
    values = [v_cache[i, : n + more] for i, n in zip(index, lengths, strict=True)]
    if append:
        assert torch.equal(keys[1][-4:], k[1])
    torch.testing.assert_close(out, expected(q, keys, values, causal=True)[0])


@pytest.mark.parametrize("append", [False, True])
def test_left_padding(append):
    k_cache, v_cache, lengths = cache()
    pad = torch.minimum(torch.tensor([0, 2, 5], dtype=torch.int32), lengths)
    for b in range(BATCH):
        k_cache[b, : pad[b]] = math.nan
        v_cache[b, : pad[b]] = math.nan
    q, (k, v) = queries(), new_rows()
    new = (k, v) if append else ()
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, *new, cache_seqlens=lengths, cache_leftpad=pad, causal=True
    )
    more = 4 if append else 0
    keys = [k_cache[b, pad[b] : n + more] for b, n in enumerate(lengths)]
    values = [v_cache[b, pad[b] : n + more] for b, n in enumerate(lengths)]
    torch.testing.assert_close(out, expected(q, keys, values, causal=True)[0])


@pytest.mark.parametrize("page_size", [1, 7, 16, 256])
@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_pages(page_size, leftpad, append):
    k_plain, v_plain, lengths = cache()
    lengths[0] = 1 if leftpad else 0
    blocks = -(-CAPACITY // page_size)
    table = torch.randperm(BATCH * blocks + 3, dtype=torch.int32)[: BATCH * blocks].view(BATCH, blocks)
    k_pages = torch.full((BATCH * blocks + 3, page_size, HEADS_K, DIM), math.nan, dtype=torch.float64)
    v_pages = torch.full((BATCH * blocks + 3, page_size, HEADS_K, DIM_V), math.nan, dtype=torch.float64)
    for b in range(BATCH):
        for row in range(int(lengths[b])):
            k_pages[table[b, row // page_size], row % page_size] = k_plain[b, row]
            v_pages[table[b, row // page_size], row % page_size] = v_plain[b, row]
        table[b, -(-(int(lengths[b]) + 4 * append) // page_size) :] = 10**6  # nobody may follow these
    q, new = queries(), new_rows() if append else ()
    options = {"cache_seqlens": lengths, "causal": True}
    options |= {"cache_leftpad": torch.ones(BATCH, dtype=torch.int32)} if leftpad else {}
    want = flash_attn_with_kvcache(q, k_plain, v_plain, *new, **options)
    out = flash_attn_with_kvcache(q, k_pages, v_pages, *new, **options, block_table=table)
    assert torch.equal(out, want)
    out = flash_attn_3.flash_attn_with_kvcache(q, k_pages, v_pages, *new, **options, page_table=table)
    assert torch.equal(out, want)
    if append:
        n = int(lengths[1]) + 2
        assert torch.equal(k_pages[table[1, n // page_size], n % page_size], new[0][1, 2])


def test_packed_queries_and_new_rows():
    """cu_seqlens_q and cu_seqlens_k_new: sequences of different lengths, as three calls of one sequence each."""
    k_cache, v_cache, lengths = cache()
    copies = k_cache.clone(), v_cache.clone()
    cu_q, cu_new = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 2, 2, 7], [0, 3, 4, 6]))
    q = torch.randn(7, HEADS, DIM, dtype=torch.float64)
    k, v = (torch.randn(6, HEADS_K, d, dtype=torch.float64) for d in (DIM, DIM_V))
    angles = torch.rand(CAPACITY, 8, dtype=torch.float64)
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True}
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new, **tables
    )
    for b in range(BATCH):
        rows, new = slice(cu_q[b], cu_q[b + 1]), slice(cu_new[b], cu_new[b + 1])
        alone = flash_attn_with_kvcache(
            q[None, rows],
            *(x[b : b + 1] for x in copies),
            k[None, new],
            v[None, new],
            cache_seqlens=lengths[b : b + 1],
            **tables,
        )
        torch.testing.assert_close(out[rows], alone[0])
    assert torch.equal(k_cache.nan_to_num(), copies[0].nan_to_num())


def test_plain_cache_is_not_copied(monkeypatch):
    from flash_ext import kvcache

    monkeypatch.setattr(kvcache, "gather_keys", lambda *a: pytest.fail("gathered"))
    k, v, lengths = cache()
    flash_attn_with_kvcache(queries(), k, v, *new_rows(), cache_seqlens=lengths)


def test_no_gradient():
    k, v, lengths = cache()
    assert not flash_attn_with_kvcache(queries().requires_grad_(), k, v, cache_seqlens=lengths).requires_grad


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"k": torch.randn(3, 4, 2, 32)}, "flash_ext: k and v must be given together"),
        (
            {"k": torch.randn(3, 4, 2, 32), "v": torch.randn(3, 4, 2, 24)},
            "flash_ext: cache_seqlens must be given with k and v: it says where to append",
        ),
        (
            {"k": torch.randn(3, 4, 2, 32), "v": torch.randn(3, 4, 2, 24), "cache_seqlens": 68},
            "flash_ext: the cache must hold cache_seqlens + new rows <= 70 rows a sequence, got 72",
        ),
        ({"cache_seqlens": torch.tensor([1, 2, 3])}, "flash_ext: cache_seqlens must be int32, got int64"),
        ({"rotary_cos": torch.ones(70, 8)}, "flash_ext: rotary_cos and rotary_sin must be given together"),
        (
            {"rotary_cos": torch.ones(70, 8), "rotary_sin": torch.ones(70, 8)},
            "flash_ext: rotary_cos and rotary_sin need k and v: the cache holds rotated keys",
        ),
        (
            {
                "block_table": torch.zeros(3, 1, dtype=torch.int32),
                "cache_batch_idx": torch.zeros(3, dtype=torch.int32),
            },
            "flash_ext: cache_batch_idx and block_table must not be given together",
        ),
    ],
)
def test_errors(arguments, text):
    q, k_cache, v_cache = torch.randn(3, 5, 4, 32), torch.randn(3, 70, 2, 32), torch.randn(3, 70, 2, 24)
    with pytest.raises(ValueError) as caught:
        flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    assert str(caught.value) == text
