"""Any problem that a backend takes, in any layout and with any tile. FLASH_EXT_TEST_SEED draws the same again."""

import bed
import pytest
from compare import SEED
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from strategies import problems


@pytest.mark.parametrize("backend", bed.BACKENDS)
def test_any_problem(backend):
    @seed(SEED)
    @settings(
        max_examples=300,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failing problem is printed as drawn: to shrink it takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(problem=problems(dtypes=bed.DTYPES), tile=st.integers(0, 3))
    def run(problem, tile):
        problem = bed.fitted(problem, backend)
        dims = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
        modified = bool(problem.softcap or problem.alibi or problem.dropout_p)
        has_tile = bed.can(backend, "softcap" if modified else "", tile=tile, dtype=problem.dtype, **dims)
        kernel = bed.Kernel(backend, problem.dtype, *dims.values(), tile if has_tile else 0, modified)
        kernel.check(*problem.tensors(bed.DEVICE))

    run()
