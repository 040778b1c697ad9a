"""The Megatron trainer in real gloo processes against Hugging Face's model in float64.

All scenarios of one world size run in one spawn (trainer_worker.py). The tests only compare the
files that the ranks saved.
"""

from __future__ import annotations

import math
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_cases import (
    CASES,
    CHECKPOINTS,
    LAYOUTS,
    LOADS,
    MODELS,
    REPLAYED,
    TESTED,
    VOCAB,
    cases,
    save_model,
)
from trainer_processes import saved, spawn
from trainer_reference import (
    LOGPROBS,
    assert_same_gradients,
    hf_gradients,
    hf_loss,
    reference,
    replayed_reference,
)
from trainer_rig import LENGTHS, sequences

# after trainer_reference, so that CUDA is not needed
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from megarl.base.geometry import TrainerTopology
from megarl.plan.checkpoints import checkpoint_path, complete_checkpoints
from megarl.trainer.hf_files import tensor_files

# the first test waits for all scenarios: in make test-all about two hundred
pytestmark = pytest.mark.timeout(2400)
BF16: list[tuple[str, dict[str, int]]] = [
    ("untied", {"tp": 2}),
    ("tied", {"dp": 2, "zero": 3}),
    ("mixtral", {"dp": 2, "ep": 2}),
    ("gpt_oss", {"dp": 2, "ep": 2}),
]
ADAM: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-4,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "schedule": "cosine",
    "min_lr_ratio": 0.1,
    "clip_grad": 0.5,
}
# other settings than the checkpoints'
OTHER = ADAM | {"lr": 3e-3, "betas": (0.8, 0.97), "eps": 1e-3}


SETTINGS = {  # fields of Megatron's classes, none at its default
    "megatron": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
        "moe_deepep_num_sms": 24,
    },
    "ddp": {"overlap_grad_reduce": True, "bucket_size": 5000, "check_for_nan_in_grad": True},
    "optimizer": {"log_num_zeros_in_grad": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(f"hf_{name}") for name in MODELS}
    for name, folder in folders.items():
        save_model(name, folder)
    return folders


@pytest.fixture(scope="module")
def runs(
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Path:
    """The folder with all files of the ranks.

    Models are trained under the layouts of the selected tests.
    """
    out = tmp_path_factory.mktemp("runs")
    of_module = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    params_of_tests = [item.callspec.params for item in of_module if hasattr(item, "callspec")]
    cases_of_tests = {
        (params.get("model", params.get("name")), params.get("layout"))
        for params in params_of_tests
    }

    saves = {
        name: layout
        for name, (_, layout, _) in CHECKPOINTS.items()
        if name == "zero1" or name in {model_name for model_name, _ in cases_of_tests}
    }

    def of_case(model: str, layout: str) -> dict[str, Any]:
        _, topology, settings = LAYOUTS[layout]
        settings = settings | {"routing_replay": (model, layout) in REPLAYED}
        return {
            "run": "gradients",
            "name": f"{model}.{layout}",
            "model": str(models[model]),
            "topology": topology,
            "trainer": settings,
        }

    def gradients(world: int) -> list[dict[str, Any]]:
        return [
            of_case(*case.values)
            for case in CASES
            if case.values in cases_of_tests and LAYOUTS[case.values[1]][0] == world
        ]

    def checkpoint(run: str, name: str, layout: str) -> dict[str, Any]:
        _, topology, settings = LAYOUTS[layout]
        model = str(models[CHECKPOINTS[name][0]])
        of_layout = {
            "model": model,
            "topology": topology,
            "trainer": settings,
            "checkpoint": str(out / f"checkpoint.{name}"),
        }
        return dict(
            run=run, name=f"{run}.{name}" + (f".{layout}" if run == "load" else ""), **of_layout
        )

    def loads(world: int) -> list[dict[str, Any]]:
        return [
            checkpoint("load", *case.values)
            for case in LOADS
            if case.values in cases_of_tests and LAYOUTS[case.values[1]][0] == world
        ]

    def saving(world: int) -> list[dict[str, Any]]:
        return [
            checkpoint("save", name, layout)
            for name, layout in saves.items()
            if LAYOUTS[layout][0] == world
        ]

    untied = str(models["untied"])
    torch.save(LOGPROBS, out / "logprob_inputs.pt")

    def logprobs(world: int) -> dict[str, Any]:
        return {
            "run": "logprobs",
            "name": f"logprobs.{world}",
            "inputs": str(out / "logprob_inputs.pt"),
        }

    def train(name: str, **topology: int) -> dict[str, Any]:
        return {
            "run": "train",
            "name": f"train.{name}",
            "model": untied,
            "topology": topology,
            "optimizer": ADAM,
        }

    if saving(4):
        spawn(4, out, saving(4))
    spawn(2, out, [
        *gradients(2),
        *(
            {"run": "gradients", "name": f"bf16.{model}", "model": str(models[model]),
            "topology": topology, "dtype": "bfloat16"}
            for model, topology in BF16 if (model, None) in cases_of_tests
        ),
        *saving(2), *loads(2),
        {"run": "init", "name": "init.tp2", "model": untied, "topology": {"tp": 2}, "seed": 3},
        train("tp2", tp=2), train("dp2", dp=2), train("zero3", dp=2, zero=3), logprobs(2),
    ])  # fmt: skip
    spawn(1, out, [
        *gradients(1),
        *loads(1), logprobs(1),
        checkpoint("other_settings", "zero1", "single") | {"optimizer": OTHER},
        {"run": "blocks", "name": "blocks", "model": untied, "topology": {}},
        {"run": "settings_on_gpus", "name": "settings_on_gpus", "model": untied},
        {"run": "megatron_settings", "name": "megatron_settings", "model": untied, "topology": {},
        "optimizer": SETTINGS["optimizer"],
         "trainer": {"megatron": SETTINGS["megatron"], "ddp": SETTINGS["ddp"]}},
        {"run": "init", "name": "init.single", "model": untied, "topology": {}, "seed": 3},
        {"run": "init", "name": "init.other_seed", "model": untied, "topology": {}, "seed": 4},
        {"run": "killed_while_saving", "name": "killed", "model": untied, "topology": {},
        "run_dir": str(out)},
    ], expected_status=-signal.SIGKILL)  # fmt: skip
    spawn(4, out, [*gradients(4), *loads(4), logprobs(4)])
    return out


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_logits_and_logprobs_equal_hf(
    models: dict[str, Path], runs: Path, model: str, layout: str
) -> None:
    expected = reference(models[model])
    ranks = saved(runs, f"{model}.{layout}")
    logits_of_ranks = [r["logits"] for r in ranks if r["logits"] is not None]
    assert logits_of_ranks
    for logits in logits_of_ranks:
        torch.testing.assert_close(logits.double(), expected["logits"][:, :-1], rtol=0, atol=1e-5)
    for rank in ranks:
        assert rank["logprobs"] == ranks[0]["logprobs"]
        assert [len(row) for row in rank["logprobs"]] == [len(row) for row in expected["logprobs"]]
        for row, want in zip(rank["logprobs"], expected["logprobs"]):
            assert row == pytest.approx(want, abs=1e-5)
        for row, masked, sequence in zip(
            rank["logprobs"], rank["masked_logprobs"], sequences(VOCAB)
        ):
            assert masked == pytest.approx(
                [x if m else 0.0 for x, m in zip(row, sequence.loss_mask)], abs=1e-5
            )


@pytest.mark.parametrize(("model", "layout"), CASES)
@pytest.mark.parametrize("kind", ["all", "dropped", "microbatches"])
def test_gradients_equal_autograd_of_the_formula(
    models: dict[str, Path], runs: Path, model: str, layout: str, kind: str
) -> None:
    """`dropped`: without the sequences of zero advantage, but with the same denominator.

    `microbatches`: several, of different shapes.
    """
    expected = reference(models[model])
    steps = [rank[kind] for rank in saved(runs, f"{model}.{layout}")]
    gradients = hf_gradients(
        models[model], TrainerTopology(**LAYOUTS[layout][1]), [step["grads"] for step in steps]
    )
    assert_same_gradients(gradients, expected["grads"])
    norm = math.sqrt(sum((grad**2).sum().item() for grad in expected["grads"].values()))
    for step in steps:
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert step["sums"]["weights"] == pytest.approx(expected["weights"], rel=1e-5)
        if kind != "dropped":
            assert step["sums"]["tokens"] == expected["tokens"]
            assert step["entropy"] == pytest.approx(expected["entropy"], rel=1e-5)


def test_windowed_layers_rotate_the_same_share_of_a_head(runs: Path) -> None:
    (results,) = saved(runs, "blocks")
    assert results["windowed"] == results["plain"]


def test_parameters_that_no_family_declares_are_refused(runs: Path) -> None:
    """MegaRL would train them, and export a model without them."""
    (results,) = saved(runs, "blocks")
    assert re.search(
        "Megatron's parameters of a llama model are not those that its family declares: "
        r"decoder.layers.0.mlp.linear_fc1.bias \(96,\), not None; .* and 9 more",
        results["biased"],
    )


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_only_what_is_cut_is_padded(runs: Path, model: str, layout: str) -> None:
    """The trainer counts its model's input tokens.

    Context parallelism pads each sequence to 2 cp equal chunks. Sequence parallelism pads each
    microbatch, here of at most 11 tokens, to equal parts. A rank without sequences computes the
    smallest batch that can be cut.
    """
    _, sizes, settings = LAYOUTS[layout]
    topology = TrainerTopology(**sizes)
    parts = topology.tp if settings.get("sequence_parallel") else 1
    for rank in saved(runs, f"{model}.{layout}"):
        if topology.cp == parts == 1:
            assert (
                rank["all"]["padded"]
                == rank["dropped"]["padded"]
                == rank["microbatches"]["padded"]
                == 0
            )
            assert rank["none"]["padded"] == topology.dp * (topology.pp if topology.vpp > 1 else 1)
        chunks = 2 * topology.cp if topology.cp > 1 else 1
        in_sequences = sum(-(length - 1) % chunks for length in LENGTHS)
        assert (
            in_sequences
            <= rank["all"]["padded"]
            <= in_sequences + topology.dp * topology.cp * parts
        )
        assert (
            in_sequences
            <= rank["microbatches"]["padded"]
            <= in_sequences + 11 * topology.cp * parts
        )


@pytest.mark.parametrize(("model", "layout"), cases(TESTED, REPLAYED))
def test_log_probs_and_gradients_are_those_of_replayed_experts(
    models: dict[str, Path], runs: Path, model: str, layout: str
) -> None:
    """In several microbatches.

    The router's own choice holds if a sequence has no ids, and after the replay.
    """
    expected = replayed_reference(models[model])
    ranks = saved(runs, f"{model}.{layout}")
    assert expected["routing"]["router/replaced_fraction"] > 0.5, (
        "other experts than the model's own"
    )
    for rank in ranks:
        for scored, expected_logprobs in (
            ("replayed_logprobs", expected),
            ("afterwards", reference(models[model])),
        ):
            for row, want in zip(rank[scored], expected_logprobs["logprobs"], strict=True):
                assert row == pytest.approx(want, abs=1e-5)
        assert rank["all"]["routing"] == {
            "router/replayed_fraction": 0.0,
            "router/replaced_fraction": 0.0,
        }
        assert rank["replayed"]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert rank["replayed"]["routing"] == pytest.approx(expected["routing"])
    gradients = hf_gradients(
        models[model],
        TrainerTopology(**LAYOUTS[layout][1]),
        [rank["replayed"]["grads"] for rank in ranks],
    )
    assert_same_gradients(gradients, expected["grads"])


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_step_without_sequences_has_zero_gradient(runs: Path, model: str, layout: str) -> None:
    for rank in saved(runs, f"{model}.{layout}"):
        assert rank["none"]["loss"] == 0.0 and rank["none"]["grad_norm"] == 0.0
        assert rank["none"]["sums"] == {"tokens": 0.0, "weights": 0.0}
        assert all((grad.isnan() | (grad == 0)).all() for grad in rank["none"]["grads"].values())


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_export_reloads_bit_equal(
    models: dict[str, Path], runs: Path, model: str, layout: str
) -> None:
    want = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.float32)
    got = AutoModelForCausalLM.from_pretrained(runs / f"{model}.{layout}.hf", dtype=torch.float32)
    assert want.config.to_dict().keys() == got.config.to_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name


@pytest.mark.parametrize(("model", "layout"), cases({"qwen3_5_moe": TESTED["qwen3_5_moe"]}))
def test_a_vision_tower_is_in_the_export_as_it_was(
    models: dict[str, Path], runs: Path, model: str, layout: str
) -> None:
    """Hugging Face finds all tensors of the whole model in the export, and no others."""
    source = models[model]
    exported = runs / f"{model}.{layout}.hf"
    want = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    got, loading_info = AutoModelForImageTextToText.from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading_info.values()), loading_info
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name
    source_files, exported_files = (tensor_files(folder) for folder in (source, exported))
    assert source_files.keys() == exported_files.keys() and any(
        name.startswith("model.visual.") for name in exported_files
    )


@pytest.mark.parametrize(("model", "topology"), BF16)
def test_bf16(models: dict[str, Path], runs: Path, model: str, topology: dict[str, int]) -> None:
    want = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.bfloat16)
    got = AutoModelForCausalLM.from_pretrained(runs / f"bf16.{model}.hf", dtype="auto")
    for name, tensor in want.state_dict().items():
        assert got.state_dict()[name].dtype == torch.bfloat16 and torch.equal(
            got.state_dict()[name], tensor
        ), name
    ranks = [rank["all"]["grads"] for rank in saved(runs, f"bf16.{model}")]
    gradients = hf_gradients(models[model], TrainerTopology(**topology), ranks)
    expected = reference(models[model], torch.bfloat16)["grads"]
    error = math.sqrt(
        sum(((gradients[name] - grad) ** 2).sum().item() for name, grad in expected.items())
    )
    # A rounded score may choose another expert, which moves the gradient more than rounding itself:
    # by 0.10 for gpt-oss in HF's own bf16.
    tolerance = 0.15 if model in ("mixtral", "gpt_oss") else 0.05
    assert error <= tolerance * math.sqrt(sum((grad**2).sum().item() for grad in expected.values()))


def test_reference_model_stays_where_it_was_held(runs: Path) -> None:
    for rank in saved(runs, "save.zero1"):
        assert rank["reference"] == rank["start"]
        assert rank["after"] != rank["start"] and rank["still"] == rank["after"]


@pytest.mark.parametrize(("name", "layout"), LOADS)
def test_checkpoint_continues_under_another_topology(runs: Path, name: str, layout: str) -> None:
    """After two steps under one topology, the third step and a step of momentum alone equal the
    uninterrupted run's.
    """
    base = saved(runs, f"save.{name}")[0]
    weights = {
        k: AutoModelForCausalLM.from_pretrained(
            runs / f"save.{name}.{k}.hf", dtype=torch.float32
        ).state_dict()
        for k in (3, 4)
    }
    # momentum alone moves weights
    assert any(not torch.equal(weights[3][key], weights[4][key]) for key in weights[3])
    for number, rank in enumerate(saved(runs, f"load.{name}.{layout}")):
        assert rank["state"] == {"prompts": 17}
        assert rank["position"] == base["position"] == 4
        assert rank["loss"] == pytest.approx(base["loss"], rel=1e-5)
        assert rank["grad_norm"] == pytest.approx(base["grad_norm"], rel=1e-5)
        assert rank["idle"] == base["idle"] == (0.0, 0.0, {"tokens": 0.0, "weights": 0.0})
        if layout == CHECKPOINTS[name][1]:
            assert torch.equal(rank["random"], saved(runs, f"save.{name}")[number]["random"])
    for step in (3, 4):
        got = AutoModelForCausalLM.from_pretrained(
            runs / f"load.{name}.{layout}.{step}.hf", dtype=torch.float32
        ).state_dict()
        for key, tensor in weights[step].items():
            torch.testing.assert_close(
                got[key], tensor, rtol=0, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
            )


def test_resumed_trainer_has_the_optimizer_of_its_settings(runs: Path) -> None:
    """Not the checkpoint's: another, constant rate, and other betas, epsilon and weight
    decay.
    """
    ((decayed, norms),) = [rank["groups"] for rank in saved(runs, "other_settings.zero1")]
    for group in (decayed, norms):
        assert (group["betas"], group["eps"]) == (OTHER["betas"], OTHER["eps"])
        cosine = 0.5 * (1 + math.cos(math.pi / 8))  # step 3 is step 1 of 8 after the warm-up
        assert group["lr"] == pytest.approx(OTHER["lr"] * (0.1 + 0.9 * cosine))
    assert (decayed["weight_decay"], norms["weight_decay"]) == (OTHER["weight_decay"], 0.0)


def test_random_weights_depend_on_the_seed_alone(runs: Path) -> None:
    one, two, other_seed = (
        AutoModelForCausalLM.from_pretrained(runs / f"init.{n}.hf").state_dict()
        for n in ("single", "tp2", "other_seed")
    )
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
        if tensor.dim() == 2:
            assert not torch.equal(tensor, other_seed[name]), name
            assert (
                tensor.std().item() == pytest.approx(0.02, rel=0.1)
                and abs(tensor.mean().item()) < 0.002
            )
        else:
            assert (tensor == 1).all()


def test_megatron_objects_hold_the_settings_of_their_names(runs: Path) -> None:
    (settings,) = saved(runs, "megatron_settings")
    assert settings["held"] == list(SETTINGS.values())
    assert settings["backend"] == "flash"


def test_a_killed_save_leaves_the_previous_checkpoint(runs: Path) -> None:
    second = checkpoint_path(runs, 2)
    assert second.with_name(second.name + ".partial").exists()
    assert complete_checkpoints(runs) == [(1, checkpoint_path(runs, 1))]


def test_full_disk_leaves_the_previous_checkpoint(models: dict[str, Path], tmp_path: Path) -> None:
    """Only rank 1 cannot write.

    Both ranks learn of it, and rank 0 knows why. The test has processes of its own, because a limit
    on file sizes applies to a whole process.
    """
    run_dir = tmp_path / "run"
    spawn(
        2,
        tmp_path,
        [
            {
                "run": "full_disk",
                "name": "full_disk",
                "model": str(models["untied"]),
                "topology": {"tp": 2},
                "run_dir": str(run_dir),
            }
        ],
    )
    ranks = saved(tmp_path, "full_disk")
    for rank in ranks:
        assert (
            f"{checkpoint_path(run_dir, 2)} of " in rank["message"]
            and "bytes could not be written" in rank["message"]
        )
        assert rank["left"] == [checkpoint_path(run_dir, 1).name]
        assert rank["after"] == rank["before"], "what is left loads, and is the step before"
        assert "rank 1: [Errno 27] File too large" in rank["message"]
        assert (
            f"{tmp_path / 'export'} could not be written; " in rank["exported"]
            and "rank 1: [Errno 27]" in rank["exported"]
        )
        assert not (tmp_path / "export").exists() and not (tmp_path / "export.partial").exists()


@pytest.mark.parametrize("layout", ["tp2", "dp2", "zero3"])
def test_training_equals_torch_adamw(models: dict[str, Path], runs: Path, layout: str) -> None:
    """Four steps with warm-up, cosine schedule, clipping and weight decay, against PyTorch's AdamW
    in float64.
    """
    model = AutoModelForCausalLM.from_pretrained(
        models["untied"], attn_implementation="eager", experts_implementation="eager"
    ).double()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": decayed, "weight_decay": ADAM["weight_decay"]},
        {"params": norms, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=ADAM["betas"], eps=ADAM["eps"])
    rates = []
    grad_norms = []
    for seed in range(4):
        adam.zero_grad()
        hf_loss(model, sequences(VOCAB, seed=seed), temperature=1.0)[0].backward()
        grad_norms.append(
            torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM["clip_grad"]).item()
        )
        step = seed + 1
        warmup = ADAM["warmup_steps"]
        floor = ADAM["min_lr_ratio"]
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (4 - warmup)))
        rates.append(
            ADAM["lr"] * (step / warmup if step <= warmup else floor + (1 - floor) * cosine)
        )
        for group in adam.param_groups:
            group["lr"] = rates[-1]
        adam.step()
    for rank in saved(runs, f"train.{layout}"):
        assert rank["rates"] == pytest.approx(rates)
        assert rank["grad_norms"] == pytest.approx(grad_norms, rel=1e-4)
        assert max(grad_norms) > ADAM["clip_grad"]
    got = AutoModelForCausalLM.from_pretrained(
        runs / f"train.{layout}.hf", dtype=torch.float32
    ).state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(
            got[name].double(), tensor, rtol=0, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_linear_logprobs(runs: Path, world_size: int) -> None:
    """Values and gradients against log_softmax in float64.

    Padded columns hold huge logits; they must neither count nor get a gradient.
    """
    ranks = saved(runs, f"logprobs.{world_size}")
    assert len(ranks) == world_size
    for name, (logits, targets, vocab_size, temperature) in LOGPROBS.items():
        full_logits = logits.double().requires_grad_()
        expected = (
            (full_logits[..., :vocab_size] / temperature)
            .log_softmax(dim=-1)
            .gather(-1, targets.unsqueeze(-1))
            .squeeze(-1)
        )
        (expected * torch.arange(1.0, targets.numel() + 1)).sum().backward()
        half = logits.dtype == torch.bfloat16
        grad = torch.stack([rank[name][1] for rank in ranks]).sum(dim=0)
        assert grad.dtype == logits.dtype
        torch.testing.assert_close(
            grad.double(),
            full_logits.grad,
            rtol=1e-2 if half else 1e-5,
            atol=1e-2 if half else 2e-6,
        )
        assert (grad[..., vocab_size:] == 0).all()
        for rank in ranks:
            assert rank[name][0].dtype == torch.float32
            torch.testing.assert_close(
                rank[name][0].double(), expected.detach(), rtol=1e-6, atol=5e-6
            )


def test_on_gpus_the_storage_of_what_was_sent_is_freed(runs: Path) -> None:
    """Megatron waits for the sends, with one stage a rank and with several."""
    ((settings),) = saved(runs, "settings_on_gpus")
    storages = {
        vpp: (s["overlap_p2p_comm"], s["deallocate_pipeline_outputs"])
        for vpp, s in settings.items()
    }
    assert storages == {1: (False, True), 2: (True, True)}
    assert all(
        s["bias_activation_fusion"] and not s["use_cpu_initialization"] for s in settings.values()
    ), "made for GPUs"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_padding_tokens_gradient_is_that_of_nn_embedding(
    sequence_parallel: bool,
) -> None:
    """It gets none, even if each of two ranks has a part of the looked-up rows [s / 2, b, h]."""
    from megarl.trainer import cpu_support as trainer_support

    if "megatron.core" not in sys.modules:  # another test may have imported it
        trainer_support.install()
    from megarl.trainer.model import _without_padding

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (2, 8), generator=generator)
    weights, loss_weights = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((5, 3), (2, 8, 3))
    )
    reference = torch.nn.Embedding(5, 3, padding_idx=2, dtype=torch.float64)
    reference.weight.data.copy_(weights)
    (reference(ids) * loss_weights).sum().backward()
    weights.requires_grad_()
    for rank in range(2 if sequence_parallel else 1):
        group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        embedding = SimpleNamespace(reduce_scatter_embeddings=sequence_parallel, tp_group=group)
        rows, weights_of_loss = (
            full.transpose(0, 1).chunk(2)[rank] if sequence_parallel else full
            for full in (weights[ids], loss_weights)
        )
        (_without_padding(2, embedding, (ids,), rows) * weights_of_loss).sum().backward()
    assert (ids == 2).any() and reference.weight.grad is not None
    torch.testing.assert_close(weights.grad, reference.weight.grad, rtol=0, atol=1e-12)
