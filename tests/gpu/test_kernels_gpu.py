"""The checks of `make gpu`: the Triton kernels on a GPU, at real sizes.

The tests in tests/cpu run them in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_kernels():
    from megarl.bench.gpu.kernels import CHECKS

    for check in CHECKS.values():
        check(torch.device("cuda", 0), False)
