"""PPO with a critic on real gloo ranks, against a plain PyTorch loop with Hugging Face's models in
float64.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_training import (
    WARMED_UP,
    adamw,
    assert_same_weights,
    learning_rate,
    optimizer_step,
    policy_mask,
    weight_files,
    weights_of,
)
from test_trainer_minibatches import CONFIG, GROUPS, SEED, TEMPERATURE, logprobs_of, random_batches
from trainer_cases import save_model
from trainer_processes import saved, spawn
from trainer_reference import load_float64
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from megarl.algorithms.batches import cut_into_minibatches
from megarl.base.rollout_types import Batch
from megarl.plan.checkpoints import CheckpointError, check_checkpoint_files

pytestmark = pytest.mark.long

OF_CRITIC = WARMED_UP | {
    "lr": 5e-3,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "schedule": "constant",
    "clip_grad": 1.0,
}
MINIBATCHES = 2
EPOCHS = 2
BETA = 0.3
RHO_BAR = 1.2
STEPS = 12
SETTINGS = {  # name: overrides, (gamma, lambda, whiten, value_clip, warm-up)
    "shaped": (
        ["algorithm.ratio=proximal", "algorithm.kl=reward", f"algorithm.kl_coef={BETA}",
        "algorithm.gamma=0.9", "algorithm.gae_lambda=0.8",
         "critic.value_clip=0.05", "critic.warmup_steps=1"],
        (0.9, 0.8, True, 0.05, 1),
    ),
    "plain": (["algorithm.gae_lambda=1.0", "algorithm.whiten=false", "critic.value_clip=null"],
    (1.0, 1.0, False, None, 0)),
    "aged": (
        ["algorithm.name=aipo", "algorithm.advantage=critic", "algorithm.critic_targets=vtrace",
         f"algorithm.rho_bar={RHO_BAR}", "algorithm.gae_lambda=0.9", "critic.value_clip=null"],
        (1.0, 0.9, True, None, 0),
    ),
}  # fmt: skip
# a reward model of another shape; the policy's own checkpoint with a new head
CRITICS = {"shaped": "qwen3", "plain": "untied", "aged": "untied"}
LAYOUTS = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
CASES = [("shaped", layout) for layout in LAYOUTS] + [("plain", "dp2"), ("aged", "dp2")]
RESUMED = [("shaped", "dp2"), ("shaped", "pp2")]


def load_critic(folder: Path) -> PreTrainedModel:
    settings = {"attn_implementation": "eager", "num_labels": 1}
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, **settings
    ).double()
    if not folder.name.startswith("scores"):
        torch.nn.init.zeros_(model.score.weight)
    return model


def values_of(model: PreTrainedModel, sample: Any) -> torch.Tensor:
    """[T]: the values before each token of the response."""
    ids = torch.tensor([*sample.prompt_ids, *sample.token_ids])
    return model.score(model.model(ids[None]).last_hidden_state)[
        0, len(sample.prompt_ids) - 1 : -1, 0
    ]


def plain_loop(
    policy_folder: Path, critic_folder: Path, batches: list[Batch], name: str
) -> list[dict[str, Any]]:
    """All written out.

    For each batch: the policy's gradient norms, the critic's losses and explained variance, and the
    weights after it.
    """
    gamma, lam, whiten, clip, warm_up = SETTINGS[name][1]
    policy = load_float64(policy_folder)
    start = load_float64(policy_folder)
    critic = load_critic(critic_folder)
    of_policy = adamw(policy, WARMED_UP)
    of_critic = adamw(critic, OF_CRITIC)
    batch_results = []
    position = 0
    for batch in batches:
        numbers = batch.numbers
        advantages = {}
        returns = {}
        masks = {p: policy_mask(s) for p, s in numbers.items()}
        with torch.no_grad():
            old = {p: values_of(critic, s)[masks[p]] for p, s in numbers.items()}
            prox = {
                p: logprobs_of(policy, s.prompt_ids, s.token_ids)[masks[p]]
                for p, s in numbers.items()
            }
            first = {
                p: logprobs_of(start, s.prompt_ids, s.token_ids)[masks[p]]
                for p, s in numbers.items()
            }
        mu = {
            p: torch.tensor(s.logprobs, dtype=torch.float64)[masks[p]] for p, s in numbers.items()
        }
        for p, sample in enumerate(batch.samples):
            length = len(old[p])
            reward = torch.zeros(length, dtype=torch.float64)
            if name == "shaped":
                reward -= BETA * (prox[p] - first[p])
            reward[-1] += sample.reward
            delta = [
                reward[t] + gamma * (old[p][t + 1] if t + 1 < length else 0.0) - old[p][t]
                for t in range(length)
            ]
            advantages[p] = torch.stack(
                [
                    sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length))
                    for t in range(length)
                ]
            )
            returns[p] = advantages[p] + old[p]
            if name == "aged":
                ratio = (prox[p] - mu[p]).exp()
                weight = ratio.clamp(max=RHO_BAR)
                trace = lam * ratio.clamp(max=1.0)
                errors = [
                    sum(trace[t:k].prod() * weight[k] * delta[k] for k in range(t, length))
                    for t in range(length)
                ]
                returns[p] = old[p] + torch.stack(errors)
                later = [*errors[1:], 0.0]
                advantages[p] = torch.stack([delta[t] + lam * later[t] for t in range(length)])
        every, targets, were = (
            torch.cat([rows[p] for p in numbers]) for rows in (advantages, returns, old)
        )
        explained = 1 - (targets - were).var(correction=0) / targets.var(correction=0)
        if whiten:
            advantages = {
                p: (a - every.mean()) / (every.var(correction=0) + 1e-8).sqrt()
                for p, a in advantages.items()
            }
        step_record: dict[str, Any] = {
            "norms": [],
            "value/loss": [],
            "value/explained_variance": explained.item(),
            "returns": targets.mean().item(),
        }
        for minibatch in cut_into_minibatches(GROUPS, MINIBATCHES, EPOCHS, SEED, batch.step):
            places = [3 * group + i for group in minibatch for i in range(3)]
            tokens = sum(len(old[p]) for p in places)
            if batch.step >= warm_up:
                loss = torch.zeros((), dtype=torch.float64)
                for p in places:
                    if name == "aged":
                        scored = logprobs_of(policy, numbers[p].prompt_ids, numbers[p].token_ids)
                        log_pi = scored[masks[p]]
                        r = (log_pi.detach() - mu[p]).exp().clamp(max=4.0)
                        loss = loss - (r * advantages[p] * log_pi).sum() / tokens
                        continue
                    r = (
                        logprobs_of(policy, numbers[p].prompt_ids, numbers[p].token_ids)[masks[p]]
                        - (prox if name == "shaped" else mu)[p]
                    ).exp()
                    loss = (
                        loss
                        - torch.minimum(r * advantages[p], r.clamp(0.8, 1.2) * advantages[p]).sum()
                        / tokens
                    )
                position += 1
                rate = learning_rate(WARMED_UP, position, STEPS)
                norm = optimizer_step(policy, of_policy, WARMED_UP, loss, rate)
                step_record["norms"].append((norm, rate))
            loss = torch.zeros((), dtype=torch.float64)
            for p in places:
                v = values_of(critic, numbers[p])[masks[p]]
                near = v if clip is None else old[p] + (v - old[p]).clamp(-clip, clip)
                loss = (
                    loss
                    + torch.maximum((v - returns[p]) ** 2, (near - returns[p]) ** 2).sum()
                    / 2
                    / tokens
                )
            optimizer_step(critic, of_critic, OF_CRITIC, loss, OF_CRITIC["lr"])
            step_record["value/loss"].append(loss.item())
        weights = {"policy": weights_of(policy), "critic": weights_of(critic)}
        batch_results.append(step_record | {"weights": weights})
    return batch_results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ppo")
    save_model("untied", out / "untied")
    save_model("qwen3", out / "scores_qwen3", scores=True)
    torch.save(random_batches(load_float64(out / "untied")), out / "batches.pt")
    common = [
        f"rollout.prompts_per_step={GROUPS}",
        "rollout.n=3",
        f"rollout.temperature={TEMPERATURE}",
        f"seed={SEED}",
    ]
    common += [
        f"trainer.minibatches={MINIBATCHES}",
        f"trainer.epochs={EPOCHS}",
        "algorithm.name=ppo",
    ]

    def scenario(name: str, layout: str, suffix: str = "") -> dict[str, Any]:
        return {
            "run": "ppo", "name": f"{name}.{layout}{suffix}", "model": str(out / "untied"),
            "critic": str(critic_of(out, name)),
            "batches": str(out / "batches.pt"), "config": str(CONFIG), "optimizer": WARMED_UP,
            "critic_optimizer": OF_CRITIC,
            "topology": LAYOUTS[layout], "trainer": {"max_tokens_per_microbatch": 24},
            "overrides": [*common, *SETTINGS[name][0]],
        }  # fmt: skip

    spawn(
        2,
        out,
        [scenario(*case) for case in CASES] + [scenario(*case, ".resumed") for case in RESUMED],
    )
    return out


def critic_of(runs: Path, name: str) -> Path:
    return runs / {"qwen3": "scores_qwen3", "untied": "untied"}[CRITICS[name]]


@cache
def expected(runs: Path, name: str) -> list[dict[str, Any]]:
    return plain_loop(
        runs / "untied",
        critic_of(runs, name),
        torch.load(runs / "batches.pt", weights_only=False),
        name,
    )


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_policy_and_critic_equal_a_plain_loop(runs: Path, name: str, layout: str) -> None:
    ranks = saved(runs, f"{name}.{layout}")
    assert len(ranks) == 2
    clipped = 0.0
    for step, want in enumerate(expected(runs, name)):
        for rank in ranks:
            optimizer_steps, values, metrics = rank["told"][step]
            assert (
                len(optimizer_steps)
                == len(want["norms"])
                == (0 if name == "shaped" and step == 0 else 4)
            )
            for actual, norms in zip(optimizer_steps, want["norms"], strict=True):
                assert actual == pytest.approx(norms, rel=1e-4, abs=1e-6)
            assert values["value/loss"] == pytest.approx(np.mean(want["value/loss"]), rel=1e-4)
            assert values["value/explained_variance"] == pytest.approx(
                want["value/explained_variance"], abs=1e-4
            )
            assert values["returns"] == pytest.approx(want["returns"], abs=1e-5)
            assert metrics["optimizer_steps"] == len(want["norms"])
            clipped += values["value/clipped_fraction"]
        kinds = {"policy": AutoModelForCausalLM, "critic": AutoModelForSequenceClassification}
        for role, kind in kinds.items():
            folder = runs / f"{name}.{layout}.{step}.{role}"
            assert_same_weights(folder, want["weights"][role], kind)
    assert (clipped > 0) == (name == "shaped")


@pytest.mark.parametrize(("name", "layout"), RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(runs: Path, name: str, layout: str) -> None:
    """Bit for bit, for both models."""
    for uninterrupted, resumed in zip(
        saved(runs, f"{name}.{layout}"), saved(runs, f"{name}.{layout}.resumed"), strict=True
    ):
        assert resumed["told"] == uninterrupted["told"][2:]
    for role in ("policy", "critic"):
        folder = runs / f"{name}.{layout}.2.{role}"
        resumed_folder = runs / f"{name}.{layout}.resumed.2.{role}"
        assert weight_files(folder) == weight_files(resumed_folder)


def test_every_byte_of_the_critic_is_accounted_for(runs: Path, tmp_path: Path) -> None:
    """By the indexes of the checkpoint and of the critic's folder."""
    import shutil

    checkpoint = runs / "shaped.dp2.checkpoint"
    assert {path.name for path in (checkpoint / "critic").iterdir()} == {
        "index.msgpack",
        "state.json",
        "rank_00000.bin",
        "rank_00001.bin",
    }
    check_checkpoint_files(checkpoint)
    for number, (file, message) in enumerate(
        [("critic/index.msgpack", "critic/index.msgpack is damaged"),
        ("critic/rank_00001.bin", "in critic/: rank_00001.bin is damaged"),
         ("critic/state.json", "in critic/: state.json is damaged")]
    ):  # fmt: skip
        damaged = tmp_path / str(number)
        shutil.copytree(checkpoint, damaged)
        (damaged / file).write_bytes((damaged / file).read_bytes()[:-1])
        with pytest.raises(
            CheckpointError, match=f"checkpoint {damaged} cannot be used: .*{message}"
        ):
            check_checkpoint_files(damaged)
    shutil.copytree(checkpoint, tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone/critic")
    with pytest.raises(CheckpointError, match="critic/index.msgpack is missing"):
        check_checkpoint_files(tmp_path / "gone")
