"""A step over many short packed sequences starts as many operations as one over few long ones.

Every operation is a kernel on a GPU. Operations for each sequence, in each layer, would take longer
than the model's products.
"""

from __future__ import annotations

import json
import subprocess
import sys

TOKENS = 512  # of the only microbatch


def test_operations_do_not_grow_with_the_sequences() -> None:
    """In a process of its own, since it builds a trainer."""
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], capture_output=True, encoding="utf-8"
    )
    assert completed.returncode == 0, completed.stderr
    few, many = json.loads(completed.stdout.splitlines()[-1])
    assert 500 < few <= many < few + 64 - 2  # less than one more for each more sequence


def main() -> None:
    from megarl.trainer import cpu_support

    cpu_support.install()
    import os
    import tempfile

    from megarl.base.geometry import TrainerTopology
    from megarl.bench.gpu.measure import llama
    from megarl.config.schema import TrainerConfig
    from megarl.trainer.distributed import init_distributed, shutdown_distributed
    from megarl.trainer.step import MegatronTrainer

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MEGARL_TRAINER_STORE": f"{folder}/store",
        }
        init_distributed(60)
        trainer = MegatronTrainer(
            llama("toy"),
            TrainerTopology(),
            TrainerConfig(max_tokens_per_microbatch=TOKENS, local_layers=True),
            "float32",
            seed=1,
            total_steps=10,
            timeout_s=60,
        )
        operations(trainer, count=2)  # the first step makes the optimizer's state
        print(json.dumps([operations(trainer, count) for count in (2, 64)]))
        shutdown_distributed()


def operations(trainer, count: int) -> int:
    """The number of operations of a step over `count` sequences of equal length."""
    import numpy as np
    from torch.utils._python_dispatch import TorchDispatchMode

    from megarl.base.rollout_types import TrainSequence
    from megarl.bench.gpu.trainer import negative_logprobs

    class Counted(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += 1
            return function(*args, **(kwargs or {}))

    length = TOKENS // count
    sequence = TrainSequence(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.arange(length) >= 2,
        mu_logprobs=np.zeros(length, np.float32),
        advantages=np.ones(length, np.float32),
    )
    with Counted() as counted:
        trainer.train_step([sequence] * count, negative_logprobs, float(TOKENS))
    return counted.number


if __name__ == "__main__":
    main()
