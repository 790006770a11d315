"""The public functions: names, order and defaults of flash-attn 2.8 and FlashAttention-3, and what they return."""

import inspect
import json
import subprocess
import sys

import pytest
import torch
from compare import check, fwd, run
from strategies import Problem

import flash_ext
from flash_ext import bert_padding, flash_attn_3

COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
)
COMMON += "deterministic=False, return_attn_probs=False"
FLASH_ATTN_2 = {
    "flash_attn_func": "q, k, v, " + COMMON,
    "flash_attn_qkvpacked_func": "qkv, " + COMMON,
    "flash_attn_kvpacked_func": "q, kv, " + COMMON,
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    + COMMON
    + ", block_table=None",
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen, " + COMMON,
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    + COMMON,
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), "
    "softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
}
THREE = "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
THREE += "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
FLASH_ATTN_3 = {
    "flash_attn_func": "q, k, v, " + THREE,
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
    + THREE,
    "flash_attn_qkvpacked_func": "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, "
    "return_attn_probs=False",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
    "pack_gqa=None, sm_margin=0, return_softmax_lse=False",
}
EXTRAS = {
    "seqused_q",
    "seqused_k",
    "qv",
    "q_descale",
    "k_descale",
    "v_descale",
    "attention_chunk",
    "num_splits",
    "pack_gqa",
}
EXTRAS |= {"sm_margin", "sinks", "causal_alignment", "rng_state", "version", "return_lse"}


def positional(function) -> str:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in named)


@pytest.mark.smoke
@pytest.mark.parametrize("name", FLASH_ATTN_2)
def test_signatures_of_flash_attn_2(name):
    function = getattr(flash_ext, name)
    assert positional(function) == FLASH_ATTN_2[name]
    keyword_only = {
        p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY
    }
    if name != "flash_attn_with_kvcache":
        assert keyword_only >= EXTRAS
    with pytest.raises(TypeError, match="no_such_option"):
        function(*[torch.randn(1, 4, 2, 2, 8)] * 7, no_such_option=1)


@pytest.mark.parametrize("name", FLASH_ATTN_3)
def test_signatures_of_flash_attn_3(name):
    assert positional(getattr(flash_attn_3, name)) == FLASH_ATTN_3[name]


def make(packed=False, dtype=torch.float64):
    problem = Problem(
        dtype, (40, 40), (40, 40), packed, packed, nheads_k=4, group=1, head_dim=16, head_dim_v=16
    )
    inputs, options, dout, d_lse = problem.tensors()
    return inputs["q"], inputs["k"], inputs["v"], options.get("cu_seqlens_q"), dout, d_lse


@pytest.mark.smoke
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["qkv", "kv"])
def test_packed_functions(kind, packed):
    """One tensor in, one gradient out, equal to those of the separate tensors to the bit."""
    q, k, v, cu, dout, d_lse = make(packed)
    sinks = torch.randn(4, dtype=torch.float64)
    want = run(
        lambda q, k, v, sinks: fwd(
            q, k, v, causal=True, softcap=4.0, sinks=sinks, cu_seqlens_q=cu, cu_seqlens_k=cu
        ),
        {"q": q, "k": k, "v": v, "sinks": sinks},
        {},
        dout,
        d_lse,
    )
    stacked = torch.stack([q, k, v] if kind == "qkv" else [k, v], -3).requires_grad_()
    leaves = [stacked] if kind == "qkv" else [q.clone().requires_grad_(), stacked]
    sinks = sinks.clone().requires_grad_()
    name = f"flash_attn_{'varlen_' if packed else ''}{kind}packed_func"
    lengths = () if not packed else (cu, 40) if kind == "qkv" else (cu, cu, 40, 40)
    out, lse = getattr(flash_ext, name)(
        *leaves, *lengths, causal=True, softcap=4.0, sinks=sinks, return_lse=True
    )
    assert torch.equal(out, want["out"]) and torch.equal(lse, want["lse"])
    *gradients, d_sinks = torch.autograd.grad((out, lse), [*leaves, sinks], (dout, d_lse))
    got = [*gradients[:-1], *gradients[-1].unbind(-3)]
    assert gradients[-1].is_contiguous() and torch.equal(d_sinks, want["d_sinks"])
    assert all(torch.equal(g, want[f"d_{n}"]) for g, n in zip(got, "qkv", strict=True))


def test_packed_gradients_are_not_concatenated():
    """The gradient's memory is written once: no stack, cat or copy of its size runs in the backward."""
    qkv = torch.randn(2, 64, 3, 4, 32, requires_grad=True)
    out = flash_ext.flash_attn_qkvpacked_func(qkv)
    dout = torch.randn_like(out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.autograd.grad(out, qkv, dout)
    names = {event.name for event in profile.events()}
    assert "flash_ext::bwd_out" in names
    assert not names & {"aten::stack", "aten::cat", "aten::copy_", "aten::clone", "aten::zeros"}


def test_kvpacked_grouped_heads():
    q, kv = torch.randn(2, 5, 6, 16, requires_grad=True), torch.randn(2, 9, 2, 2, 16, requires_grad=True)
    out = flash_ext.flash_attn_kvpacked_func(q, kv)
    want = flash_ext.flash_attn_func(q, *kv.unbind(2))
    assert torch.equal(out, want)
    for got, expected in zip(
        *(torch.autograd.grad(x.square().sum(), (q, kv)) for x in (out, want)), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "shape, text", [((2, 5, 2, 4, 8), "(..., 3, heads, head_dim)"), ((5, 8), "(..., 3, heads, head_dim)")]
)
def test_packed_shape_errors(shape, text):
    with pytest.raises(ValueError) as caught:
        flash_ext.flash_attn_qkvpacked_func(torch.randn(shape))
    assert str(caught.value) == f"flash_ext: qkv must have shape {text}, got {shape}"


@pytest.mark.smoke
def test_returned_values():
    q, k, v, *_ = make()
    out = flash_ext.flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor)
    both = flash_ext.flash_attn_func(q, k, v, return_lse=True)
    assert len(both) == 2 and torch.equal(both[0], out) and both[1].shape == (2, 4, 40)
    three = flash_ext.flash_attn_func(q, k, v, return_attn_probs=True)
    assert len(three) == 3 and three[2].numel() == 0
    two = flash_attn_3.flash_attn_func(q, k, v, return_attn_probs=True)
    assert len(two) == 2 and torch.equal(two[0], out)


def test_options_reach_the_operator():
    problem = Problem(
        torch.float64, spare=2, lengths_q=(30, 20), lengths_k=(25, 40), alibi=2, sinks=True, dropout_p=0.2
    )
    inputs, options, dout, d_lse = problem.tensors()

    def function(q, k, v, *, sinks, **_):
        return flash_ext.flash_attn_func(
            q,
            k,
            v,
            0.2,
            0.3,
            False,
            (17, 4),
            5.0,
            options["alibi_slopes"],
            True,
            seqused_q=options["seqused_q"],
            seqused_k=options["seqused_k"],
            sinks=sinks,
            causal_alignment="top_left",
            rng_state=options["rng_state"],
            version="cpu",
            return_lse=True,
            num_splits=4,
            pack_gqa=True,
            sm_margin=2,
        )

    changed = {"softmax_scale": 0.3, "window_left": 17, "window_right": 4, "softcap": 5.0, "top_left": True}
    check(inputs, options | changed, dout, d_lse, function)


@pytest.mark.parametrize("name", ["qv", "q_descale", "k_descale", "v_descale", "attention_chunk"])
def test_not_supported_yet(name):
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError) as caught:
        flash_ext.flash_attn_func(q, q, q, **{name: 5 if name == "attention_chunk" else q})
    assert str(caught.value) == f"flash_ext: {name} is not supported yet, leave it at its default"


def test_bad_options():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="causal_alignment must be 'bottom_right' or 'top_left', got 'left'"):
        flash_ext.flash_attn_func(q, q, q, causal_alignment="left")
    with pytest.raises(ValueError, match=r"window_size must be \(left, right\), got \(1, 2, 3\)"):
        flash_ext.flash_attn_func(q, q, q, window_size=(1, 2, 3))
    with pytest.raises(RuntimeError, match="flash_ext: .*fa9"):
        flash_ext.flash_attn_func(q, q, q, version="fa9")


def test_sinks_may_be_in_the_dtype_of_the_model():
    q = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    sinks = torch.randn(2, dtype=torch.bfloat16, requires_grad=True)
    flash_ext.flash_attn_func(q, q, q, sinks=sinks).sum().backward()
    assert sinks.grad.dtype == torch.bfloat16 and sinks.grad.abs().sum() > 0


def test_flash_attn_3_functions():
    q, k, v, cu, *_ = make(True)
    two = flash_ext.flash_attn_varlen_func(q, k, v, cu, cu, 40, 40, 0.0, 0.2, True, (9, 0))
    three = flash_attn_3.flash_attn_varlen_func(
        q, k, v, cu, cu, 40, 40, softmax_scale=0.2, causal=True, window_size=(9, 0)
    )
    assert torch.equal(two, three)
    used = torch.tensor([10, 3], dtype=torch.int32)
    two = flash_ext.flash_attn_varlen_func(q, k, v, cu, cu, 40, 40, seqused_q=used, seqused_k=used)
    assert torch.equal(two, flash_attn_3.flash_attn_varlen_func(q, k, v, cu, cu, 40, 40, used, used))
    x = torch.randn(2, 11, 4 + 2 + 2, 8, dtype=torch.float64, requires_grad=True)
    side_by_side = flash_attn_3.flash_attn_qkvpacked_func(x, None, True, num_heads_q=4)
    plain = flash_ext.flash_attn_func(*x.split([4, 2, 2], 2), causal=True)
    assert torch.equal(side_by_side, plain)
    first, second = (torch.autograd.grad(y.square().sum(), x)[0] for y in (side_by_side, plain))
    assert torch.equal(first, second)
    stacked = torch.randn(2, 11, 3, 4, 8)
    assert torch.equal(
        flash_attn_3.flash_attn_qkvpacked_func(stacked, 0.3),
        flash_ext.flash_attn_qkvpacked_func(stacked, 0.0, 0.3),
    )
    with pytest.raises(ValueError, match="must have num_heads_q"):
        flash_attn_3.flash_attn_qkvpacked_func(x, num_heads_q=3)


def test_validate_accepts_what_is_right():
    q, k, v, cu, *_ = make(True)
    plain = flash_ext.flash_attn_varlen_func(q, k, v, cu, cu, 40, 40)
    assert torch.equal(plain, flash_ext.flash_attn_varlen_func(q, k, v, cu, cu, 40, 40, validate=True))


@pytest.mark.parametrize("wrong", [[0, 50, 40], [0, 40, 81], [-1, 40, 80]])
def test_wrong_cu_seqlens(wrong):
    q, k, v, cu, *_ = make(True)
    with pytest.raises(RuntimeError, match="flash_ext: cu_seqlens_k must"):
        flash_ext.flash_attn_varlen_func(q, k, v, cu, torch.tensor(wrong, dtype=torch.int32), 40, 40)


def test_validation_of_values_that_the_operator_does_not_see(monkeypatch):
    """check_lengths judges a GPU's cu_seqlens by the CPU's rules, from shapes and lengths alone."""
    from flash_ext import interface

    class OnGpu(torch.Tensor):
        is_cpu = False

    q = torch.randn(80, 2, 8).as_subclass(OnGpu)
    good, wrong = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 40, 80], [0, 90, 80]))
    interface.check_lengths(q, q, {"cu_seqlens_q": good, "cu_seqlens_k": good})
    with pytest.raises(RuntimeError, match="flash_ext: cu_seqlens_k must"):
        interface.check_lengths(q, q, {"cu_seqlens_q": good, "cu_seqlens_k": wrong})


def test_plan():
    q = torch.empty(2, 300, 8, 64, device="meta")
    plan = flash_ext.plan(q, q, q, causal=True, device="cpu")
    assert plan.backend == "cpu" and plan.launches >= 1 and len(plan.tile) == 2 and plan.why
    report = str(plan)
    assert "backend    cpu" in report and f"{plan.tile[0]} queries x {plan.tile[1]} keys" in report
    assert all(f"not {name}" in report and reason in report for name, reason in plan.passed_over.items())
    backward = flash_ext.plan(q, q, q, causal=True, device="cpu", backward=True)
    assert backward != plan
    with pytest.raises(RuntimeError, match="flash_ext: q must be"):
        flash_ext.plan(q.int(), q, q)
    cu = torch.tensor([0, 300], dtype=torch.int32)
    assert flash_ext.plan(*[torch.randn(300, 2, 64)] * 3, cu, cu, 300, 300).backend == "cpu"


def test_plan_is_what_the_operator_says():
    q = torch.randn(1, 10, 2, 16)
    facts = json.loads(torch.ops.flash_ext.plan(q, q, q))
    plan = flash_ext.plan(q, q, q)
    assert {**vars(plan), "tile": list(plan.tile)} == facts


@pytest.mark.smoke
def test_bert_padding():
    x = torch.randn(3, 7, 2, 5, requires_grad=True)
    mask = torch.rand(3, 7) < 0.5
    mask[:, 0] = True
    packed, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(packed, x[mask]) and cu.dtype == torch.int32 and used.dtype == torch.int32
    assert (
        torch.equal(cu.diff(), mask.sum(1).int())
        and longest == int(mask.sum(1).max())
        and torch.equal(used, mask.sum(1).int())
    )
    padded = bert_padding.pad_input(packed, indices, 3, 7)
    assert torch.equal(padded, x * mask[..., None, None])
    (dx,) = torch.autograd.grad(padded.sum(), x)
    assert torch.equal(dx, mask[..., None, None].expand_as(x).float())
    spare = torch.zeros_like(mask)
    spare[1, -1] = ~mask[1, -1]
    packed, _, cu, _, used = bert_padding.unpad_input(x, mask.int(), spare.int())
    assert torch.equal(cu.diff(), (mask | spare).sum(1).int()) and torch.equal(used, mask.sum(1).int())
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0, 0], [0] * 7, [7] + [0] * 6])
    packed, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 5, 12] and longest == 7
    assert torch.equal(packed, torch.cat([x[0, :5], x[2]]))


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.smoke
def test_import():
    """Importing loads the operators where torch is loaded, never imports torch itself, and never imports _C."""
    assert python(
        "import torch, flash_ext, sys; print(torch.ops.flash_ext.fwd, 'flash_ext._C' in sys.modules)"
    ) == ("flash_ext.fwd False")
    assert python("import flash_ext, sys; print('torch' in sys.modules)") == "False"
    assert python("import flash_ext; print(flash_ext.flash_attn_func.__name__, flash_ext.plan.__name__)") == (
        "flash_attn_func plan"
    )
    assert flash_ext.__version__ == json.loads(torch.ops.flash_ext.build_info())["version"]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = flash_ext.no_such_name


@pytest.mark.parametrize("broken", ["missing", "old torch", "garbage"])
def test_import_errors(broken, tmp_path, monkeypatch):
    from flash_ext import ops

    door = tmp_path / "torch_ops.so"
    if broken == "old torch":
        monkeypatch.setattr(ops.torch, "__version__", "2.9.1+cpu")
        text = "flash_ext: torch must be 2.10 or newer, got 2.9.1+cpu: upgrade torch"
    else:
        monkeypatch.setattr(ops, "DOOR", door)
        text = f"flash_ext: {door} is missing: the library is not built."
    if broken == "garbage":
        door.write_bytes(b"no library")
        text = f"flash_ext: {door} does not load into torch {torch.__version__}"
    with pytest.raises(ImportError) as caught:
        ops._load_door()
    assert str(caught.value).startswith(text)
