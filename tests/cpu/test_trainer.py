"""The Megatron trainer in real gloo processes against Hugging Face's model in float64.

All scenarios of one world size run in one spawn (trainer_worker.py); the tests only compare what the ranks saved.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_reference import LOGPROBS, hf_gradients, hf_loss, reference
from trainer_worker import sequences
from transformers import LlamaConfig, LlamaForCausalLM  # after trainer_reference, which makes it importable without CUDA

from megarl.executors.checkpoints import checkpoint_path, complete_checkpoints
from megarl.plan.topology import TrainerTopology

DEADLINE_S = 150
VOCAB = 50  # padded to 128 per tensor rank: at tp=2 the second rank holds padding only
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
MODELS: dict[str, dict[str, Any]] = {
    "untied": dict(tie_word_embeddings=False, vocab_size=VOCAB),
    "tied": dict(tie_word_embeddings=True, vocab_size=140, rope_parameters=dict(rope_theta=500.0, **LLAMA3)),
}
# name -> (world size, topology, trainer settings)
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "single": (1, {}, {}),
    "tp2": (2, dict(tp=2, zero=0), {}),
    "tp2_sp_recompute": (2, dict(tp=2), dict(sequence_parallel=True, recompute=True)),
    "pp2": (2, dict(pp=2), {}),
    "dp2_zero0": (2, dict(dp=2, zero=0), {}),
    "dp2_zero1": (2, dict(dp=2, zero=1), {}),
    "tp2_pp2": (4, dict(tp=2, pp=2), {}),
}
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS]


ADAM: dict[str, Any] = dict(
    lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, warmup_steps=2, schedule="cosine", min_lr_ratio=0.1, clip_grad=0.5
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, settings in MODELS.items():
        torch.manual_seed(len(name))
        config = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, rms_norm_eps=1e-5, initializer_range=0.2, **settings,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 1.0, 0.1)
        folders[name] = tmp_path_factory.mktemp(f"hf_{name}")
        # One model in several files with an index, one in a single file.
        model.save_pretrained(folders[name], max_shard_size="20KB" if name == "untied" else "1GB")
    return folders


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with everything the ranks saved."""
    out = tmp_path_factory.mktemp("runs")
    checkpoint = str(out / "checkpoint")

    def gradients(world: int) -> list[dict[str, Any]]:
        return [
            dict(run="gradients", name=f"{m}.{name}", model=str(models[m]), topology=LAYOUTS[name][1], trainer=LAYOUTS[name][2])
            for m, name in CASES
            if LAYOUTS[name][0] == world
        ]

    def load(name: str, zero: int = 1, **topology: int) -> dict[str, Any]:
        topology["zero"] = zero
        return dict(run="load", name=f"load{zero}.{name}", model=str(models["tied"]), topology=topology, checkpoint=f"{checkpoint}{zero}")

    def save(zero: int) -> dict[str, Any]:
        topology = dict(tp=2, zero=zero)
        return dict(run="save", name=f"saved{zero}", model=str(models["tied"]), topology=topology, checkpoint=f"{checkpoint}{zero}")

    untied = str(models["untied"])
    torch.save(LOGPROBS, out / "logprob_inputs.pt")

    def logprobs(world: int) -> dict[str, Any]:
        return dict(run="logprobs", name=f"logprobs.{world}", inputs=str(out / "logprob_inputs.pt"))

    def train(name: str, **topology: int) -> dict[str, Any]:
        return dict(run="train", name=f"train.{name}", model=untied, topology=topology, optimizer=ADAM)

    spawn(2, out, [
        *gradients(2),
        dict(run="gradients", name="bf16", model=untied, topology=dict(tp=2), dtype="bfloat16"),
        save(zero=1), load("tp2", tp=2), load("pp2", pp=2), load("dp2", dp=2),
        save(zero=0), load("pp2", zero=0, pp=2), load("dp2", zero=0, dp=2),
        dict(run="init", name="init.tp2", model=untied, topology=dict(tp=2), seed=3),
        train("tp2", tp=2), train("dp2", dp=2), logprobs(2),
    ])  # fmt: skip
    spawn(1, out, [
        *gradients(1),
        load("single"), logprobs(1), dict(run="refused", name="refused", model=untied),
        dict(run="init", name="init.single", model=untied, topology={}, seed=3),
        dict(run="init", name="init.other_seed", model=untied, topology={}, seed=4),
        dict(run="killed_while_saving", name="killed", model=untied, topology={}, run_dir=str(out)),
    ], expected_status=-signal.SIGKILL)  # fmt: skip
    spawn(4, out, [*gradients(4), load("tp2_pp2", tp=2, pp=2), logprobs(4)])
    return out


def spawn(world_size: int, out: Path, scenarios: list[dict[str, Any]], expected_status: int = 0) -> None:
    plan = out / f"scenarios.{world_size}.json"
    plan.write_text(json.dumps(scenarios))
    worker = Path(__file__).with_name("trainer_worker.py")
    logs = [out / f"world{world_size}.{rank}.log" for rank in range(world_size)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(worker), str(rank), str(world_size), str(out / f"rendezvous.{world_size}"), str(plan), str(out)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            output = dict(stdout=log.open("w"), stderr=subprocess.STDOUT)
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True, **output))
        for process in processes:
            process.wait(timeout=DEADLINE_S)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    for process, log in zip(processes, logs):
        assert process.returncode == expected_status, log.read_text()[-4000:]


def saved(runs: Path, name: str) -> list[dict[str, Any]]:
    """What every rank saved, in rank order."""
    count = len(list(runs.glob(f"{name}.[0-9].pt")))
    return [torch.load(runs / f"{name}.{rank}.pt", weights_only=False) for rank in range(count)]


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 5e-6) -> None:
    scale = max(grad.abs().max().item() for grad in expected.values())
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        error = (found[name] - grad).abs().max().item()
        assert error <= tolerance * scale, f"{name}: gradient off by {error:.2e}, largest gradient {scale:.2e}"


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_logits_and_logprobs_equal_hf(models: dict[str, Path], runs: Path, model: str, layout: str) -> None:
    expected = reference(models[model])
    ranks = saved(runs, f"{model}.{layout}")
    seen = [r["logits"] for r in ranks if r["logits"] is not None]
    assert seen
    for logits in seen:
        torch.testing.assert_close(logits.double(), expected["logits"], rtol=0, atol=1e-5)
    for rank in ranks:
        assert rank["logprobs"] == ranks[0]["logprobs"]
        assert [len(row) for row in rank["logprobs"]] == [len(row) for row in expected["logprobs"]]
        for row, want in zip(rank["logprobs"], expected["logprobs"]):
            assert row == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(("model", "layout"), CASES)
@pytest.mark.parametrize("which", ["all", "dropped", "microbatches"])
def test_gradients_equal_autograd_of_the_formula(models: dict[str, Path], runs: Path, model: str, layout: str, which: str) -> None:
    """`dropped`: without the sequences of zero advantage, same denominator; `microbatches`: several, of different shapes."""
    expected = reference(models[model])
    steps = [rank[which] for rank in saved(runs, f"{model}.{layout}")]
    found = hf_gradients(models[model], TrainerTopology(**LAYOUTS[layout][1]), [step["grads"] for step in steps])
    assert_same_gradients(found, expected["grads"])
    norm = math.sqrt(sum((grad**2).sum().item() for grad in expected["grads"].values()))
    for step in steps:
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert step["sums"]["weights"] == pytest.approx(expected["weights"], rel=1e-5)
        if which != "dropped":
            assert step["sums"]["tokens"] == expected["tokens"]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_step_without_sequences_has_zero_gradient(runs: Path, model: str, layout: str) -> None:
    for rank in saved(runs, f"{model}.{layout}"):
        assert rank["none"]["loss"] == 0.0 and rank["none"]["grad_norm"] == 0.0
        assert rank["none"]["sums"] == {"tokens": 0.0, "weights": 0.0}
        assert all((grad.isnan() | (grad == 0)).all() for grad in rank["none"]["grads"].values())


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_export_reloads_bit_equal(models: dict[str, Path], runs: Path, model: str, layout: str) -> None:
    want = LlamaForCausalLM.from_pretrained(models[model], dtype=torch.float32)
    got = LlamaForCausalLM.from_pretrained(runs / f"{model}.{layout}.hf", dtype=torch.float32)
    assert want.config.to_dict().keys() == got.config.to_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name


def test_bf16(models: dict[str, Path], runs: Path) -> None:
    want = LlamaForCausalLM.from_pretrained(models["untied"], dtype=torch.bfloat16)
    got = LlamaForCausalLM.from_pretrained(runs / "bf16.hf", dtype="auto")
    for name, tensor in want.state_dict().items():
        assert got.state_dict()[name].dtype == torch.bfloat16 and torch.equal(got.state_dict()[name], tensor), name
    ranks = [rank["all"]["grads"] for rank in saved(runs, "bf16")]
    found = hf_gradients(models["untied"], TrainerTopology(tp=2), ranks)
    expected = reference(models["untied"], torch.bfloat16)["grads"]
    error = math.sqrt(sum(((found[name] - grad) ** 2).sum().item() for name, grad in expected.items()))
    assert error <= 0.05 * math.sqrt(sum((grad**2).sum().item() for grad in expected.values()))


def test_reference_model_stays_where_it_was_held(runs: Path) -> None:
    for rank in saved(runs, "saved1"):
        assert rank["reference"] == rank["start"]
        assert rank["after"] != rank["start"] and rank["still"] == rank["after"]


@pytest.mark.parametrize(
    ("zero", "layout"), [(1, "single"), (1, "tp2"), (1, "pp2"), (1, "dp2"), (1, "tp2_pp2"), (0, "pp2"), (0, "dp2")]
)
def test_checkpoint_continues_under_another_topology(runs: Path, zero: int, layout: str) -> None:
    """Saved at tp=2 after two steps: the third step, and one of momentum alone, are those of the uninterrupted run."""
    base = saved(runs, f"saved{zero}")[0]
    weights = {k: LlamaForCausalLM.from_pretrained(runs / f"saved{zero}.{k}.hf", dtype=torch.float32).state_dict() for k in (3, 4)}
    assert any(not torch.equal(weights[3][name], weights[4][name]) for name in weights[3])  # momentum alone moves weights
    for rank in saved(runs, f"load{zero}.{layout}"):
        assert rank["state"] == {"prompts": 17}
        assert rank["position"] == base["position"] == 4
        assert rank["loss"] == pytest.approx(base["loss"], rel=1e-5)
        assert rank["grad_norm"] == pytest.approx(base["grad_norm"], rel=1e-5)
        assert rank["idle"] == base["idle"] == (0.0, 0.0, {"tokens": 0.0, "weights": 0.0})
        if layout == "tp2":
            assert torch.equal(rank["random"], base["random"])
    for step in (3, 4):
        got = LlamaForCausalLM.from_pretrained(runs / f"load{zero}.{layout}.{step}.hf", dtype=torch.float32).state_dict()
        for name, tensor in weights[step].items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_random_weights_depend_on_the_seed_alone(runs: Path) -> None:
    one, two, other = (LlamaForCausalLM.from_pretrained(runs / f"init.{n}.hf").state_dict() for n in ("single", "tp2", "other_seed"))
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
        if tensor.dim() == 2:
            assert not torch.equal(tensor, other[name]), name
            assert tensor.std().item() == pytest.approx(0.02, rel=0.1) and abs(tensor.mean().item()) < 0.002
        else:
            assert (tensor == 1).all()


def test_a_killed_save_leaves_the_previous_checkpoint(runs: Path) -> None:
    second = checkpoint_path(runs, 2)
    assert second.with_name(second.name + ".partial").exists()
    assert complete_checkpoints(runs) == [(1, checkpoint_path(runs, 1))]


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_training_equals_torch_adamw(models: dict[str, Path], runs: Path, layout: str) -> None:
    """Four steps with warm-up, cosine, clipping and weight decay against PyTorch's own in float64."""
    model = LlamaForCausalLM.from_pretrained(models["untied"], attn_implementation="eager").double()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": ADAM["weight_decay"]}, {"params": norms, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=ADAM["betas"], eps=ADAM["eps"])
    rates, grad_norms = [], []
    for seed in range(4):
        adam.zero_grad()
        hf_loss(model, sequences(VOCAB, seed=seed), temperature=1.0)[0].backward()
        grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM["clip_grad"]).item())
        step, warmup, floor = seed + 1, ADAM["warmup_steps"], ADAM["min_lr_ratio"]
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (4 - warmup)))
        rates.append(ADAM["lr"] * (step / warmup if step <= warmup else floor + (1 - floor) * cosine))
        for group in adam.param_groups:
            group["lr"] = rates[-1]
        adam.step()
    for rank in saved(runs, f"train.{layout}"):
        assert rank["rates"] == pytest.approx(rates)
        assert rank["grad_norms"] == pytest.approx(grad_norms, rel=1e-4)
        assert max(grad_norms) > ADAM["clip_grad"]
    got = LlamaForCausalLM.from_pretrained(runs / f"train.{layout}.hf", dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(got[name].double(), tensor, rtol=0, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_vocab_parallel_logprobs(runs: Path, world_size: int) -> None:
    """Against log_softmax in float64, gradient too; padded columns hold huge logits and must neither count nor get a gradient."""
    ranks = saved(runs, f"logprobs.{world_size}")
    assert len(ranks) == world_size
    for name, (logits, targets, vocab_size, temperature) in LOGPROBS.items():
        whole = logits.double().requires_grad_()
        expected = (whole[..., :vocab_size] / temperature).log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        (expected * torch.arange(1.0, targets.numel() + 1).view_as(targets)).sum().backward()
        half = logits.dtype == torch.bfloat16
        grad = torch.cat([rank[name][1] for rank in ranks], dim=-1)
        assert grad.dtype == logits.dtype
        torch.testing.assert_close(grad.double(), whole.grad, rtol=1e-2 if half else 1e-5, atol=1e-2 if half else 2e-6)
        assert (grad[..., vocab_size:] == 0).all()
        for rank in ranks:
            assert rank[name][0].dtype == torch.float32
            torch.testing.assert_close(rank[name][0].double(), expected.detach(), rtol=1e-6, atol=5e-6)


def test_refuses_what_it_cannot_build(runs: Path) -> None:
    ((problems),) = [rank["problems"] for rank in saved(runs, "refused")]
    for wanted in ("trainer.vpp=2", "trainer.cp=2", "trainer.zero=3", "model.dtype=float16", "key/value heads (1)", "number of layers (3)"):
        assert any(wanted in problem for problem in problems), (wanted, problems)
