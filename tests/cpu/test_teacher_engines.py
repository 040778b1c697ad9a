"""Teachers on real engines: their log-probs of responses against Hugging Face's model in float64,
and failures.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from sglang_engine import CONTEXT, VOCABULARY, hf_model, make_checkpoint, start_engine

from megarl.base.rollout_types import Prompt, Sample
from megarl.base.teacher_scores import TeacherFormat
from megarl.config.schema import RunConfig
from megarl.generator.completions import EngineError
from megarl.generator.fleet import Fleet
from megarl.roles.plan import find_served
from megarl.roles.settings import RoleConfig
from megarl.teachers.engines import ServedTeacher, ServedTeachers

TOLERANCE = 5e-6
PROMPT = Prompt(0, [1, 30, 41, 52, 63, 74, 85], "", "")


def response(seed: int, length: int) -> Sample:
    tokens = np.random.default_rng(seed).integers(3, VOCABULARY, length)
    tokens[length // 2] = VOCABULARY - 1
    return Sample(tokens, [-1.0] * length, [0] * length, "x", 0.0, "stop")


RESPONSES = [response(seed, length) for seed, length in enumerate((1, 2, 9, 40))]


def hf_distribution(folder: Path, sample: Sample) -> torch.Tensor:
    """[T, vocabulary] at temperature 1, in float64."""
    ids = [*PROMPT.token_ids, *sample.token_ids]
    with torch.no_grad():
        return (
            hf_model(folder, torch.float32)
            .double()(torch.tensor([ids]))
            .logits[0, len(PROMPT.token_ids) - 1 : -1]
            .log_softmax(-1)
        )


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_log_probs_are_hugging_faces(tp: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "teacher", 4, torch.float32, tied=False)

    async def check(engine) -> None:
        client = engine.client()
        fleet = Fleet([client], frozen=True, name="teacher")
        await client.wait_ready(120, engine.log, engine.died)

        def teacher(top_k: int) -> ServedTeacher:
            config = RunConfig(
                roles={"teacher": RoleConfig(path=str(folder), kv_cache_tokens=CONTEXT)}
            )
            config.rollout.max_tokens = 16
            config.model.dtype = "float32"
            return ServedTeacher(find_served(config, "train")[0], fleet, top_k)

        for top_k in (0, 1, 20, VOCABULARY):
            form = TeacherFormat(1, top_k)
            # Twice: the second time, prompt and response are in the prefix cache.
            for judged in [
                await ServedTeachers([teacher(top_k)], form).judged(PROMPT, RESPONSES)
                for _ in range(2)
            ]:
                for sample, before in zip(judged, RESPONSES, strict=True):
                    assert not sample.failures and sample.token_ids == before.token_ids
                    [scores] = form.unpack(sample.teachers, len(sample.token_ids))
                    log_q = hf_distribution(folder, sample)
                    logprobs = torch.from_numpy(scores.logprobs.copy()).double()
                    if not top_k:
                        want = log_q.gather(-1, torch.tensor(sample.token_ids)[:, None])
                    else:
                        assert all(len(set(row)) == top_k for row in scores.ids.tolist())
                        torch.testing.assert_close(
                            logprobs, log_q.topk(top_k).values, rtol=0, atol=TOLERANCE
                        )
                        want = log_q.gather(-1, torch.from_numpy(scores.ids.copy()).long())
                    torch.testing.assert_close(logprobs, want, rtol=0, atol=TOLERANCE)

        too_long = response(9, CONTEXT)
        teachers = [teacher(3), teacher(3)]
        [sample] = await ServedTeachers(teachers, TeacherFormat(2, 3)).judged(PROMPT, [too_long])
        assert [failure.part for failure in sample.failures] == ["roles.teacher"] * 2
        assert f"{CONTEXT + 7} tokens, for a context of {CONTEXT}" in sample.failures[0].reason
        assert all(
            np.isnan(scores.logprobs).all()
            for scores in TeacherFormat(2, 3).unpack(sample.teachers, CONTEXT)
        )
        # SGLang's own message
        with pytest.raises(EngineError, match="longer than the model's context"):
            await client.judge(PROMPT.token_ids, too_long.token_ids.tolist(), 0)
        await fleet.close()

    with contextlib.contextmanager(start_engine)(
        folder, "float32", tp, tmp_path / "engine.log", frozen=True
    ) as engine:
        asyncio.run(check(engine))
