"""Helpers of the tests that start whole runs with the `megarl` command, as a user would."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from json_files import json_lines

ROOT = Path(__file__).resolve().parents[1]
STEPS_S = 300  # a start and a few steps on a busy machine
PROMPTS = 4
SAMPLES = 4

OVERRIDES = [
    "max_steps=6",
    "trainer.optimizer.schedule=constant",  # a resumed run with another max_steps has the same rate
    f"rollout.prompts_per_step={PROMPTS}",
    f"rollout.n={SAMPLES}",
    "eval.limit=16",
    "checkpoint.every=2",
    "observe.probe_every=2",
    "observe.trackers=[]",
]


EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
GPT_OSS: dict[str, Any] = {
    "attention_bias": True, "num_local_experts": 8, "num_experts_per_tok": 2,
    "intermediate_size": 64, "sliding_window": 8,
    "rope_parameters": YARN | {"truncate": False},
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, Any]] = {  # keys of config.json
    "qwen3_moe": EXPERTS,
    "gpt_oss": GPT_OSS,
    "mistral": {"sliding_window": None},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True},
    "qwen3_next": EXPERTS | {
        "full_attention_interval": 2, "partial_rotary_factor": 0.25,
        "shared_expert_intermediate_size": 64, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
    },
}  # fmt: skip
OF_FAMILY["qwen3_5_moe"] = OF_FAMILY["qwen3_next"] | {
    "layer_types": ["linear_attention", "full_attention"] * 2
}
OF_FAMILY["qwen3_5_text"] = {
    key: value for key, value in OF_FAMILY["qwen3_5_moe"].items() if "expert" not in key
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def make_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Writes an HF checkpoint with random weights: the quickstart's model, or one of another family
    in its shape. `changes` go into config.json.
    """
    from megarl.generator import cpu_support

    cpu_support.install()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    shutil.copytree(ROOT / "configs/models/tiny-llama", folder)
    shape = json.loads((folder / "config.json").read_text()) | OF_FAMILY.get(family, {}) | changes
    shape = {
        key: value for key, value in shape.items() if key not in ("model_type", "architectures")
    }
    kind = AutoModelForCausalLM
    if family == "qwen3_5_moe":  # published checkpoints also have a vision tower
        vision = VISION | {"out_hidden_size": shape["hidden_size"]}
        shape = {"text_config": shape, "vision_config": vision, "tie_word_embeddings": False}
        kind = AutoModelForImageTextToText
    torch.manual_seed(0)
    kind.from_config(AutoConfig.for_model(family, **shape)).to(torch.float32).save_pretrained(
        folder
    )
    if family == "qwen3_moe":  # transformers 5 uses another name than checkpoints do
        saved = json.loads((folder / "config.json").read_text())
        saved["num_experts"] = saved.pop("num_local_experts", EXPERTS["num_experts"])
        (folder / "config.json").write_text(json.dumps(saved))
    if family == "qwen3_next":  # transformers 5 leaves it out, but SGLang needs it
        saved = json.loads((folder / "config.json").read_text()) | {
            "full_attention_interval": OF_FAMILY[family]["full_attention_interval"]
        }
        (folder / "config.json").write_text(json.dumps(saved))
    return folder


def in_mxfp4(folder: Path) -> Path:
    """Replaces the experts of a gpt-oss checkpoint by random ones in MXFP4, the published form."""
    import torch
    from safetensors.torch import load_file, save_file

    drawn = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        # unquantised weights are transposed relative to MXFP4
        experts, columns, rows = tensors.pop(name).shape
        blocks = (experts, rows, columns // 32)
        tensors[name + "_blocks"] = torch.randint(
            0, 256, (*blocks, 16), generator=drawn, dtype=torch.uint8
        )
        tensors[name + "_scales"] = torch.randint(
            119, 122, blocks, generator=drawn, dtype=torch.uint8
        )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    return folder


def in_fp8_blocks(folder: Path) -> Path:
    """Rounds a checkpoint's projections to blocks of fp8, the published form of DeepSeek-V3."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        values = tensors[name]
        row, column = (torch.arange(size) // 128 for size in values.shape)
        scales = torch.zeros(int(row[-1]) + 1, int(column[-1]) + 1)
        for first_row in range(scales.shape[0]):
            for along in range(scales.shape[1]):
                scales[first_row, along] = (
                    values[row == first_row][:, column == along].abs().max() / 448
                )
        tensors[name] = (values / scales[row[:, None], column]).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    of_blocks = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": of_blocks}))
    return folder


def quickstart(model: Path, run_dir: Path, *overrides: str) -> list[str]:
    """The arguments of a short training run of the quickstart with these weights."""
    return [
        "train",
        "configs/quickstart.yaml",
        f"model.path={model}",
        f"run_dir={run_dir}",
        *OVERRIDES,
        *overrides,
    ]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "megarl", *arguments]


def run(
    arguments: list[str], timeout_s: float = 480, imported: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs to the end, or kills the launcher at the deadline (its processes die with it).

    See `start`.
    """
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with _started(arguments, imported, **piped) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def start(arguments: list[str], log: Path, imported: bool = True) -> subprocess.Popen:
    """Starts the command.

    With `imported`, its processes are forks of one that has imported everything, which saves
    seconds each. Otherwise they are new programs.
    """
    with open(log, "wb") as file:
        return _started(arguments, imported, stdout=file, stderr=subprocess.STDOUT)


def succeed(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Like `run`, of a command that must succeed."""
    completed = run(arguments, **options)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed


@contextmanager
def started(arguments: list[str], log: Path, imported: bool = True) -> Iterator[subprocess.Popen]:
    """Like `start`; the command is killed at the end of the block, unless it has ended."""
    process = start(arguments, log, imported)
    try:
        yield process
    finally:
        kill(process)


def _started(arguments: list[str], imported: bool, **streams: Any) -> subprocess.Popen:
    # here, so that tests that start nothing do not need psutil and the rest
    from nursery import ForkedRun

    kind = ForkedRun if imported else subprocess.Popen
    # runs in the tests' working directory (conftest.py)
    return kind(command(*arguments), env=environment(), **streams)


def environment() -> dict[str, str]:
    # the run's processes can import the tests' transports
    return {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "cpu")}


def trained_ordinals(run_dir: Path) -> list[list[int]]:
    """The ordinals of the prompts that each step trained on."""
    lines = json_lines(run_dir / "rollouts/ordinals.jsonl")
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [line["ordinals"] for line in lines]


def rows(run_dir: Path) -> list[dict]:
    """The metrics of each step."""
    path = run_dir / "metrics.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if path.exists()
        else []
    )


def wait_until(
    condition, process: subprocess.Popen, awaited: str, timeout_s: float = STEPS_S
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, f"the run ended before {awaited}"
        assert time.monotonic() < deadline, f"no {awaited} within {timeout_s} s"
        time.sleep(0.05)


def wait_for_steps(process: subprocess.Popen, run_dir: Path, count: int) -> None:
    wait_until(lambda: len(rows(run_dir)) >= count, process, f"step {count}")


def wait_for_more_steps(process: subprocess.Popen, run_dir: Path, count: int) -> list[dict]:
    """The metrics of these steps."""
    before = len(rows(run_dir))
    wait_for_steps(process, run_dir, before + count)
    return rows(run_dir)[before:]


def wait_for_text(process: subprocess.Popen, log: Path, text: str) -> None:
    wait_until(lambda: text in log.read_text(), process, f"{text!r} in {log.name}")


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def title(process: psutil.Process) -> str:
    """The process's command line. It is empty if the process ended while it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def kill(process: subprocess.Popen, number: signal.Signals = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.wait(timeout=30)
