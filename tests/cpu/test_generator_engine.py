"""One real SGLang engine (TP1, fp32, untied) against Hugging Face's model, before and after its
weights are replaced.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch
from sglang_engine import (
    CONTEXT,
    hf_logprobs,
    hf_model,
    make_checkpoint,
    shares_of,
    start_engine,
    write_as_trainer,
)
from sglang_writer import reshard_map

from megarl.data.prompts import KEPT_BACK
from megarl.generator.client import EngineClient
from megarl.generator.completions import Completion, EngineError, Sampling
from megarl.generator.fleet import Fleet
from megarl.generator.server import EngineKeys, EngineSettings, server_command
from megarl.messaging.link import Hub, RunKey
from megarl.reshard.forwarding import SentTensors
from megarl.reshard.layout import LayoutError
from megarl.weight_sync.audit import AuditError
from megarl.weight_sync.commands import Arrange
from megarl.weight_sync.opening import open_memory
from megarl.weight_sync.updates import WeightUpdate
from megarl.weight_sync.workers import Workers, check_layout, connect, describe

PROMPTS = [[1] + [3 + (37 * i + 11 * j) % 400 for j in range(7 + i)] for i in range(5)]
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
TRAINER = {"tp": 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The engine starts from the first one."""
    folder = tmp_path_factory.mktemp("models")
    return [make_checkpoint(folder / str(seed), seed, torch.float32, tied=False) for seed in (1, 2)]


@pytest.fixture(scope="module")
def engine(checkpoints, tmp_path_factory):
    yield from start_engine(
        checkpoints[0], "float32", 1, tmp_path_factory.mktemp("engine") / "engine.0.log"
    )


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    key = RunKey.generate()
    key_file = tmp_path_factory.mktemp("key") / "key"
    key.save(key_file)
    hub = Hub("generator.0", key)
    hub.key_file = str(key_file)
    yield hub
    hub.close()


def with_client(engine, body):
    """Runs `body(client)` once the engine is ready."""

    async def run():
        client = engine.client()
        try:
            await client.wait_ready(120, engine.log, engine.died)
            return await body(client)
        finally:
            await client.close()

    return asyncio.run(run())


async def under_way(client: EngineClient) -> asyncio.Task[list[Completion]]:
    """A long request that has begun to sample."""
    running = asyncio.create_task(
        client.generate(PROMPTS[0], Sampling(max_tokens=80, ignore_eos=True), 32)
    )
    await asyncio.sleep(0.01)
    await client.generate(PROMPTS[1], Sampling(max_tokens=2, ignore_eos=True))  # queued after it
    return running


def test_greedy_tokens_and_logprobs_equal_hf(engine, checkpoints):
    completions = with_client(
        engine,
        lambda client: asyncio.gather(*(client.generate(prompt, GREEDY) for prompt in PROMPTS)),
    )
    model = hf_model(checkpoints[0], torch.float32)
    for prompt, [completion] in zip(PROMPTS, completions):
        tokens = [*prompt, *completion.token_ids]
        reference = hf_logprobs(model, tokens)[len(prompt) - 1 :]
        assert completion.token_ids.tolist() == reference.argmax(-1).tolist()
        expected = reference.max(-1).values
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 3e-6
        assert completion.versions.tolist() == [-1] * 12 and completion.finish_reason == "length"


def test_response_fills_the_context(engine):
    """All but what SGLang keeps back, also if the last token takes a request of its own."""

    async def longest(client, left_over):
        tokens = CONTEXT - len(PROMPTS[0]) - left_over
        fleet = Fleet([client], "resume", chunk_tokens=tokens - 1)
        return (
            len(
                (await fleet.generate(PROMPTS[0], Sampling(max_tokens=tokens, ignore_eos=True), 1))[
                    0
                ].token_ids
            )
            == tokens
        )

    assert with_client(engine, lambda client: longest(client, KEPT_BACK))
    with pytest.raises(EngineError, match="exceeds the maximum allowed length"):
        with_client(engine, lambda client: longest(client, KEPT_BACK - 1))


@pytest.mark.parametrize(
    "temperature, top_p, top_k",
    [(1.0, 1.0, -1), (0.6, 1.0, -1), (1.4, 0.7, -1), (0.8, 1.0, 9), (1.2, 0.8, 20)],
)
def test_logprobs_are_those_of_the_distribution_sampled_from(
    engine, checkpoints, temperature, top_p, top_k
):
    sampling = Sampling(
        max_tokens=10, temperature=temperature, top_p=top_p, top_k=top_k, ignore_eos=True
    )
    completions = with_client(engine, lambda client: client.generate(PROMPTS[2], sampling, 8))
    # independent samples
    assert len({tuple(completion.token_ids) for completion in completions}) > 4
    model = hf_model(checkpoints[0], torch.float32)
    for completion in completions:
        logprobs = hf_logprobs(model, [*PROMPTS[2], *completion.token_ids], temperature)[
            len(PROMPTS[2]) - 1 :
        ]
        probabilities, order = logprobs.exp().sort(-1, descending=True)
        # the nucleus: the likeliest candidates until top_p is passed
        nucleus = probabilities.cumsum(-1) - probabilities <= top_p
        if top_k > 0:
            nucleus[:, top_k:] = False
        nucleus = torch.zeros_like(nucleus).scatter(-1, order, nucleus)
        truncated = torch.log_softmax(logprobs.masked_fill(~nucleus, -torch.inf), -1)
        expected = truncated.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-5


def test_stop_token_ends_a_completion_and_is_part_of_it(engine, checkpoints):
    [first] = with_client(engine, lambda client: client.generate(PROMPTS[0], GREEDY))
    stop = first.token_ids[3]
    sampling = Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(stop,), ignore_eos=False)
    [completion] = with_client(engine, lambda client: client.generate(PROMPTS[0], sampling))
    assert completion.token_ids == first.token_ids[: first.token_ids.index(stop) + 1]
    assert completion.finish_reason == "stop"


def test_score_equals_hf(engine, checkpoints):
    sequences = [PROMPTS[4], PROMPTS[1][:4]]
    scores = with_client(engine, lambda client: client.score(sequences))
    model = hf_model(checkpoints[0], torch.float32)
    for sequence, values in zip(sequences, scores):
        expected = hf_logprobs(model, sequence).gather(-1, torch.tensor(sequence[1:])[:, None])[
            :, 0
        ]
        assert (torch.tensor(values) - expected).abs().max() < 3e-6


def test_requests_without_the_right_key_are_refused(engine):
    async def statuses(client: EngineClient) -> dict:
        body = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 1}}
        paths = {
            "/generate": body,
            "/begin_weight_update": {},
            "/pause_generation": {},
            "/update_weights_from_disk": {"model_path": "x"},
        }
        paths |= {
            "/update_weights_from_tensor": {"serialized_named_tensors": []},
            "/flush_cache": {},
        }
        status_by_path = {}
        async with aiohttp.ClientSession() as session:
            for path, content in paths.items():
                for key in (None, "guess", engine.keys.api):
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    async with session.post(
                        engine.url + path, json=content, headers=headers
                    ) as response:
                        status_by_path[path, key] = response.status
        return status_by_path

    status_by_path = with_client(engine, statuses)
    allowed = {request for request, status in status_by_path.items() if status != 401}
    assert allowed == {("/generate", engine.keys.api)}


def test_keys_are_in_no_title_log_or_answer(engine):
    def secret_in(text: str) -> bool:
        return engine.keys.api in text or engine.keys.admin in text

    assert len(engine.processes()) >= 3  # server, scheduler, detokenizer
    assert not any(secret_in(" ".join(process.cmdline())) for process in engine.processes())
    assert not secret_in(engine.log.read_text())

    async def server_info(client: EngineClient) -> str:
        headers = {"Authorization": f"Bearer {engine.keys.api}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{engine.url}/server_info") as response,
        ):
            return await response.text()

    assert engine.keys.admin not in with_client(engine, server_info)


def test_server_listens_on_loopback_only(engine):
    # its workers also hold torch's rendezvous store, which binds to all
    connections = engine.processes()[0].net_connections("inet")
    listening = {connection.laddr for connection in connections if connection.status == "LISTEN"}
    assert int(engine.url.rpartition(":")[2]) in {port for _, port in listening}
    assert {address for address, _ in listening} == {"127.0.0.1"}


def test_paused_engine_frees_the_cores_and_keeps_its_requests(engine):
    async def cpu_s_of_a_pause(client: EngineClient) -> tuple[float, Completion]:
        long = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
        request = asyncio.ensure_future(client.generate(PROMPTS[0], long))
        await client.pause(60, "in_place")
        before = sum(sum(process.cpu_times()[:2]) for process in engine.processes())
        await asyncio.sleep(2)
        spent = sum(sum(process.cpu_times()[:2]) for process in engine.processes()) - before
        await client.resume(60)
        return spent, (await request)[0]

    spent_s, completion = with_client(engine, cpu_s_of_a_pause)
    assert len(completion.token_ids) == 60
    assert spent_s < 0.5


def test_replaced_weights_are_never_mixed_with_old_keys(engine, checkpoints, hub):
    """One engine and two trainer processes: layout check, direct writes, audit, prefix cache,
    corruption, worker errors.
    """
    map = reshard_map(checkpoints[1], "float32", TRAINER, 1)
    new = hf_model(checkpoints[1], torch.float32)
    prompt = PROMPTS[4]

    def difference_to_hf(completion) -> float:
        logprobs = hf_logprobs(new, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
        expected = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        return (torch.tensor(completion.logprobs) - expected).abs().max().item()

    async def body(client: EngineClient) -> None:
        workers = Workers([client], [1], hub, 60)
        await client.generate(prompt, GREEDY)  # now its keys and values are cached
        await client.begin_update(60)
        await connect(workers, hub.key_file)
        live = await describe(workers)
        check_layout(live, map.destination)
        with pytest.raises(LayoutError, match="rank 0, model.layers.0.self_attn.qkv_proj.weight"):
            check_layout(live, reshard_map(checkpoints[1], "bfloat16", TRAINER, 1).destination)
        endpoints = [
            endpoint.encode() for endpoint in await open_memory(workers, "shared_memory", map)
        ]
        await client.end_update(60)
        [unchanged] = await client.generate(PROMPTS[0], GREEDY)
        assert unchanged.versions[0] == -1

        # The weights are written, but the prefix cache is kept: the engine's answer is wrong, so
        # the cache matters here.
        update = WeightUpdate(workers, 7)
        await update.open()
        shares = shares_of(
            write_as_trainer("shared_memory", checkpoints[1], "float32", TRAINER, 1, endpoints)
        )
        await update.audit(shares, SentTensors(map))
        await client.end_update(60)
        await client.resume(60)
        [stale] = await client.generate(prompt, GREEDY)
        assert difference_to_hf(stale) > 1e-3

        # A whole update with requests in flight: none is lost, and each token tells the weights
        # that sampled it.
        running = await under_way(client)
        update = WeightUpdate(workers, 7)
        await update.open()
        await update.audit(shares, SentTensors(map))
        first_version, ended = await update.close()
        assert first_version < ended
        [fresh] = await client.generate(prompt, GREEDY)
        assert difference_to_hf(fresh) < 3e-6
        assert fresh.versions.tolist() == [7] * 12
        for completion in await running:
            assert len(completion.token_ids) == 80
            assert completion.versions.tolist() == sorted(completion.versions) and set(
                completion.versions
            ) == {-1, 7}

        # One flipped element, in the write of a user's own transport.
        update = WeightUpdate(workers, 8)
        await update.open()
        writers = write_as_trainer(
            "sglang_writer:OneFlippedElement", checkpoints[1], "float32", TRAINER, 1, endpoints
        )
        corrupt = shares_of(writers)
        with pytest.raises(AuditError) as failure:
            await update.audit(corrupt, SentTensors(map))
        assert str(failure.value).splitlines()[1:] == [
            "model.layers.1.mlp.down_proj.weight on generator rank 0 is not what trainer rank 0, 1 sent"
        ]

        # A command that fails in the worker returns an error with the reason, and the engine
        # continues.
        with pytest.raises(
            RuntimeError, match="(?s)generator rank 0 failed at Arrange.*KeyError: 0"
        ):
            await workers.run_all(Arrange(shapes={}))
        with pytest.raises(EngineError, match="session is already open"):
            await client.begin_update(60)
        await update.close()
        assert [
            completion.versions[0] for completion in await client.generate(prompt, GREEDY, 2)
        ] == [8, 8]

    with_client(engine, body)


async def test_deadline_names_the_engine():
    client = EngineClient("http://127.0.0.1:9", "a", "b")
    try:
        with pytest.raises(
            TimeoutError, match=r"http://127.0.0.1:9 was not ready after 0 s; the end of"
        ):
            await client.wait_ready(0.2, Path(__file__))
        with pytest.raises(RuntimeError, match="http://127.0.0.1:9 exited with 3"):
            await client.wait_ready(5, failed=lambda: "exited with 3")
        with pytest.raises(EngineError, match="http://127.0.0.1:9/generate is not reachable"):
            await client.generate([1], GREEDY)
    finally:
        await client.close()


LAUNCHER = """
import json, os, subprocess, sys, time
argv, env = json.loads(sys.argv[1])
env["MEGARL_ENGINE_LAUNCHER"] = str(os.getpid())
print(subprocess.Popen(argv, env={**os.environ, **env}).pid, flush=True)
time.sleep(60)
"""


def test_engine_ends_with_its_launcher(checkpoints):
    command = server_command(
        EngineSettings(str(checkpoints[0]), "float32", 1, 64, 8), EngineKeys("a", "b")
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, json.dumps(command)], stdout=subprocess.PIPE, text=True
    )
    server = psutil.Process(int(launcher.stdout.readline()))
    time.sleep(2)
    assert server.is_running()
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(10)
    assert psutil.wait_procs([server], timeout=10)[1] == []


def test_engine_ends_when_one_of_its_processes_is_killed(engine):
    """The last test, because it ends the module's engine."""
    processes = engine.processes()
    scheduler = next(process for process in processes if "scheduler" in " ".join(process.cmdline()))

    async def kill_while_generating(client: EngineClient) -> None:
        running = await under_way(client)
        scheduler.send_signal(signal.SIGKILL)
        with pytest.raises(EngineError, match=engine.url):
            await running

    with_client(engine, kill_while_generating)
    engine.process.wait(15)
    assert psutil.wait_procs(processes[1:], timeout=10)[1] == []
    log = engine.log.read_text()
    assert (
        f"process {scheduler.pid} of this engine was killed by SIGKILL" in log
        or "scheduler_0" in log
    ), "ours, or SGLang's watchdog"
