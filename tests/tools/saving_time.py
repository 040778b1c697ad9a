"""How long a checkpoint delays a step, if it is written in the background and if not.

`python tests/tools/saving_time.py [HIDDEN [LAYERS [FOLDER]]]` saves a model of random weights on
one gloo rank on a CPU. It prints the median of five saves for each of the two, made in turns.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from megarl.base.geometry import TrainerTopology
from megarl.config.schema import TrainerConfig
from megarl.models.spec import ModelSpec
from megarl.trainer import cpu_support

SAVES = 5


def main(hidden: int = 512, layers: int = 8, folder: str | None = None) -> None:
    cpu_support.install()
    from megarl.trainer import checkpoint
    from megarl.trainer.step import MegatronTrainer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    spec = ModelSpec(
        "llama",
        layers,
        hidden,
        4 * hidden,
        hidden // 64,
        hidden // 64,
        64,
        8192,
        256,
        False,
        1e-6,
        1e4,
    )
    trainer = MegatronTrainer(
        spec, TrainerTopology(), TrainerConfig(), "float32", seed=1, total_steps=1, timeout_s=60
    )
    trainer.init_random(1)
    held_s: dict[bool, list[float]] = {True: [], False: []}
    whole_s: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(dir=folder) as root:
        for number in range(2 * SAVES):
            beside = number % 2 == 0
            start_s = time.perf_counter()
            saving = checkpoint.begin(trainer, Path(root) / "step", {}, beside=beside)
            waited_s = time.perf_counter()
            while not saving.written():
                time.sleep(0.01)
            written = time.perf_counter()
            saving.finish()
            held_s[beside].append(waited_s - start_s + time.perf_counter() - written)
            whole_s[beside].append(time.perf_counter() - start_s)
    parameters = sum(p.numel() for p in trainer.local_parameters().values())
    print(
        f"{parameters / 1e6:.0f} M parameters, {12 * parameters / 2**30:.2f} GiB a checkpoint, "
        f"{torch.get_num_threads()} threads"
    )
    for beside, title in ((False, "the step waits"), (True, "beside training")):
        print(
            f"{title:<16} held up {median(held_s[beside]):6.2f} s, complete after "
            f"{median(whole_s[beside]):6.2f} s"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])
