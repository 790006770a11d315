"""examples/train_gpt.py in a small size: it learns, agrees, and would say so if it did not."""

import re
import sys
from pathlib import Path

import pytest

import flash_ext

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
if not EXAMPLES.exists():
    pytest.skip("needs the checkout", allow_module_level=True)
sys.path.append(str(EXAMPLES))
import train_gpt  # noqa: E402

SMALL = "--device cpu --steps 45 --width 128 --layers 2 --seqlen 128 --batch 4".split()


def test_training_agrees_with_float32(capsys):
    assert train_gpt.main(SMALL) == 0
    losses = re.findall(r"loss ([\d.]+) -> ([\d.]+)", capsys.readouterr().out)
    assert len(losses) == 3
    assert all(float(last) < float(first) - 1 for first, last in losses)


def test_a_wrong_attention_is_told(monkeypatch):
    monkeypatch.setattr(
        train_gpt, "ours", lambda q, k, v: flash_ext.flash_attn_func(q, k, v, 0.0, 0.2, causal=True)
    )
    assert train_gpt.main(SMALL) == 1
