"""The optimizer in host memory (trainer.optimizer.offload): real Megatron optimizers in real gloo
ranks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trainer_cases import save_model
from trainer_processes import saved, spawn


@pytest.mark.long
@pytest.mark.timeout(300)
def test_offloaded_optimizer_makes_the_same_steps(tmp_path: Path) -> None:
    """Also after a checkpoint is loaded.

    A model in bfloat16, whose weights are loaded after the optimizer is made.
    """
    save_model("untied", tmp_path / "hf")
    common = {
        "run": "offloaded",
        "model": str(tmp_path / "hf"),
        "topology": {"dp": 2},
        "dtype": "bfloat16",
    }
    spawn(
        2,
        tmp_path,
        [{**common, "name": f"offload.{offload}", "offload": offload} for offload in (False, True)],
    )
    for on_device, offloaded in zip(
        saved(tmp_path, "offload.False"), saved(tmp_path, "offload.True"), strict=True
    ):
        assert offloaded["optimizers"] == {"HybridDeviceOptimizer"} != on_device["optimizers"]
        assert offloaded["norms"] == pytest.approx(on_device["norms"], rel=1e-6)
        assert (
            offloaded["loaded"] == [offloaded["norms"][-1]]
            and offloaded["again"] == offloaded["ended"]
        )
        for name, values in on_device["ended"].items():
            np.testing.assert_allclose(
                offloaded["ended"][name], values, rtol=1e-5, atol=1e-7, err_msg=name
            )
