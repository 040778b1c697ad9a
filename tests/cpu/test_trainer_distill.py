"""Distillation on real gloo ranks, against a plain PyTorch loop with Hugging Face's models in
float64; and the divergences alone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batches import batch_of
from plain_training import ADAM, adamw, assert_same_weights, optimizer_step, policy_mask, weights_of
from test_trainer_minibatches import CONFIG
from trainer_cases import VOCAB, save_model
from trainer_processes import saved, spawn
from trainer_reference import load_float64
from trainer_rig import sequences

# after trainer_reference, which makes it importable without CUDA
from transformers import PreTrainedModel

from megarl.algorithms.batches import cut_into_minibatches
from megarl.base.rollout_types import Batch, Group, Prompt, Sample
from megarl.base.teacher_scores import TeacherFormat, TeacherScores
from megarl.kernels import linear_kl
from megarl.kernels.chunked_kl import LEAST_REST, LikeliestTokens, WholeDistribution

pytestmark = pytest.mark.long

GROUPS = 4
MINIBATCHES = 2
SEED = 5
COEF = 0.5
RHO = 4.0
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}),
    "tp2": ({"tp": 2}, {}),
    "pp2": ({"pp": 2}, {}),
    "cp2": ({"cp": 2}, {}),
    "tp2_sp": ({"tp": 2}, {"sequence_parallel": True}),
    "dp2_zero3": ({"dp": 2, "zero": 3}, {}),
}
# teachers: a model of another family, and one of the policy's shape
WEIGHTS = {"big": 2.0, "near": 0.5}
# name → over, k, temperature, algorithm, teachers, and those of them on the trainer's ranks
CASES: dict[str, tuple[str, int, float, str, tuple[str, ...], tuple[str, ...]]] = {
    "vocabulary": ("vocabulary", 0, 0.7, "distill", ("big", "near"), ("big", "near")),
    "top_k": ("top_k", 5, 1.0, "distill", ("big", "near"), ()),
    "top_k_of_all": ("top_k", VOCAB, 1.0, "distill", ("big",), ()),
    "sampled": ("sampled", 0, 1.0, "aipo", ("big", "near"), ("near",)),
}
RUNS = [
    (case, layout)
    for case in CASES
    for layout in LAYOUTS
    if layout not in ("tp2_sp", "dp2_zero3") or case in ("vocabulary", "top_k")
]
FAILED = 7  # the place of the sample that the first teacher failed to judge


@cache
def model(folder: Path) -> PreTrainedModel:
    return load_float64(folder)


def distribution(network: PreTrainedModel, sample: Any, temperature: float) -> torch.Tensor:
    """[T, vocabulary]: log-probs at each token of the response."""
    ids = torch.tensor([*sample.prompt_ids, *sample.token_ids])
    return (
        network(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1] / temperature
    ).log_softmax(dim=-1)


def coarse_kl(log_p: torch.Tensor, ids: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """[T]: the sum over the tokens `ids` [T, k] and one bucket for all others, written out."""
    p = log_p.gather(-1, ids)
    q = log_q
    rest_p = 1 - p.exp().sum(-1)
    rest_q = (1 - q.exp().sum(-1)).clamp(min=LEAST_REST)
    bucket = torch.where(
        rest_p > 1e-12, rest_p * (rest_p.clamp(min=1e-12).log() - rest_q.log()), 0.0
    )
    return (p.exp() * (p - q)).sum(-1) + bucket


def random_batches(out: Path, case: str) -> list[Batch]:
    """Batches sampled from nearly the model's distribution.

    Teachers on engines have judged all samples except one, in float32.
    """
    _, k, temperature, _, names, on_trainer = CASES[case]
    generator = torch.Generator().manual_seed(1)
    batches = []
    served = [name for name in names if name not in on_trainer]
    for step in range(2):
        groups = []
        for ordinal in range(GROUPS):
            prompt = torch.randint(VOCAB, (2 + ordinal % 2,), generator=generator).tolist()
            samples = []
            for number, reward in enumerate((1.0, 0.5, -0.5)):
                tokens = torch.randint(
                    VOCAB, (2 + (3 * ordinal + 5 * number + step) % 9,), generator=generator
                )
                plain = Sample(
                    tokens.tolist(), [0.0] * len(tokens), [0] * len(tokens), "", reward, "stop"
                )
                numbers = batch_of([Group(Prompt(0, prompt, "", ""), [plain])]).numbers[0]
                teacher_scores: list[TeacherScores | None] = []
                with torch.no_grad():
                    mu = distribution(model(out / "policy"), numbers, temperature).gather(
                        -1, tokens[:, None]
                    )[:, 0]
                    for name in served:
                        log_q = distribution(model(out / name), numbers, 1.0).float()
                        best = log_q.topk(k) if k else None
                        ids = (
                            best.indices.int().numpy()
                            if best
                            else np.zeros((len(tokens), 0), np.int32)
                        )
                        teacher_scores.append(
                            TeacherScores(
                                ids,
                                (
                                    best.values if best else log_q.gather(-1, tokens[:, None])
                                ).numpy(),
                            )
                        )
                if teacher_scores and 3 * ordinal + number == FAILED:
                    teacher_scores[0] = None
                mu = mu + 0.6 * torch.randn(len(tokens), generator=generator)
                # the first response has an environment's tokens
                mask = [bool(number) or place % 3 < 2 for place in range(len(tokens))]
                packed = (
                    TeacherFormat(len(served), k).pack(teacher_scores, len(tokens))
                    if served
                    else b""
                )
                of_mu = mu.float().numpy()
                samples.append(
                    Sample(
                        tokens.tolist(),
                        of_mu,
                        [0] * len(tokens),
                        "",
                        reward,
                        "stop",
                        mask,
                        teachers=packed,
                    )
                )
            groups.append(Group(Prompt(GROUPS * step + ordinal, prompt, "", ""), samples))
        batches.append(batch_of(groups, step=step))
    return batches


def plain_loop(out: Path, batches: list[Batch], case: str) -> list[dict[str, Any]]:
    """For each batch: (loss, gradient norm) of its optimizer steps, the mean divergences, and the
    weights after it.
    """
    over, k, temperature, name, names, on_trainer = CASES[case]
    policy = load_float64(out / "policy")
    batch_results = []
    adam = adamw(policy, ADAM)
    for batch in batches:
        optimizer_steps = []
        sums = {teacher: [0.0, 0] for teacher in names}
        rewards = torch.tensor(
            [sample.reward for sample in batch.samples], dtype=torch.float64
        ).view(GROUPS, 3)
        advantages = (rewards - rewards.mean(dim=1, keepdim=True)).flatten() * (name != "distill")
        for minibatch in cut_into_minibatches(GROUPS, MINIBATCHES, 1, SEED, batch.step):
            loss = torch.zeros((), dtype=torch.float64)
            tokens = 0
            for place in (3 * group + i for group in minibatch for i in range(3)):
                sample = batch.numbers[place]
                loss_mask = policy_mask(sample)
                log_p = distribution(policy, sample, temperature)
                sampled = torch.tensor(sample.token_ids).long()[:, None]
                now = log_p.gather(-1, sampled)[:, 0]
                weight = (
                    (now - torch.tensor(sample.logprobs, dtype=torch.float64))
                    .exp()
                    .clamp(max=RHO)
                    .detach()
                )
                advantage = advantages[place].expand(len(now)).clone()
                for teacher in names:
                    if place == FAILED and teacher == names[0] and teacher not in on_trainer:
                        continue
                    with torch.no_grad():
                        log_q = distribution(model(out / teacher), sample, temperature)
                    if over == "sampled":
                        difference = (now - log_q.gather(-1, sampled)[:, 0]).detach()
                        advantage -= COEF * WEIGHTS[teacher] * difference
                        kl = weight * difference
                    else:
                        best = log_q.topk(k) if over == "top_k" and k < VOCAB else None
                        kl = (
                            coarse_kl(log_p, best.indices, best.values)
                            if best
                            else (log_p.exp() * (log_p - log_q)).sum(-1)
                        )
                        loss = loss + COEF * WEIGHTS[teacher] * kl[loss_mask].sum()
                    sums[teacher] = [
                        sums[teacher][0] + kl[loss_mask].sum().item(),
                        sums[teacher][1] + int(loss_mask.sum()),
                    ]
                loss = loss - (weight * advantage * now)[loss_mask].sum()
                tokens += int(loss_mask.sum())
            loss = loss / tokens
            norm = optimizer_step(policy, adam, ADAM, loss, ADAM["lr"])
            optimizer_steps.append((loss.item(), norm))
        means = {teacher: total / count for teacher, (total, count) in sums.items()}
        batch_results.append(
            {
                "told": optimizer_steps,
                "means": means,
                "weights": weights_of(policy),
            }
        )
    return batch_results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("distill")
    save_model("untied", out / "policy")
    save_model("qwen3", out / "big", hidden_size=48, intermediate_size=64)
    save_model("untied", out / "near", initializer_range=0.15)
    scenarios = []
    for case, (over, k, temperature, name, names, on_trainer) in CASES.items():
        torch.save(random_batches(out, case), out / f"{case}.batches")
        roles = [
            f"roles.{t}.{key}"
            for t in names
            for key in ("role=teacher", f"path={out / t}", f"weight={WEIGHTS[t]}")
        ]
        roles += [f"roles.{t}.on={'trainer' if t in on_trainer else 'engines'}" for t in names]
        for layout in (layout for case_of_run, layout in RUNS if case_of_run == case):
            topology, settings = LAYOUTS[layout]
            overrides = [
                f"rollout.prompts_per_step={GROUPS}", "rollout.n=3",
                f"rollout.temperature={temperature}", f"seed={SEED}", *roles,
                f"trainer.minibatches={MINIBATCHES}", f"algorithm.name={name}",
                f"algorithm.distill.over={over}",
                f"algorithm.distill.coef={COEF}", *([f"algorithm.distill.top_k={k}"] if k else []),
            ]  # fmt: skip
            scenarios.append({
                "run": "distill", "name": f"{case}.{layout}", "model": str(out / "policy"),
                "batches": str(out / f"{case}.batches"),
                "config": str(CONFIG), "optimizer": ADAM, "topology": topology,
                "overrides": overrides,
                "trainer": {"max_tokens_per_microbatch": 24, **settings},
            })  # fmt: skip
    teacher_models = {
        "run": "other_reference",
        "name": "reference",
        "model": str(out / "policy"),
        "reference": str(out / "big"),
    }
    spawn(2, out, [*scenarios, {**teacher_models, "topology": {"tp": 2}}])
    return out


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_distillation_equals_a_plain_loop(runs: Path, case: str, layout: str) -> None:
    """Compares losses, gradient norms and mean divergences, and the weights after every batch."""
    ranks = saved(runs, f"{case}.{layout}")
    assert len(ranks) == 2
    for step, want in enumerate(expected(runs, case)):
        for rank in ranks:
            optimizer_steps, metrics = rank["told"][step]
            for actual, values in zip(optimizer_steps, want["told"], strict=True):
                assert actual == pytest.approx(values, rel=1e-4, abs=1e-6)
            for teacher, mean in want["means"].items():
                assert metrics[f"distill/{teacher}/kl"] == pytest.approx(mean, rel=1e-4)
            assert metrics["distill/kl"] == pytest.approx(
                sum(WEIGHTS[teacher] * mean for teacher, mean in want["means"].items()), rel=1e-4
            )
        assert_same_weights(runs / f"{case}.{layout}.{step}.hf", want["weights"])


@cache
def expected(runs: Path, case: str) -> list[dict[str, Any]]:
    return plain_loop(runs, torch.load(runs / f"{case}.batches", weights_only=False), case)


def test_a_reference_may_have_another_shape(runs: Path) -> None:
    for rank in saved(runs, "reference"):
        for name, folder in (("reference", "big"), ("policy", "policy")):
            for row, sequence in zip(rank[name], sequences(VOCAB), strict=True):
                ids = torch.from_numpy(sequence.token_ids).long()
                with torch.no_grad():
                    log_p = (model(runs / folder)(ids[None]).logits[0] / 0.7).log_softmax(-1)
                want = [
                    0.0,
                    *(
                        log_p[i, ids[i + 1]].item() * bool(sequence.loss_mask[i + 1])
                        for i in range(len(ids) - 1)
                    ),
                ]
                assert row == pytest.approx(want, abs=1e-5)


@pytest.fixture
def alone(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


ROWS = 7
HIDDEN = 6
OWN = 9


def inputs(
    vocab: int, padded: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    weight = torch.randn(padded, HIDDEN)
    weight[vocab:] = 1e3
    return torch.randn(ROWS, HIDDEN), weight, torch.randn(ROWS, OWN), torch.randn(padded, OWN)


def written_out(
    h: torch.Tensor,
    w: torch.Tensor,
    log_q: torch.Tensor,
    ids: torch.Tensor | None,
    vocab: int,
    t: float,
) -> torch.Tensor:
    log_p = (h @ w[:vocab].T / t).log_softmax(-1)
    return (
        (log_p.exp() * (log_p - log_q)).sum(-1)
        if ids is None
        else coarse_kl(log_p, ids, log_q.gather(-1, ids))
    )


@pytest.mark.parametrize(
    ("k", "temperature"), [(None, 1.0), (None, 0.6), (1, 1.0), (4, 1.0), (11, 1.0)]
)
@pytest.mark.parametrize("chunk", [2, 100])
def test_divergences_and_their_gradients(
    alone, k: int | None, temperature: float, chunk: int
) -> None:
    """Values against the formula in float64, and gradients against its central differences."""
    vocab = 11
    hidden, weight, of_teacher, teacher_head = inputs(vocab, 16)
    q_logits = of_teacher.double() @ teacher_head[:vocab].double().T
    log_q = (q_logits / temperature).log_softmax(-1)
    ids = None if k is None else log_q.topk(k).indices
    teacher = (
        WholeDistribution(of_teacher, teacher_head)
        if ids is None
        else LikeliestTokens(ids, log_q.gather(-1, ids).float())
    )
    h = hidden.clone().requires_grad_()
    w = weight.clone().requires_grad_()
    kl = linear_kl(h, w, teacher, alone, vocab, temperature, chunk)
    g = torch.arange(1.0, ROWS + 1)
    (kl * g).sum().backward()
    assert h.grad is not None and w.grad is not None
    want = written_out(hidden.double(), weight.double(), log_q, ids, vocab, temperature)
    torch.testing.assert_close(kl.double(), want, rtol=1e-5, atol=2e-6)

    def total(h: torch.Tensor, w: torch.Tensor) -> float:
        return (written_out(h, w, log_q, ids, vocab, temperature) * g.double()).sum().item()

    for argument, grad in ((0, h.grad), (1, w.grad)):
        for place in np.ndindex(tuple(grad.shape)):
            if argument == 1 and place[0] >= vocab:
                assert grad[place] == 0
                continue
            values = []
            for sign in (1, -1):
                moved = [hidden.double().clone(), weight.double().clone()]
                moved[argument][place] += sign * 1e-5
                values.append(total(*moved))
            assert grad[place].item() == pytest.approx(
                (values[0] - values[1]) / 2e-5, rel=1e-4, abs=2e-4
            )


def test_kl_ignores_tokens_beyond_the_policys_vocabulary(alone) -> None:
    """A teacher with a larger padded vocabulary may name such tokens."""
    hidden, weight, _, _ = inputs(11, 16)
    ids = torch.tensor([[2, 14, 5]]).repeat(ROWS, 1)
    q = torch.tensor([[0.5, 0.1, 0.25]]).repeat(ROWS, 1)
    kl = linear_kl(hidden, weight, LikeliestTokens(ids, q.log()), alone, 11)
    p = (hidden.double() @ weight[:11].double().T).softmax(-1)
    remaining_mass = 1 - p[:, 2] - p[:, 5]
    want = (
        p[:, 2] * (p[:, 2] / 0.5).log()
        + p[:, 5] * (p[:, 5] / 0.25).log()
        + remaining_mass * (remaining_mass / 0.15).log()
    )
    torch.testing.assert_close(kl.double(), want, rtol=1e-5, atol=1e-6)


def test_likeliest_tokens_give_a_lower_bound(alone) -> None:
    """A lower bound on the whole divergence, closer with more tokens.

    (Log-probs are in float64, since in float32 a small remaining probability has few digits.)
    """
    vocab = 11
    hidden, weight, of_teacher, teacher_head = inputs(vocab, vocab)
    log_q = (of_teacher.double() @ teacher_head.double().T).log_softmax(-1)
    full_divergence = linear_kl(
        hidden, weight, WholeDistribution(of_teacher, teacher_head), alone, vocab
    )
    bounds = []
    for k in range(1, vocab + 1):
        best = log_q.topk(k)
        bounds.append(
            linear_kl(
                hidden, weight, LikeliestTokens(best.indices, best.values), alone, vocab
            ).float()
        )
        assert (bounds[-1] <= full_divergence + 1e-5).all() and (
            k == 1 or (bounds[-1] >= bounds[-2] - 1e-5).all()
        )
    torch.testing.assert_close(bounds[-1], full_divergence, rtol=1e-5, atol=2e-6)


def test_scores_survive_packing() -> None:
    random = np.random.default_rng(0)
    form = TeacherFormat(2, 3)
    one = TeacherScores(
        random.integers(0, 2**31, (5, 3), np.int32), random.standard_normal((5, 3), np.float32)
    )
    first, second = form.unpack(form.pack([one, None], 5), 5)
    assert (
        (first.ids == one.ids).all()
        and (first.logprobs == one.logprobs).all()
        and np.isnan(second.logprobs).all()
    )
    (only,) = TeacherFormat(1, 0).unpack(
        TeacherFormat(1, 0).pack(
            [TeacherScores(np.zeros((2, 0), np.int32), one.logprobs[:2, :1])], 2
        ),
        2,
    )
    assert only.ids.shape == (2, 0) and (only.logprobs == one.logprobs[:2, :1]).all()
    with pytest.raises(ValueError, match="reshape"):
        form.unpack(form.pack([one, None], 5), 4)
