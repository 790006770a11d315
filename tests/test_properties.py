"""Any problem, any layout: the operator agrees with the reference, forward and backward."""

import pytest
import torch
from compare import SEED, check
from hypothesis import HealthCheck, given, seed, settings
from strategies import problems

ANY_PROBLEM = settings(
    deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)


@seed(SEED)
@settings(ANY_PROBLEM, max_examples=150)
@given(problem=problems(dtypes=(torch.float64, torch.float32)))
def test_any_problem_in_full_precision(problem):
    check(*problem.tensors())


@seed(SEED)
@settings(ANY_PROBLEM, max_examples=100)
@given(problem=problems(dtypes=(torch.bfloat16, torch.float16)))
def test_any_problem_in_half_precision(problem):
    check(*problem.tensors())


@pytest.mark.parametrize("first", range(0, 256, 64))
def test_every_head_dim(first):
    for head_dim in range(first + 1, first + 65):
        q = torch.randn(1, 5, 2, head_dim)
        k, v = torch.randn(1, 9, 1, head_dim), torch.randn(1, 9, 1, 257 - head_dim)
        check({"q": q, "k": k, "v": v}, {"causal": True}, torch.randn(1, 5, 2, 257 - head_dim))
