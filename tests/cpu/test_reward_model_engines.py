"""Reward models on real engines: their scores against Hugging Face's in float64, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import aiohttp
import pytest
from reward_models import hf_score, make_scores
from run_tools import ROOT
from sglang_engine import CONTEXT, start_engine

from megarl.config.schema import MAX_REWARD, RunConfig
from megarl.data.tokenizer import tokenizer_of
from megarl.generator.fleet import Fleet
from megarl.rewards.score import RewardPart, ScoreRequest
from megarl.roles.plan import SERVED, find_served
from megarl.roles.reward_model import RewardModel
from megarl.roles.settings import RoleConfig

PART = RewardPart("roles.judge", -1.0, "liked", 1.0, "reward.parts.liked.name")
TOLERANCE = 2e-5
HIGH = 1e7


def scorer(folder: Path, fleet: Fleet, **settings: object) -> RewardModel:
    config = RunConfig(
        roles={
            "judge": RoleConfig(
                role="reward_model", path=str(folder), kv_cache_tokens=CONTEXT, **settings
            )
        }
    )
    config.rollout.max_tokens = 16
    config.model.dtype = "float32"
    [role] = find_served(config, "train")
    return RewardModel(
        role, fleet, tokenizer_of(str(ROOT / "configs/models/tiny-llama"), "model.path")
    )


def requests() -> list[ScoreRequest]:
    """Several requests share a prompt, so that the prefix cache is used."""
    texts = ["7", "7,7,6", "7,7,6,7,2", "<eos>"]
    return [
        ScoreRequest(text, "2", "7+0+9+1+5=", {}, [1, 11, 14, 4, 18], [*range(4, 4 + length), 2])
        for length, text in enumerate(texts, 1)
    ]


@pytest.mark.parametrize(
    ("architecture", "tp"),
    [
        (SERVED[0], 1),
        *(
            pytest.param(architecture, tp, marks=pytest.mark.long)
            for architecture, tp in [*((a, 1) for a in SERVED[1:]), (SERVED[1], 2)]
        ),
    ],
)
def test_scores_are_hugging_faces(architecture: str, tp: int, tmp_path: Path) -> None:
    folder = make_scores(tmp_path / "scores", architecture)

    async def check(engine) -> None:
        fleet = Fleet([engine.client()], frozen=True, name="judge")
        await fleet.engines[0].client.wait_ready(120, engine.log, engine.died)
        model = scorer(folder, fleet)
        score_requests = requests()
        scores = await asyncio.gather(
            *(model.score(PART, request) for request in score_requests * 3)
        )
        expected = [
            hf_score(folder, [*request.prompt_token_ids, *request.token_ids])
            for request in score_requests
        ]
        assert [score.reward for score in scores] == pytest.approx(expected * 3, abs=TOLERANCE)
        assert len({round(value, 3) for value in expected}) == len(expected) and not any(
            score.failures for score in scores
        )

        # the template's special tokens count, the response's do not
        templated = scorer(folder, fleet, template="<bos>{prompt}\n{response}<eos>")
        scores = [(await templated.score(PART, request)).reward for request in score_requests]
        tokenizer = tokenizer_of(str(folder), "path")
        ids = [
            [1, *tokenizer.encode_text(f"{request.prompt}\n{request.response}"), 2]
            for request in score_requests
        ]
        assert ids[-1].count(2) == 1 and scores == pytest.approx(
            [hf_score(folder, sequence) for sequence in ids], abs=TOLERANCE
        )

        long = ScoreRequest("x", "", prompt_token_ids=[4] * CONTEXT, token_ids=[2])
        strange = ScoreRequest("x", "", prompt_token_ids=[4], token_ids=[64])
        for request, reason in (
            (long, f"{CONTEXT + 1} tokens, for a context of {CONTEXT}"),
            (strange, "token 64 is not its own"),
        ):
            score = await model.score(PART, request)
            assert (score.reward, score.failures[0].part, score.failures[0].reason) == (
                -1.0,
                "liked",
                f"roles.judge: {reason}",
            )
        await fleet.close()

    with contextlib.contextmanager(start_engine)(
        folder, "float32", tp, tmp_path / "log", classifies=True
    ) as engine:
        asyncio.run(check(engine))


def test_invalid_score_fails_and_a_lost_engine_does_not(tmp_path: Path) -> None:
    """Scores that are too large; an engine that refuses; an engine that dies during a request,
    which another one then takes over.
    """
    folder = make_scores(tmp_path / "scores", "LlamaForSequenceClassification", scale=HIGH)

    async def check(engine, again) -> None:
        fleet = Fleet([engine.client()], elastic=True, frozen=True, name="judge")
        await fleet.engines[0].client.wait_ready(120, engine.log, engine.died)
        model = scorer(folder, fleet)
        [request, *_] = requests()
        score = await model.score(PART, request)
        assert score.reward == -1.0 and score.failures[0].kind == "error"
        assert f"; at most {MAX_REWARD:g} in size is allowed" in score.failures[0].reason

        for process in engine.processes():
            process.kill()
        waits = asyncio.ensure_future(model.score(PART, request))
        await fleet.pulse.until(lambda: bool(fleet.down))
        assert "not reachable" in fleet.reasons and not waits.done()
        with again() as back:
            await fleet.engines[0].client.wait_ready(120, back.log, back.died)
            assert await fleet.engines[0].client.fresh()
            fleet.come_back(fleet.engines[0])
            assert (
                (await waits).failures == score.failures
                and fleet.serving == fleet.engines
                and not fleet.without_weights
            )
            refused = dataclasses.replace(PART, failed_score=-2.0)
            fleet.engines[0].client._user = {"Authorization": "Bearer nobody"}
            score = await model.score(refused, request)
            assert score.reward == -2.0 and "/classify answered 401" in score.failures[0].reason
        await fleet.close()

    start = contextlib.contextmanager(start_engine)
    with start(folder, "float32", 1, tmp_path / "log", classifies=True) as engine:
        asyncio.run(
            check(
                engine,
                lambda: start(
                    folder, "float32", 1, tmp_path / "again", instead_of=engine, classifies=True
                ),
            )
        )


def test_nobody_writes_to_a_frozen_engine(tmp_path: Path) -> None:
    folder = make_scores(tmp_path / "scores", "LlamaForSequenceClassification")

    async def check(engine) -> None:
        client = engine.client()
        await client.wait_ready(120, engine.log, engine.died)
        async with aiohttp.ClientSession() as session:
            for key in (None, engine.keys.api):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with session.post(
                    f"{engine.url}/update_weights_from_disk",
                    json={"model_path": "x"},
                    headers=headers,
                ) as answer:
                    assert answer.status == 401
        await client.close()

    with contextlib.contextmanager(start_engine)(
        folder, "float32", 1, tmp_path / "log", classifies=True
    ) as engine:
        asyncio.run(check(engine))
