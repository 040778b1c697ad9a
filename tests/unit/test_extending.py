"""docs/extending.md: each file of that page, alone in a folder, is accepted by its setting, and
does what the page says.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.algorithms.registry import make_algorithm
from megarl.base.geometry import Box, GeneratorTopology, TrainerTopology
from megarl.base.rollout_types import Prompt
from megarl.config.errors import ConfigError
from megarl.config.schema import AlgorithmConfig, RewardConfig, RolloutConfig, RunConfig
from megarl.generator.completions import Completion, Sampling
from megarl.messaging.host import Host
from megarl.models.registry import family, load_spec
from megarl.reshard.layout import generator_layout, hf_layout, trainer_layout
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.rewards.score import Score, ScoreRequest, arguments_of, parameters_of, score_of, single
from megarl.rollouts.environments.base import RolloutContext
from megarl.rollouts.environments.loading import find_rollout, load_reward
from megarl.weight_sync.transports.base import Endpoint, LiveParameters, Offer
from megarl.weight_sync.transports.choice import this_host, transport_between, transport_class
from megarl.weight_sync.writing import send, shapes_of

PAGE = Path(__file__).parents[2] / "docs/extending.md"
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.S))
MOST_LINES = 32


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, outside the repository, with the files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))]
    )
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_page_has_a_short_file_for_each_extension():
    assert sorted(FILES) == [
        "my_family.py",
        "my_reward.py",
        "my_rollout.py",
        "my_rule.py",
        "my_transport.py",
    ]
    for name, text in FILES.items():
        lines = [line for line in text.splitlines() if line.strip()]
        assert len(lines) <= MOST_LINES, name


def test_reward_of_the_page():
    reward = load_reward(single(RewardConfig(name="my_reward:ends_well")))
    assert reward is not None and reward.parameters == ["response", "answer", "truncated"]
    from my_reward import ends_well

    assert parameters_of(ends_well, "reward.name") == reward.parameters
    assert score_of(ends_well("it is 7 ", "7", True)) == Score(0.9, {"right": 1.0})


def test_environment_of_the_page():
    config = RunConfig(rollout=RolloutConfig(name="my_rollout:second_try", args={"hint": "?"}))
    tokenizer = SimpleNamespace(
        encode_text=lambda text: [ord(c) for c in text],
        decode=lambda ids: "".join(map(chr, ids)),
        decode_turn=lambda ids: "".join(map(chr, ids)),
        eos_ids=(0,),
    )
    answers = iter(["5", "7"])

    async def generate(token_ids, sampling, n):
        text = next(answers)
        return [Completion([ord(text), 0], [-0.5, -0.1], [3, 3], "stop")]

    async def score(request: ScoreRequest) -> Score:
        return Score(float(request.response.startswith(request.answer)))

    context = RolloutContext(tokenizer, generate, score, None, 5.0)
    rollout = find_rollout(config)(tokenizer)
    [sample] = asyncio.run(rollout(context, Prompt(0, [81], "Q", "7"), Sampling(16), 1))
    assert (sample.reward, sample.metrics["tries"]) == (1.0, 2)
    hints = [chr(t) for t, policy in zip(sample.token_ids, sample.policy_mask) if not policy]
    assert hints == ["?"]


def test_algorithm_of_the_page():
    algorithm = make_algorithm(AlgorithmConfig(name="my_rule:soft", rho=2.0))
    mask = torch.tensor([True, True, False])
    boundaries = torch.tensor([0, 1, 3], dtype=torch.int32)
    mu = torch.tensor([-1.0, -3.0, 0.0])
    advantages = torch.tensor([1.0, -1.0, 9.0])
    logprobs = torch.tensor([-1.0, -0.5, 0.0], requires_grad=True)
    microbatch = SimpleNamespace(
        boundaries=boundaries,
        loss_mask=mask,
        mu_logprobs=mu,
        advantages=advantages,
        reference_logprobs=None,
        proximal_logprobs=None,
    )
    algorithm.loss(logprobs, microbatch).loss.backward()
    weights = 2 * torch.tanh((logprobs.detach() - mu).exp() / 2)
    assert torch.allclose(logprobs.grad, torch.where(mask, -weights * advantages, 0.0))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("my_rule:hard", "my_rule has no function or class hard"),
        (
            "my_reward:ends_well",
            r"must take \(log_ratio, advantages, mask, boundaries, rho_min, rho\)",
        ),
        ("no_such:rule", "cannot be imported"),
        ("wrong_rules:raw", "must return megarl.algorithms.losses.Weights, not Tensor"),
        (
            "wrong_rules:summed",
            "must return one value a token; its weight of three tokens is tensor",
        ),
        ("wrong_rules:endless", "its weight must be finite where log_ratio is -inf"),
        ("wrong_rules:raises", "fails on three tokens: ZeroDivisionError"),
    ],
)
def test_invalid_algorithm_is_refused(name, problem, folder):
    takes = "(log_ratio, advantages, mask, boundaries, rho_min, rho)"
    returned = {
        "raw": "log_ratio.exp()",
        "summed": "Weights(mask.sum(), mask)",
        "endless": "Weights(-log_ratio, mask)",
        "raises": "1 / 0",
    }
    functions = "\n".join(
        f"def {function}{takes}:\n    return {result}" for function, result in returned.items()
    )
    (folder / "wrong_rules.py").write_text(
        f"from megarl.algorithms.losses import Weights\n{functions}\n"
    )
    with pytest.raises(ConfigError, match=f"algorithm.name={name}: {problem}"):
        make_algorithm(AlgorithmConfig(name=name))


def test_transport_of_the_page():
    """Both ends in one process: the file takes the written values, and gives them to live
    parameters of any strides.
    """
    name = "my_transport:FileTransport"
    transport = transport_class(name)
    assert transport_between(name, this_host(), this_host()) == name
    assert transport.lands and transport.one_sided
    parameters = {
        "a": torch.nn.Parameter(torch.zeros(6, 5)),
        "b": torch.nn.Parameter(torch.zeros(3, 4).bfloat16().t()),
    }
    worker = transport.memory()
    live = LiveParameters(
        2,
        name,
        Host(),
        "",
        parameters,
        lambda: {key: parameter.data for key, parameter in parameters.items()},
    )
    endpoint = Endpoint.decode(worker.open(live, Offer()).encode())
    writer = transport(0, 5.0)
    writer.connect([endpoint])
    sources = {
        "x": torch.arange(30.0).view(6, 5),
        "y": torch.linspace(-3, 3, 12).view(4, 3).bfloat16(),
    }
    copies = [
        Copy(0, "x", Box((0, 0), (6, 5)), 2, "a", Box((0, 0), (6, 5)), "identity", "float32", 0),
        Copy(0, "y", Box((0, 0), (4, 3)), 2, "b", Box((0, 0), (4, 3)), "identity", "bfloat16", 0),
    ]
    send(writer, copies, sources, shapes_of([endpoint]), audit=True)
    worker.spread()
    assert torch.equal(parameters["a"], sources["x"]) and torch.equal(parameters["b"], sources["y"])


CONFIG = {
    "architectures": ["IQuestCoderForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}


def test_family_of_the_page():
    with pytest.raises(ConfigError, match="IQuestCoderForCausalLM.*or one of your own"):
        load_spec(CONFIG)
    spec = load_spec(CONFIG, own_family="my_family")
    assert spec.family == "my_family" and family(spec).read_spec.__module__ == "my_family"
    llama = {key: value for key, value in CONFIG.items() if key != "architectures"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**llama))
    shapes = {tensor.name: tensor.shape for tensor in hf_layout(spec, "float32").tensors(0)}
    assert shapes == {name: tuple(values.shape) for name, values in model.state_dict().items()}
    source = trainer_layout(spec, TrainerTopology(tp=2, pp=3), "bfloat16")
    engines = generator_layout(spec, GeneratorTopology(2, 2, 1, 1), "bfloat16", "cpu", None)
    prove_exactly_once(ReshardMap.build(source, engines))


@pytest.mark.parametrize(
    ("config", "module", "problem"),
    [
        ({**CONFIG, "clip_qkv": 8.0}, "my_family", "clip_qkv = 8.0 is not supported"),
        (
            {**CONFIG, "residual_multiplier": 0.2},
            "my_family",
            "residual_multiplier = 0.2 is not supported for IQuestCoderForCausalLM",
        ),
        (CONFIG, "qwen2", "megarl.models has a module of this name; rename yours"),
        (CONFIG, "attention", "megarl.models has a module of this name; rename yours"),
        (
            {**CONFIG, "architectures": ["OtherForCausalLM"]},
            "my_family",
            "model.family=my_family is for IQuestCoderForCausalLM",
        ),
        (CONFIG, "my_rule", "model.family=my_rule: the module lacks ARCHITECTURES, read_spec"),
        (CONFIG, "no_such", "model.family=no_such: cannot be imported"),
    ],
)
def test_unfit_family_is_refused(config, module, problem):
    with pytest.raises(ConfigError, match=problem):
        load_spec(config, own_family=module)


def test_own_family_reads_keys_that_are_refused_otherwise(folder):
    """It has the padding token too, without reading it."""
    (folder / "scaled_family.py").write_text(
        "from megarl.models.attention import Attention\n"
        "from megarl.models.reading import read_common\n"
        'ARCHITECTURES = ("IQuestCoderForCausalLM",)\n'
        "def read_spec(reader):\n"
        '    scale = reader.number("attention_multiplier", 1.0)\n'
        '    return read_common(reader, "scaled", attention=Attention(scale=scale))\n'
    )
    values = {**CONFIG, "attention_multiplier": 0.3, "pad_token_id": -1}
    with pytest.raises(ConfigError, match="attention_multiplier = 0.3 is not supported"):
        load_spec(values, own_family="my_family")
    spec = load_spec(values, own_family="scaled_family")
    assert (spec.attention.scale, spec.padding_token) == (0.3, CONFIG["vocab_size"] - 1)


def test_reward_keeps_defaults_that_it_is_not_given() -> None:
    def near(response, answer, tolerance=0.1, *_):
        return abs(float(response) - float(answer)) <= tolerance

    # as verl's for GSM8K
    def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
        return score if method == "strict" and solution_str == ground_truth else format_score

    class Length:
        def __call__(self, response, *, answer):
            return len(response) - len(answer)

    request = ScoreRequest("7.05", "7")
    for function, score in (
        (near, 1.0),
        (functools.partial(near, tolerance=0.01), 0.0),
        (functools.partial(near, answer="9"), 0.0),
        (compute_score, 0.0),
        (functools.partial(compute_score, method="flexible", format_score=0.5), 0.5),
        (Length(), 3.0),
    ):
        names = parameters_of(function, "reward.name=x:f")
        assert score_of(function(**dict(zip(names, arguments_of(request, names))))) == Score(
            score
        ), function


def test_reward_parameter_without_value_is_refused() -> None:
    def misspelled(respons, answer):
        return 0

    def of_slime(args, sample, **kwargs):
        return 0

    for function, problem in (
        (misspelled, "its parameter respons has no default .* did you mean response"),
        (of_slime, "args has no default"),
    ):
        with pytest.raises(ConfigError, match=problem):
            parameters_of(function, "reward.name=x:f")
    with pytest.raises(ConfigError, match="must be one that can be passed by name"):
        parameters_of(lambda response, /: 0, "reward.name=x:f")


def test_reward_functions_of_verl_are_called_like_by_verl() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if data_source != "mine":
            return 0.0
        return {"score": float(solution_str == ground_truth), "index": extra_info["index"]}

    parameters = parameters_of(compute_score, "reward.name")
    assert parameters == ["data_source", "solution_str", "ground_truth", "extra_info"]
    row = {
        "data_source": "mine",
        "reward_model": {"ground_truth": ["7"]},
        "extra_info": {"index": 3},
    }
    request = ScoreRequest("7", '["7"]', row=row, source="maths")
    assert arguments_of(request, parameters) == ["mine", "7", ["7"], {"index": 3}], (
        "the answer as it is in the row, not as JSON"
    )
    without_row = ScoreRequest("7", "7", source="maths")
    assert arguments_of(without_row, parameters) == ["maths", "7", "7", None]
    assert score_of(compute_score(*arguments_of(request, parameters))) == Score(0.0, {"index": 3.0})
