"""`make rehearse` in small: one layer of each kind of rank on a pretended GPU, each in a process of
its own; and the kernels, compiled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import calls
import pytest
import rank
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEADLINE_S = 900
needs = pytest.mark.skipif(
    not torch.version.cuda
    or not shutil.which("cc")
    or not (ROOT / "envs/rehearsal/transformer_engine").is_dir(),
    reason="needs a CUDA build of PyTorch, a C compiler, and what make rehearse installs in "
    "envs/rehearsal",
)
DEEPSEEK = [
    "model.path=deepseek-ai/DeepSeek-V3", "model.spec=configs/models/deepseek-v3/config.json",
    "trainer.tp=2", "trainer.pp=4",
    "trainer.dp=8", "trainer.ep=16", "trainer.first_stage_layers=15",
    "trainer.last_stage_layers=14",
]  # fmt: skip
NO_WAIT = ("asynchronous copy to the GPU", "asynchronous copy to the host")

DISPATCH = "megatron/core/transformer/moe/token_dispatcher.py"
ROPE = "megarl/trainer/layers.py:rotate_packed"
# A model with experts replays the engines' routing, and counts what it replayed.
OF_REPLAY = {("tolist", "megarl/trainer/layers.py:metrics"): 1}

# The waits of a step of one layer, and its copies without pinned memory, by kind and innermost
# function of MegaRL, Megatron or Transformer Engine. Only the last stage has sums and rows. A dense
# model's microbatches wait for nothing: the host reads the GPU when the step is over.
OF_A_STEP = {
    ("copy to the host", "megarl/trainer/step.py:totals"): 2,
    ("copy to the host", "megarl/trainer/step.py:_token_rows"): 1,
    ("item", "megarl/trainer/step.py:train_step"): 1,
    ("tolist", "megarl/trainer/parallel.py:global_sums"): 1,
}
# Stages know the shapes of each other's messages, and the host waits for none. The first stage
# receives the last one's sums.
OF_A_FIRST_STAGE = {
    ("copy to the host", "megarl/trainer/step.py:totals"): 2,
    ("item", "megarl/trainer/step.py:train_step"): 1,
    ("objects through the GPU", "megarl/trainer/parallel.py:global_sums"): 1,
}
PIPELINE = ["trainer.zero=1", "trainer.pp=14", "trainer.dp=4"]
OF_A_LAST_STAGE = OF_A_FIRST_STAGE | {("tolist", "megarl/trainer/parallel.py:global_sums"): 1}
# A layer of experts reads how many tokens each rank gets: twice a microbatch if it is recomputed.
OF_EXPERTS = OF_REPLAY | {("event.synchronize", f"{DISPATCH}:_maybe_dtoh_and_synchronize"): 4}
# A layer of latent attention: its rotary embedding reads the boundaries of sequences for queries
# and for keys.
OF_LATENT_ATTENTION = {("tolist", ROPE): 8}
# A layer of gpt-oss, two microbatches: the experts' reads; and YaRN's rotary embedding, which is
# not fused, reads the boundaries of sequences.
OF_GPT_OSS = OF_REPLAY | {
    ("tolist", ROPE): 8,
    ("event.synchronize", f"{DISPATCH}:_maybe_dtoh_and_synchronize"): 4,
}
# Three gated delta nets and an attention, two microbatches: the experts' reads; and in each delta
# net Megatron compares and reads the boundaries.
DELTA_NET = "megatron/core/ssm/gated_delta_net/gdn.py:forward"
BOUNDARIES = "megatron/core/ssm/gated_delta_net/common.py:_resolve_cu_seqlens"
OF_DELTA_NETS = OF_REPLAY | {
    ("blocking copy to the GPU", DELTA_NET): 4, ("equal", DELTA_NET): 12, ("tolist", DELTA_NET): 4,
    ("copy to the host", BOUNDARIES): 24, ("item", BOUNDARIES): 24,
    ("event.synchronize", f"{DISPATCH}:_maybe_dtoh_and_synchronize"): 16,
}  # fmt: skip
# The changes since the last update: two reads for each half GiB of tensors, and the hashes.
OF_CHANGES = {
    ("tolist", "megarl/kernels/audit.py:_read"): 1,
    ("tolist", "megarl/kernels/changes_triton.py:totals_of"): 3,
    ("tolist", "megarl/reshard/deltas.py:totals"): 3,
}
# The log-probs of each microbatch, once all are launched, and the log-probs of all together.
SCORED = "copy to the host", "megarl/trainer/model.py:_scored"


def rehearse(tmp_path: Path, config: str, *arguments: str) -> dict[str, Any]:
    report, output = run(tmp_path, config, *arguments)
    assert report is not None, output[-6000:]
    return report


def run(tmp_path: Path, config: str, *arguments: str) -> tuple[dict[str, Any] | None, str]:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        str(HERE / "rank.py"),
        f"configs/{config}.yaml",
        "--layers",
        "1",
        "--json",
        str(report),
        *arguments,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT, env=environment
    )
    output = process.stdout + process.stderr
    if process.returncode:
        return None, output
    return json.loads(report.read_text()), output


def waits(report: dict[str, Any], phase: str) -> dict[tuple[str, str], int]:
    counts: Counter[tuple[str, str]] = Counter()
    for event in report["phases"][phase]["events"]:
        if event["kind"] not in NO_WAIT:
            counts[event["kind"], event["inner"]] += event["count"]
    return dict(counts)


def check_memory(report: dict[str, Any]) -> None:
    """Each part is within 5 % of the plan, and building takes no more memory than the rank holds
    afterwards; or than a step, if the parameters are sharded one layer after the other.
    """
    for part, size in report["parts"].items():
        assert size == pytest.approx(report["plan"][part], rel=0.05), part
    build = report["phases"]["build"]
    most = build["held_gib"] * 1.05
    if build["peak_at"].startswith("megarl/trainer/fully_sharded.py"):
        most = report["phases"]["step"]["peak_gib"]
    assert build["peak_gib"] <= most


@needs
@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ("8b_aipo", []),
        ("70b_32k_aipo", []),
        ("8b_aipo", ["trainer.dp=2", "trainer.tp=2", "trainer.zero=3"]),
    ],
    ids=["8b", "70b_32k", "sharded"],
)
def test_dense_rank_waits_for_its_gpu_only_after_a_step(config, arguments, tmp_path):
    report = rehearse(tmp_path, config, *arguments)
    check_memory(report)
    assert waits(report, "step") == OF_A_STEP
    assert waits(report, "score") == {SCORED: report["phases"]["score"]["microbatches"] + 1}


@needs
@pytest.mark.long
@pytest.mark.parametrize("shadow", ["host", "device"])
def test_waits_for_changes_do_not_grow_with_the_tensors(shadow, tmp_path):
    report = rehearse(tmp_path, "8b_aipo", "weights.delta=auto", f"weights.delta_shadow={shadow}")
    assert waits(report, "changes") == OF_CHANGES
    # once for each tensor of a rank, when engines continue
    of_host = {("copy to the host", "megarl/reshard/deltas.py:moved_to"): 20}
    assert waits(report, "send changes") == (of_host if shadow == "host" else {})


@needs
@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        ("qwen3_30b_a3b_aipo", [], OF_A_STEP | OF_EXPERTS),
        ("405b_aipo", ["--rank=0", *PIPELINE], OF_A_FIRST_STAGE),
        ("405b_aipo", ["--rank=-1", *PIPELINE], OF_A_LAST_STAGE),
        (
            "qwen3_235b_a22b_aipo",
            ["--rank=-1", *DEEPSEEK],
            OF_A_LAST_STAGE | OF_EXPERTS | OF_LATENT_ATTENTION,
        ),
        ("gpt_oss_120b_aipo", [], OF_A_FIRST_STAGE | OF_GPT_OSS),
        ("qwen3_next_80b_a3b_aipo", ["--layers=4"], OF_A_FIRST_STAGE | OF_DELTA_NETS),
    ],
    ids=["experts", "first-stage", "last-stage", "latent-attention", "gpt-oss", "gated-delta-nets"],
)
def test_step_of_special_ranks_has_the_known_waits(config, arguments, expected, tmp_path):
    report = rehearse(tmp_path, config, *arguments)
    check_memory(report)
    assert waits(report, "step") == expected


@needs
@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "message", "line"),
    [
        (
            "tensor_of_the_host",
            "found at least two devices, cuda:0 and cpu",
            "megarl/algorithms/losses.py:",
        ),
        ("wrong_keyword", "unexpected keyword argument 'boundaries'", "megarl/trainer/model.py:"),
    ],
)
def test_planted_faults_are_reported_with_their_lines(fault, message, line, tmp_path):
    report, output = run(tmp_path, "8b_aipo", "--plant", fault)
    assert report is None
    assert message in output
    assert line in output.splitlines()[-1]


@needs
@pytest.mark.long
def test_planted_wait_for_every_parameter_is_counted(tmp_path):
    report = rehearse(tmp_path, "8b_aipo", "--plant", "wait_per_parameter")
    assert waits(report, "step")["item", "megarl/trainer/step.py:train_step"] > 1 + 5


@needs
@pytest.mark.long
def test_norms_and_gradient_sums_cover_each_element_once():
    """Also: each gradient is summed over all ranks that have its tensor, and no others."""
    assert marks() == []


@needs
@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "case", "message"),
    [
        (
            "marks_of_experts",
            "experts tp2 dp2 ep2",
            "model.layers.0.mlp.experts.2.up_proj.weight counts 0 times in the norm",
        ),
        (
            "marks_of_experts",
            "experts tp2",
            "linear_fc1.weight0 on rank 0 is summed over ranks [0], not [0, 1]",
        ),
        (
            "marks_of_whole_weights",
            "latent tp2",
            "model.layers.0.self_attn.q_a_proj.weight counts 2 times in the norm",
        ),
    ],
)
def test_planted_wrong_marks_are_reported(fault, case, message):
    (report,) = marks(case, "--plant", fault)
    assert message in report


def marks(*arguments: str) -> list[str]:
    """The cases that are wrong."""
    command = [sys.executable, "-W", "ignore", str(HERE / "marks.py"), *arguments]
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines = process.stdout.splitlines()
    wrong = [line for line in lines if not line.endswith(": ok")]
    assert lines and process.returncode == bool(wrong), process.stderr[-6000:]
    return wrong


def program(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        env=os.environ | environment,
    )


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_triton_attention_is_softmax_attention():
    """SGLang's kernels for prefill and decoding, in float32 and bfloat16."""
    process = program("attention")
    assert process.returncode == 0, process.stdout + process.stderr
    assert len(process.stdout.splitlines()) == 32


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not torch.version.cuda, reason="needs a CUDA build of PyTorch")
@pytest.mark.parametrize("model", [[], ["--mixture"]], ids=["dense", "mixture"])
def test_bare_engine_has_the_log_probs_of_transformers(model):
    """Prompts of three lengths; prefill, and graphs of decoding that are replayed after it."""
    process = program("bare_engine", *model)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("log-probs differ by") == 3


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_spill_nothing_and_load_wide(tmp_path):
    process = program("compile_kernels", TRITON_CACHE_DIR=str(tmp_path))
    assert process.returncode == 0, process.stdout + process.stderr


def test_memory_above_the_plan_is_reported():
    report = {
        "plan": {"weights": 2.0, "activations": 4.0, "runtime": 9.0},
        "parts": {"weights": 2.05},
        "phases": {"step": {"peak_gib": 6.2}},
    }
    assert rank.overruns(report) == []
    report["phases"]["step"]["peak_gib"] = 6.4
    report["parts"]["weights"] = 2.2
    assert rank.overruns(report) == [
        "weights takes 2.20 GiB, planned 2.00",
        "a step takes 6.40 GiB, planned 6.00",
    ]


def test_calls_fit_the_installed_packages():
    count, problems = calls.check_all(Path(sysconfig.get_path("purelib")))
    assert not problems
    assert count > 150


def test_calls_that_do_not_fit_vendors_are_reported(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, no_such\n"
        "from megatron.core import parallel_state\n"
        "model_parallel_cuda_manual_seed(1, sed=2)\n"
        "parallel_state.no_such_group()\n"
        "model_parallel_cuda_manual_seed(1)\n"
        "from megatron.core.models.gpt.gpt_layer_specs import "
        "get_gpt_layer_with_transformer_engine_spec\n"
        "get_gpt_layer_with_transformer_engine_spec(num_expert=8)\n"  # another function's signature
    )
    count, problems = calls.check(calls.Sources(Path(sysconfig.get_path("purelib"))), wrong)
    assert count == 3
    assert [problem.partition(": ")[2] for problem in problems] == [
        "megatron.core.tensor_parallel has no no_such",
        "model_parallel_cuda_manual_seed: got an unexpected keyword argument 'sed'",
        "megatron.core.parallel_state has no no_such_group",
        "get_gpt_layer_with_transformer_engine_spec: got an unexpected keyword argument "
        "'num_expert'",
    ]


def test_calls_that_do_not_fit_torch_are_reported(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "torch.cuda.current_stream(stream=0)\n"
        "torch.cuda.caching_allocator_alloc(1, bytes=2)\n"
        "torch.cuda.no_such()\n"
        "dist.all_gather_into_tensor(a, b, grp=c)\n"
        "dist.new_group(backend='nccl', timeout=t)\n"
        "torch.zeros(1, no_such=2)\n"  # compiled, and checked wherever it runs
    )
    count, problems = calls.check_torch(wrong)
    assert count == 4
    assert [problem.partition(": ")[2] for problem in problems] == [
        "torch.cuda.current_stream: got an unexpected keyword argument 'stream'",
        "torch.cuda.caching_allocator_alloc: got an unexpected keyword argument 'bytes'",
        "module 'torch.cuda' has no attribute 'no_such'",
        "torch.distributed.all_gather_into_tensor: got an unexpected keyword argument 'grp'",
    ]
