"""Every public function explains itself: the examples run, the sections and arguments are there."""

import doctest
import importlib
import inspect

import pytest

import flash_ext

MODULES = [
    "interface",
    "packed",
    "kvcache",
    "planning",
    "torch_sdpa",
    "bert_padding",
    "flash_attn_3",
    "reference",
]


def public_functions():
    for name in MODULES:
        module = importlib.import_module(f"flash_ext.{name}")
        for member, function in vars(module).items():
            own = inspect.isfunction(function) and function.__module__ == module.__name__
            if (
                own
                and not member.startswith("_")
                and (member in flash_ext.__all__ or name not in MODULES[:5])
            ):
                yield pytest.param(function, id=f"{name}.{member}")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"flash_ext.{name}")
    result = doctest.testmod(module, raise_on_error=False)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("function", list(public_functions()))
def test_sections(function):
    text = inspect.getdoc(function)
    for section in ("Parameters\n------", "Returns\n-----", "Examples\n-----"):
        assert section in text, f"{section.splitlines()[0]} is missing"
    assert ">>>" in text
    assert "References\n-----" in text or ":func:`" in text or function.__module__ == "flash_ext.bert_padding"


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_with_kvcache", "sdpa", "plan"])
def test_every_argument_is_explained(name):
    function = getattr(flash_ext, name)
    described = inspect.getdoc(function)
    extras = (
        set(inspect.signature(flash_ext.flash_attn_func).parameters) if "**extras" in described else set()
    )
    for parameter in inspect.signature(function).parameters:
        assert parameter in described or parameter in extras, parameter


def test_causal_alignment_is_shown():
    assert "1 1 1 1 0                   1 0 0 0 0" in flash_ext.flash_attn_func.__doc__
