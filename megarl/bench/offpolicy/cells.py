"""The runs of `megarl bench offpolicy`, each by its settings: what Noukhovitch et al. (arXiv:2410.18252) and LlamaRL vary.

All runs of a part see as many samples, in as many optimizer steps. A run with N mini-batches samples N of them at once from one version of
the weights and then makes N optimizer steps, so its last step is N - 1 updates off its data (section 3.1 there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UPDATES = 96  # optimizer steps on new samples; a multiple of every number of mini-batches
SAMPLES_PER_UPDATE = 128
MINIBATCHES = (1, 2, 4, 8, 16)
SIZES = {  # of policies: keys of a Llama's config.json; None: the shipped one's
    "small": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    "medium": None,
    "large": {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2},
}
LOSSES: Mapping[str, Sequence[str]] = {  # what each needs besides its name
    "ppo": ("algorithm.ratio=proximal", "critic.warmup_steps=0", "critic.optimizer.lr=1e-3"),
    "rloo": (),
    "proximal_rloo": ("algorithm.ratio=proximal",),
    "copg": ("algorithm.beta=0",),  # as the paper uses it: no divergence is penalised on this task
    "online_dpo": (),
    "best_of_n": (),
    "aipo": (),
}
# Where the reward is a model's, the divergence is penalised: with the weights of appendix A there (online_dpo has its own, best_of_n none).
_PENALTY = ("algorithm.kl_coef=0.05", "algorithm.kl=reward")
PENALTIES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("ppo", "rloo", "proximal_rloo", "aipo", "reinforce"), _PENALTY),
    "copg": ("algorithm.beta=0.05",),
}
USUAL = "medium"  # size of policies and reward models
OF_REWARD_MODELS = "reward_models"  # the part that needs a reward that is a model's


@dataclass(frozen=True)
class Cell:
    """One run. The same run may be part of several comparisons; its folder depends on its settings alone."""

    algorithm: str
    minibatches: int = 1
    epochs: int = 1
    samples: int = 4  # to a prompt
    policy: str = USUAL
    reward_model: str = USUAL  # its size, if the reward is a model's
    capacity: int = 0
    halved: bool = False  # half as many updates, at half the learning rate
    seed: int = 0

    @property
    def name(self) -> str:
        parts = [self.algorithm, self.policy, f"n{self.minibatches}", f"t{self.epochs}", f"k{self.samples}", f"lag{self.capacity}"]
        parts += [f"rm_{self.reward_model}"] * (self.reward_model != USUAL) + ["half"] * self.halved
        return "-".join([*parts, f"seed{self.seed}"])

    @property
    def updates(self) -> int:
        return UPDATES // 2 if self.halved else UPDATES

    @property
    def steps(self) -> int:
        """Batches of the run."""
        return self.updates // self.minibatches

    def overrides(self, learning_rate: float, penalised: bool = False) -> list[str]:
        """Beside folders and seed. A critic takes the place of a prompt's other samples, so PPO has one to each of more prompts; K samples
        to a prompt leave the number of prompts as it is (section 4.2). Args: penalised: the reward is a model's."""
        samples = 1 if self.algorithm == "ppo" else self.samples
        prompts = SAMPLES_PER_UPDATE if self.algorithm == "ppo" else SAMPLES_PER_UPDATE // 4
        return [
            f"algorithm.name={self.algorithm}",
            *LOSSES.get(self.algorithm, ()),
            *(PENALTIES.get(self.algorithm, ()) if penalised else ()),
            f"trainer.minibatches={self.minibatches}",
            f"trainer.epochs={self.epochs}",
            f"rollout.prompts_per_step={prompts * self.minibatches}",
            f"rollout.n={samples}",
            f"async.capacity={self.capacity}",
            f"trainer.optimizer.lr={learning_rate / 2 if self.halved else learning_rate}",
            f"max_steps={self.steps}",
        ]


def _losses(seed: int) -> list[Cell]:
    return [Cell(name, minibatches, seed=seed) for name in LOSSES for minibatches in MINIBATCHES]


def _policies(seed: int) -> list[Cell]:
    return [Cell("online_dpo", minibatches, policy=size, seed=seed) for size in SIZES for minibatches in MINIBATCHES]


def _reward_models(seed: int) -> list[Cell]:
    return [Cell("online_dpo", minibatches, reward_model=size, seed=seed) for size in SIZES for minibatches in MINIBATCHES]


def _epochs(seed: int) -> list[Cell]:
    return [Cell("online_dpo", epochs=epochs, capacity=1, seed=seed) for epochs in (1, 2, 3)]


def _samples(seed: int) -> list[Cell]:
    return [Cell("online_dpo", samples=2, capacity=1, seed=seed), Cell("online_dpo", samples=4, capacity=1, halved=True, seed=seed)]


def _lags(seed: int) -> list[Cell]:
    return [Cell(name, capacity=lag, seed=seed) for name in ("aipo", "reinforce") for lag in (1, 2, 4, 8, 16)]


def _asynchrony(seed: int) -> list[Cell]:
    return [Cell("online_dpo", capacity=capacity, policy=size, seed=seed) for size in SIZES for capacity in (0, 1)]


PARTS = {
    "losses": _losses,
    "lags": _lags,
    "policies": _policies,
    "epochs": _epochs,
    "samples": _samples,
    "asynchrony": _asynchrony,
    OF_REWARD_MODELS: _reward_models,
}
