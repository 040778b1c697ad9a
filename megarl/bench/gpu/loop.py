"""A whole run on one GPU: Megatron's trainer and an SGLang engine share it.

Measures a run's steps, updates and memory beside the plan.

`megarl train` runs as its own processes, on random weights in the shape of Qwen2.5-0.5B, or
of a small mixture of experts. In a rehearsal the model is tiny, and trainer and engine share the cores of a CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import torch

from megarl.bench.gpu.measure import Bench
from megarl.bench.gpu.trainer import hardware
from megarl.estimate.hardware import GIB, GPUS
from megarl.models.registry import load_spec
from megarl.reshard.layout import hf_layout
from megarl.trainer.cpu_support import layer_spec

QWEN_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 2048,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "eos_token_id": 2,
}
TOY = QWEN_0_5B | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
# In the shape of Qwen3's mixtures, with 0.6B parameters.
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 2048,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 32768,
    "eos_token_id": 2,
}
TOY_MIXTURE = MIXTURE | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
CHARACTERS = "0123456789+-=,"  # of synthetic:chain
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
WEIGHT_STD = 0.02
GRAPH_SIZES = [1, 4, 16, 64, 128, 192, 256]  # requests; each graph takes seconds to capture
WARM_UP = 3  # first steps that no median counts
REPORT_S = 15.0  # kept of the part's deadline for the report of a run that is cut off
LOOK_S = 0.2
FEWEST_STEPS = 8  # with fewer, the reward need not rise
LOG_CHARACTERS = 2500
CUDA_IPC = "cuda_ipc"
SHARED_MEMORY = "shared_memory"


@dataclass(frozen=True)
class LoopCase:
    steps: int
    quantization: str | None  # generator.quantization
    partial_rollout: str  # async.partial_rollout
    graphs: bool  # whether the engine decodes by CUDA graphs
    kill_at: int | None = None  # the engine is killed after this step, and must come back
    mixture: bool = False  # whether the model is a mixture of experts

    def model(self, toy: bool) -> dict[str, Any]:
        """The settings of the model, as in config.json."""
        if self.mixture:
            return TOY_MIXTURE if toy else MIXTURE
        return TOY if toy else QWEN_0_5B


LOOPS = {
    "bf16": LoopCase(
        steps=32, quantization=None, partial_rollout="in_flight", graphs=True, kill_at=20
    ),
    "fp8": LoopCase(steps=16, quantization="fp8_block", partial_rollout="retract", graphs=True),
    "eager": LoopCase(steps=10, quantization=None, partial_rollout="retract", graphs=False),
    "moe": LoopCase(
        steps=12, quantization=None, partial_rollout="in_flight", graphs=True, mixture=True
    ),
}
TOY_LOOPS = {
    "bf16": LoopCase(
        steps=8, quantization=None, partial_rollout="in_flight", graphs=True, kill_at=4
    ),
    "fp8": LoopCase(steps=4, quantization="fp8_block", partial_rollout="retract", graphs=True),
    "eager": LoopCase(steps=3, quantization=None, partial_rollout="retract", graphs=False),
    "moe": LoopCase(
        steps=4, quantization=None, partial_rollout="in_flight", graphs=True, mixture=True
    ),
}


def run(bench: Bench, name: str) -> None:
    loop = (TOY_LOOPS if bench.toy else LOOPS)[name]
    with tempfile.TemporaryDirectory(prefix="megarl-gpu-", dir=_roomy_folder()) as folder:
        path = Path(folder) / "run.yaml"
        settings = config(bench, loop, Path(folder))
        write_model(Path(settings["model"]["path"]), loop.model(bench.toy))
        path.write_text(json.dumps(settings), encoding="utf-8")
        planned = plan(path)
        card = CardMemory(bench)
        try:
            problem = train(bench, loop, path, card)
        finally:
            keep_logs(bench, path.parent)
        rows = metrics(path.parent / "run")
        report(bench, loop, rows, planned)
        card.report(planned)
        graphs(bench, loop, path.parent / "run")
        if problem:
            bench.row("the run", failed=problem)


def config(bench: Bench, loop: LoopCase, folder: Path) -> dict[str, Any]:
    """The run's settings."""
    prompts, n, tokens = (8, 4, 24) if bench.toy else (32, 8, 128)
    server_args: dict[str, Any] = {"log_level": "info"}
    if bench.cuda:
        server_args |= {"disable_cuda_graph": not loop.graphs, "cuda_graph_bs_decode": GRAPH_SIZES}
    return {
        "run_dir": str(folder / "run"),
        "max_steps": loop.steps,
        "model": {"path": str(folder / "model"), "dtype": "bfloat16" if bench.cuda else "float32"},
        "data": {"train": {"source": "synthetic:chain"}},
        "trainer": {
            "local_layers": layer_spec() == "local",
            "routing_replay": loop.mixture,
            "max_tokens_per_microbatch": 1024 if bench.toy else 16384,
            "optimizer": {"lr": 1e-3 if bench.toy else 1e-4, "warmup_steps": 2},
        },
        "generator": {
            "max_concurrency": prompts * n,
            "kv_cache_tokens": 2 * prompts * n * (tokens + 32),
            "quantization": loop.quantization,
            "server_args": server_args,
        },
        "async": {"capacity": 1, "partial_rollout": loop.partial_rollout},
        "algorithm": {"name": "aipo"},
        "rollout": {"prompts_per_step": prompts, "n": n, "max_tokens": tokens},
        "reward": {"name": "megarl.bench.gpu.reward:even_ids"},
        "weights": {"transport": CUDA_IPC if bench.cuda else SHARED_MEMORY},
        "checkpoint": {"every": 0},
        "observe": {"probe_every": 2, "trackers": []},
        "cluster": {"gpu": known_gpu(bench), "share_gpus": True},
        "plan": {"prompt_tokens": 12, "response_tokens": tokens},
    }


def known_gpu(bench: Bench) -> str:
    """The planner's name of this GPU; of an unknown one H100, so that its plan shows only the order
    of magnitude.
    """
    name = hardware(bench).name
    return name if name in GPUS else "H100"


def _roomy_folder() -> str | None:
    """Memory, if it has room for the last step's checkpoint, which would take long on a disk."""
    memory = Path("/dev/shm")
    if (
        memory.is_dir()
        and os.access(memory, os.W_OK)
        and psutil.disk_usage(str(memory)).free > 24 * GIB
    ):
        return str(memory)
    return None


def write_model(folder: Path, settings: dict[str, Any]) -> None:
    """Writes a checkpoint of random weights, with a tokenizer of one token a character."""
    from safetensors.torch import save_file
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(settings | {"dtype": "bfloat16"}), encoding="utf-8"
    )
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for tensor in hf_layout(load_spec(settings), "bfloat16").tensors(0):
        values = torch.empty(tensor.shape, dtype=torch.bfloat16)
        if tensor.name.endswith("norm.weight"):
            values.fill_(1)
        elif len(tensor.shape) == 1:
            values.zero_()
        else:
            values.normal_(0, WEIGHT_STD, generator=generator)
        weights[tensor.name] = values
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def plan(path: Path) -> dict[str, Any]:
    """What `megarl plan` says about the run.

    Raises RuntimeError with its message if it refuses the run.
    """
    process = subprocess.run(
        megarl("plan", path, "--json"), capture_output=True, encoding="utf-8", errors="replace"
    )
    if not process.stdout.strip():
        raise RuntimeError(
            f"megarl plan: exit status {process.returncode}: {process.stderr[-1000:]}"
        )
    return json.loads(process.stdout)


def megarl(command: str, path: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "megarl", command, str(path), *arguments]


def train(bench: Bench, loop: LoopCase, path: Path, card: CardMemory) -> str:
    """Runs `megarl train`, and kills its engine once if the loop wants that.

    Returns what went wrong; empty if nothing did.
    """
    run_dir = path.parent / "run"
    started_s = time.monotonic()
    log = path.with_name("train.log")
    with open(log, "wb") as output:
        process = subprocess.Popen(
            megarl("train", path), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    killed_s: float | None = None
    try:
        first_step_s: float | None = None
        while process.poll() is None:
            time.sleep(LOOK_S)
            card.look()
            steps = len(metrics(run_dir))
            if steps and first_step_s is None:
                first_step_s = time.monotonic() - started_s
                bench.row("from the start to the end of the first step, s", measured=first_step_s)
            if killed_s is None and loop.kill_at is not None and steps >= loop.kill_at:
                engine = engine_of(process.pid)
                os.kill(engine, signal.SIGKILL)
                killed_s = time.monotonic()
                bench.row("engine killed after step", measured=steps)
            if time.monotonic() - bench.started_s > bench.deadline_s - REPORT_S:
                return f"cut off at its deadline, after {steps} of {loop.steps} steps"
        bench.row("the whole run, s", measured=time.monotonic() - started_s)
        if process.returncode == 0:
            return ""
        last_words = log.read_text(errors="replace", encoding="utf-8")[-LOG_CHARACTERS:]
        return f"megarl train: exit status {process.returncode}:\n{last_words}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def keep_logs(bench: Bench, folder: Path) -> None:
    """Copies the logs and metrics of a run in `folder`, which is deleted with the rest of it."""
    if bench.logs is None:
        return
    bench.logs.mkdir(parents=True, exist_ok=True)
    run_dir = folder / "run"
    for log in (folder / "train.log", run_dir / "metrics.jsonl", *(run_dir / "logs").glob("*")):
        if log.is_file():
            shutil.copy(log, bench.logs)


def engine_of(launcher: int) -> int:
    """The process id of the run's engine."""
    for child in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "megarl.generator.server" in child.cmdline():
                return child.pid
    raise RuntimeError("no process of the run is an engine")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the steps so far."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    # a line that is being written has no end yet
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    rows = list(map(json.loads, lines))
    return [row for row in rows if "time/step_s" in row]


def report(
    bench: Bench, loop: LoopCase, rows: Sequence[dict[str, Any]], planned: dict[str, Any]
) -> None:
    """Emits the figures of the steps that were done, and what is wrong with them."""
    bench.row("steps done", measured=len(rows), planned=loop.steps)
    if not rows:
        return
    learning(bench, rows)
    agreement(bench, rows)
    updates(bench, rows)
    settled = rows[WARM_UP:]
    if loop.kill_at is not None:
        settled = [row for row in settled if not restarts(row, loop.kill_at)]
    settled = settled or rows
    for key in ("step_s", "train_s", "generate_s", "sync_s"):
        seconds = median(row[f"time/{key}"] for row in settled)
        bench.row(f"time/{key}, median", measured=seconds, planned=planned.get(key))
    bench.row(
        "time/sync_pause_s, median", measured=median(row["time/sync_pause_s"] for row in settled)
    )
    bench.row("tokens_per_s, median", measured=median(row["tokens_per_s"] for row in settled))
    for side, planned_gib in planned.get("marks_gib", {}).items():
        key = f"memory/{side}_gib"
        if any(key in row for row in rows):
            most = max(row.get(key, 0.0) for row in rows)
            bench.row(f"{key}, largest", measured=most, planned=planned_gib)


def restarts(row: dict[str, Any], kill_at: int) -> bool:
    """Whether the step may have waited for the engine that was killed."""
    return kill_at <= row["step"] <= kill_at + 3


def learning(bench: Bench, rows: Sequence[dict[str, Any]]) -> None:
    quarter = max(1, len(rows) // 4)
    first_quarter = fmean(row["reward/mean"] for row in rows[:quarter])
    last_quarter = fmean(row["reward/mean"] for row in rows[-quarter:])
    row: dict[str, Any] = {
        "what": "reward, first and last quarter of the steps",
        "measured": last_quarter,
        "note": f"first {first_quarter:.3f}",
    }
    is_learning = last_quarter > first_quarter or len(rows) < FEWEST_STEPS
    if not is_learning:
        row["failed"] = f"the reward did not rise: from {first_quarter:.3f} to {last_quarter:.3f}"
    bench.emit(row)
    odd = []
    for row in rows:
        if not (abs(row["loss"]) < 1e6 and abs(row["grad_norm"]) < 1e6):  # NaN included
            odd.append(row["step"])
    row = {"what": "gradient norm, median", "measured": median(row["grad_norm"] for row in rows)}
    if odd:
        row["failed"] = f"loss or gradient norm is not finite in steps {odd}"
    bench.emit(row)


def agreement(bench: Bench, rows: Sequence[dict[str, Any]]) -> None:
    """How far the log-probs of trainer and engine are apart under equal weights."""
    probes = [row for row in rows if "logprob/abs_diff_mean" in row]
    if not probes:
        bench.row("agreement of log-probs", failed="no step has a probe")
        return
    means = [row["logprob/abs_diff_mean"] for row in probes]
    limit = probes[-1]["logprob/limit"]
    mean = max(means)
    row: dict[str, Any] = {
        "what": (
            f"log-probs of trainer and engine, mean difference, largest of {len(probes)} probes"
        ),
        "measured": mean,
    }
    largest = max(probe["logprob/abs_diff_max"] for probe in probes)
    row["note"] = f"largest of a token {largest:.3g}, limit {limit:g}"
    if not all(difference <= limit for difference in means):  # NaN included
        row["failed"] = f"log-probs differ by {mean:.3g} on average, allowed is {limit:g}"
    bench.emit(row)


def updates(bench: Bench, rows: Sequence[dict[str, Any]]) -> None:
    """Audits, and the speed of the weights' way beside a copy of as many bytes within the
    device.
    """
    unequal = [row["step"] for row in rows if "sync/audit_ok" in row and not row["sync/audit_ok"]]
    audited = sum("sync/audit_ok" in row for row in rows)
    row: dict[str, Any] = {
        "what": "updates whose audit is equal",
        "measured": audited - len(unequal),
        "planned": audited,
    }
    if unequal:
        row["failed"] = f"audits of steps {unequal} are not equal"
    bench.emit(row)
    size = max(row.get("sync/bytes", 0) for row in rows)
    written = [row["time/sync_s"] for row in rows[1:] if row.get("sync/bytes") == size]
    if not written:
        return
    seconds = median(written)
    ideal_s = 2 * size / bench.copy_bytes_per_s()
    bench.row(
        "update, GB/s",
        measured=size / seconds / 1e9,
        note=f"{size / 1e9:.3g} GB in {seconds * 1e3:.3g} ms",
    )
    bench.row("a copy of as many bytes within the device, GB/s", measured=size / ideal_s / 1e9)
    bench.row("update, of that copy", fraction=ideal_s / seconds)


def graphs(bench: Bench, loop: LoopCase, run_dir: Path) -> None:
    """How many of the engine's decoding batches, as far as its log shows them, ran as CUDA
    graphs.
    """
    shown = []
    for path in sorted((run_dir / "logs").glob("*engine*")):
        text = path.read_text(errors="replace", encoding="utf-8")
        # lines of prefills, which have no graphs here, name the same setting
        shown += re.findall(r"Decode batch.*cuda graph: (True|False)", text)
    row: dict[str, Any] = {
        "what": "decoding batches in the engine's log with CUDA graphs",
        "measured": shown.count("True"),
    }
    row |= {"planned": len(shown) if loop.graphs and bench.cuda else 0}
    wrong = bench.cuda and bool(shown) and ("True" in shown) != loop.graphs
    if wrong:
        row["failed"] = "the engine's log shows the other way of decoding"
    bench.emit(row)


class CardMemory:
    """The most memory that all processes together have held on the card."""

    def __init__(self, bench: Bench):
        self._bench = bench
        self._most = 0
        self._before = self._used_bytes()

    def _used_bytes(self) -> int:
        if not self._bench.cuda:
            return sum(map(_resident, psutil.Process().children(recursive=True)))
        free, total = torch.cuda.mem_get_info()
        return total - free

    def look(self) -> None:
        self._most = max(self._most, self._used_bytes())

    def report(self, planned: dict[str, Any]) -> None:
        """`planned`: both sides' GiB a GPU.

        The memory that was held before the run is this process's own.
        """
        most_gib = (self._most - self._before) / GIB
        row = {
            "what": "memory of both sides, GiB, largest",
            "measured": most_gib,
            "planned": planned.get("shared_gib_per_gpu"),
        }
        self._bench.emit(row | {"note": f"this process had {self._before / GIB:.2f} before"})


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
