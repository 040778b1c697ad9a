"""Teachers and references among the roles: allowed settings, the needs of a run without a reward,
counts and plans.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resolving import MODEL, config

from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import Failure, Prompt, Sample
from megarl.base.teacher_scores import TeacherFormat
from megarl.config.errors import ConfigError
from megarl.config.schema import AlgorithmConfig, RewardConfig, RunConfig
from megarl.estimate.estimate import estimate
from megarl.plan.resolve import resolve
from megarl.rewards.score import failure_metrics, teacher_failures, too_many_failures
from megarl.teachers.engines import ServedTeachers
from megarl.teachers.loss import TeacherTokens
from megarl.teachers.plan import teacher_format

pytestmark = pytest.mark.usefixtures("hub_offline")
TEACHER = f"roles.teacher.path={MODEL}"
ALONE = ["algorithm.name=distill", "reward.name=none", "rollout.n=1"]


def problems_of(tmp_path: Path, *overrides: str) -> list[str]:
    try:
        resolve(config(tmp_path, *overrides), "plan")
    except ConfigError as error:
        return error.problems
    return []


def shaped(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(json.loads((MODEL / "config.json").read_text()) | changes)
    )
    return folder


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        ([], []),
        ([TEACHER], []),
        ([TEACHER, *ALONE], []),
        ([TEACHER, "roles.teacher.on=trainer", "algorithm.distill.over=vocabulary",
        "rollout.temperature=0.7"], []),
        (["algorithm.name=distill"], ["algorithm.name=distill: needs a teacher: set "
                                      "roles.teacher.path"]),
        (["algorithm.distill.coef=2"], ["algorithm.distill: needs a teacher: set "
                                        "roles.teacher.path"]),
        ([TEACHER, "algorithm.distill.top_k=4"], ["algorithm.distill.top_k=4: must be null: only "
                                                  "algorithm.distill.over=top_k has it"]),
        (
            [TEACHER, "algorithm.distill.over=vocabulary"],
            ["algorithm.distill.over=vocabulary: needs roles.teacher.on=trainer; it is on "
             "engines, and SGLang gives only the likeliest "
             "tokens"],
        ),
        (
            [TEACHER, "roles.teacher.on=trainer", "algorithm.distill.over=top_k",
            "roles.teacher.tp=2"],
            ["roles.teacher.tp=2: a teacher on the trainer's ranks has no such setting",
             "algorithm.distill.over=top_k: needs roles.teacher.on=engines; it is on trainer, and "
             "the whole vocabulary is known there: set "
             "over=vocabulary"],
        ),
        (
            [TEACHER, "rollout.temperature=0.7"],
            ["rollout.temperature=0.7: must be 1 with roles.teacher on engines: SGLang gives "
             "log-probs of its input at temperature 1 "
             "only"],
        ),
        (
            [TEACHER, "rollout.top_p=0.9", "algorithm.name=online_dpo", "roles.teacher.on=own"],
            ["roles.teacher.on=own: must be one of trainer, engines"],
        ),
        (
            [TEACHER, "rollout.top_p=0.9", "algorithm.name=online_dpo"],
            ["rollout.top_p, top_k, min_p: must be off with a teacher, because the policy is "
             "compared with its whole distribution",
             "algorithm.name=online_dpo: is a loss of several responses, to which no teacher can "
             "be added"],
        ),
        ([TEACHER, "rollout.n=1"], ["rollout.n=1: must be at least 2: aipo compares a prompt's "
                                    "samples"]),
        (
            [TEACHER, "reward.name=none"],
            ["reward.name=none: aipo learns from rewards; algorithm.name=distill learns from "
             "teachers alone"],
        ),
        (
            [TEACHER, "algorithm.name=distill", "reward.name=none", "rollout.dynamic_sampling=true",
            "data.eval.source=rows.jsonl"],
            ["reward.name=none: scores no held-out responses either; set eval.reward",
             "rollout.dynamic_sampling=true: must be false with algorithm.name=distill, which "
             "learns from every prompt"],
        ),
        ([f"roles.reference.path={MODEL}"], ["roles.reference: nothing uses it; set "
                                             "algorithm.kl_coef, or an algorithm with a beta"]),
        (
            [f"roles.reference.path={MODEL}", "roles.reference.on=engines",
            "algorithm.kl_coef=0.1"],
            ["roles.reference.on=engines: a reference must be on trainer"],
        ),
    ],
)  # fmt: skip
def test_settings_of_teachers_are_checked(
    tmp_path: Path, overrides: list[str], problems: list[str]
) -> None:
    assert sorted(problems_of(tmp_path, *overrides)) == sorted(problems)


def test_top_k_is_at_most_the_vocabulary_of_the_teacher(tmp_path: Path) -> None:
    """A request for more would end the teacher's engine."""
    settings = [
        TEACHER,
        f"roles.teacher.path={shaped(tmp_path / 'small', vocab_size=30)}",
        f"model.path={tmp_path / 'small'}",
    ]
    settings.append("algorithm.distill.over=top_k")
    assert problems_of(tmp_path, *settings, "algorithm.distill.top_k=31") == [
        "algorithm.distill.top_k=31: must be at most the size of roles.teacher's vocabulary, 30"
    ]
    assert problems_of(tmp_path, *settings, "algorithm.distill.top_k=30") == []
    assert problems_of(tmp_path, *settings) == []


def test_a_teacher_must_fit_the_policy(tmp_path: Path) -> None:
    size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    small = shaped(tmp_path / "small", vocab_size=size - 4)
    large = shaped(tmp_path / "large", vocab_size=size + 4)
    scores = shaped(
        tmp_path / "scores", architectures=["LlamaForSequenceClassification"], num_labels=1
    )
    on_trainer = "roles.teacher.on=trainer"
    full_vocabulary = "algorithm.distill.over=vocabulary"

    def teacher_problems(path: Path, *overrides: str) -> list[str]:
        return [
            problem.removeprefix(f"roles.teacher.path={path}: ")
            for problem in problems_of(tmp_path / "run", f"roles.teacher.path={path}", *overrides)
        ]

    (tmp_path / "run").mkdir()
    assert teacher_problems(small) == [
        f"the size of its vocabulary, {size - 4}, must be at least the policy's, {size}"
    ]
    assert teacher_problems(small, on_trainer) == [
        f"its vocabulary of {size - 4} must have the policy's {size} tokens"
    ]
    assert teacher_problems(large) == teacher_problems(large, on_trainer) == [], (
        "as far as the files of the tokenizers, which a run compares, allow"
    )
    assert teacher_problems(large, on_trainer, full_vocabulary) == [
        f"the size of its vocabulary, {size + 4}, must be the policy's, {size}, for "
        "algorithm.distill.over=vocabulary"
    ]
    assert teacher_problems(scores) == [
        "is a LlamaForSequenceClassification, which generates no text; a teacher must"
    ]
    assert teacher_problems(scores, on_trainer) == [
        "is a reward model or critic, which gives no probabilities"
    ]


def test_plan_counts_teachers(tmp_path: Path) -> None:
    big = shaped(tmp_path / "big", hidden_size=256, intermediate_size=1024)

    def planned(*overrides: str) -> tuple[RunConfig, float, float, float]:
        run_config = config(tmp_path, *overrides)
        plan = resolve(run_config, "plan")
        estimated = estimate(run_config, plan.spec)
        return (
            run_config,
            estimated.trainer.frozen,
            estimated.trainer.reference,
            estimated.train.total,
        )

    _, none, _, plain_s = planned()
    _, frozen, _, with_s = planned(f"roles.teacher.path={big}", "roles.teacher.on=trainer")
    assert none == 0
    assert frozen > 0
    assert with_s > plain_s
    kl = "algorithm.kl_coef=0.1"
    _, frozen_reference, swapped, _ = planned(f"roles.reference.path={big}", kl)
    assert frozen_reference == frozen and swapped == 0, "another shape: a model of its own"
    _, frozen_reference, swapped, _ = planned(f"roles.reference.path={MODEL}", kl)
    assert frozen_reference == 0
    assert swapped == planned(kl)[2] > 0
    with_two_teachers, *_ = planned(
        f"roles.teacher.path={big}",
        f"roles.second.path={big}",
        "roles.second.role=teacher",
        "algorithm.distill.over=top_k",
    )
    assert list(estimate(with_two_teachers, resolve(with_two_teachers, "plan").spec).served) == [
        "teacher",
        "second",
    ]
    assert teacher_format(with_two_teachers) == TeacherFormat(2, 20)


def test_failures_of_teachers_are_counted_separately() -> None:
    sample = Sample([1, 2], [-1.0, -1.0], [0, 0], "text", 1.0, "stop")
    failed = Failure("error", "it broke", "text", "roles.teacher")

    class Scripted:
        async def judge(self, prompt, sample):
            return failed

    [judged] = asyncio.run(
        ServedTeachers([Scripted()], TeacherFormat(1, 0)).judged(Prompt(0, [1], "", ""), [sample])
    )  # type: ignore[list-item]
    assert judged.reward == 1.0
    assert judged.failures == [failed]
    samples = [judged, sample]
    assert teacher_failures(samples) == {"distill/teacher/failed": 1}
    assert teacher_failures([sample]) == {}
    metrics = failure_metrics(samples)
    assert metrics["reward/failed_fraction"] == metrics["reward/errors"] == 0
    assert too_many_failures(RewardConfig(), samples, teachers=["teacher"]) is None
    message = too_many_failures(RewardConfig(), [judged], teachers=["teacher"])
    assert message is not None
    assert message.startswith(
        "roles.teacher: of 1 samples 1 scores failed: 1 errors, more than "
        "reward.max_failed_fraction"
    )


def test_a_teacher_is_left_out_where_it_has_said_nothing() -> None:
    """The means leave it out too.

    A token outside the policy's vocabulary has no advantage either.
    """
    teachers = (TeacherTokens(torch.tensor([-0.5, 0.0, -3.0]), torch.tensor([True, False, True])),)
    mask = torch.ones(3, dtype=torch.bool)
    boundaries = torch.tensor([0, 3], dtype=torch.int32)
    mu = torch.tensor([-1.0, -2.0, -1.5])
    batch: Any = SimpleNamespace(
        boundaries=boundaries,
        loss_mask=mask,
        mu_logprobs=mu,
        advantages=torch.zeros(3),
        reference_logprobs=None,
        teachers=teachers,
    )
    algorithm = make_algorithm(AlgorithmConfig(name="distill"), {"teacher": 2.0})
    logprobs = torch.tensor([-1.0, -2.0, -1.5], requires_grad=True)
    out = algorithm.loss(logprobs, batch)
    out.loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(
        logprobs.grad, torch.tensor([2 * (-1.0 + 0.5), 0.0, 2 * (-1.5 + 3.0)])
    )
    sums = {name: value.item() for name, value in out.sums.items()}
    assert algorithm.metrics(sums)["distill/teacher/kl"] == pytest.approx((-0.5 + 1.5) / 2)
    assert algorithm.metrics(sums)["distill/kl"] == pytest.approx(-0.5 + 1.5)
    assert algorithm.advantages(torch.ones(2, 1)).tolist() == [[0.0], [0.0]]
    assert not algorithm.skip_zero
