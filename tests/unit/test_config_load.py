"""Loading: accepted configs, the message for every mistake, and that a dumped config loads as an
equal one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.algorithms import ALGORITHMS
from megarl.config.errors import ConfigError
from megarl.config.keys import settings
from megarl.config.load import FIXED, dump_config, load_config
from megarl.config.schema import RunConfig

MINIMAL = "model: {path: m}\ndata: {train: {source: rows.jsonl}}\n"
OWN_RULE = "package.module:rule, ./file.py:rule"


def write(folder: Path, text: str = MINIMAL) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return caught.value.problems


def test_defaults_fill_in_and_interpolations_resolve(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, MINIMAL + "run_dir: runs/x\nseed: ${async.capacity}\n"),
        ["async.capacity=2"],
    )
    assert isinstance(config, RunConfig)
    assert config.model.path == "m"
    assert config.sft.output == "runs/x/sft/hf"
    assert config.async_.capacity == config.seed == 2
    assert config.trainer.optimizer.betas == (0.9, 0.95)
    assert config.data.eval is None and config.sft.data is None


def test_last_override_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "trainer: {tp: 4, dp: 2}\n")
    config = load_config(path, ["trainer.tp=8", "trainer.tp=2", "trainer.optimizer.lr=1e-4"])
    assert (config.trainer.tp, config.trainer.dp, config.trainer.optimizer.lr) == (2, 2, 1e-4)


def test_config_of_an_earlier_version_with_fixed_values(tmp_path: Path) -> None:
    plain = load_config(write(tmp_path))
    assert not FIXED.keys() & settings().keys()
    for key, fixed in FIXED.items():
        if "NAME" not in key:
            assert load_config(write(tmp_path), [f"{key}={json.dumps(fixed.value)}"]) == plain, key
            assert problems_of(write(tmp_path), f"{key}=other") == [
                f"{key}=other: can no longer be set: {fixed.instead}"
            ]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run_dir=3", "run_dir", "3"),
        ("data.train.prompt_template=Q: {prompt}", "data.train.prompt_template", "Q: {prompt}"),
        ("data.train.subset='null'", "data.train.subset", "null"),
        ("data.train.subset=null", "data.train.subset", None),
        ("trainer.recompute=true", "trainer.recompute", True),
        ("trainer.optimizer.betas=[0.8, 0.9]", "trainer.optimizer.betas", (0.8, 0.9)),
        ("rollout.top_k=-1", "rollout.top_k", -1),
        ("rollout.top_k=40", "rollout.top_k", 40),
        ("rollout.temperature=1", "rollout.temperature", 1.0),
        ("weights.transport=my_site.wires:Fast", "weights.transport", "my_site.wires:Fast"),
        ("weights.audit=strict", "weights.audit", "strict"),
        ("weights.audit=True", "weights.audit", "on"),
        ("weights.audit=false", "weights.audit", "off"),
        ("generator.server_args={page_size: 1}", "generator.server_args", {"page_size": 1}),
        (
            "generator.server_args.chunked_prefill_size=64",
            "generator.server_args",
            {"chunked_prefill_size": 64},
        ),
        ("rollout.name=games:higher_or_lower", "rollout.name", "games:higher_or_lower"),
        ("rollout.args.max_guesses=3", "rollout.args", {"max_guesses": 3}),
        ("trainer={tp: 2}", "trainer.tp", 2),
    ],
)
def test_override_values(tmp_path: Path, override: str, key: str, value: object) -> None:
    loaded = load_config(write(tmp_path), [override])
    for name in key.split("."):
        loaded = getattr(loaded, name)
    assert loaded == value and type(loaded) is type(value)


@pytest.mark.parametrize(
    ("written", "value"),
    [("on", "on"), ("off", "off"), ("true", "on"), ("false", "off"), ("strict", "strict")],
)
def test_yaml_takes_on_and_off_for_true_and_false(tmp_path: Path, written: str, value: str) -> None:
    config = load_config(write(tmp_path, MINIMAL + f"weights: {{audit: {written}}}\n"))
    assert config.weights.audit == value
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_key_of_an_optional_section_creates_it(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path), ["data.eval.source=held_out.jsonl", "data.eval.subset=main"]
    )
    held_out = config.data.eval
    assert held_out.source == "held_out.jsonl"
    assert (held_out.subset, held_out.split) == ("main", "train")
    removed = load_config(write(tmp_path), ["data.eval.source=a.jsonl", "data.eval=null"])
    assert removed.data.eval is None


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("trainer.tpp=2", "trainer.tpp=2: unknown key; did you mean trainer.tp?"),
        ("trainer.lr=1", "trainer.lr=1: unknown key; did you mean trainer.optimizer.lr?"),
        ("trainr.tp=2", "trainr.tp=2: unknown key; did you mean trainer.tp?"),
        (
            "algorithm.temperature=1",
            "algorithm.temperature=1: unknown key; did you mean eval.temperature or "
            "rollout.temperature?",
        ),
        ("async_.capacity=1", "async_.capacity=1: unknown key; did you mean async.capacity?"),
        (
            "weights.color=red",
            "weights.color=red: unknown key; its section has weights.transport, weights.relay, "
            "weights.audit, "
            "weights.delta, weights.delta_refresh, weights.delta_shadow",
        ),
        ("zzz=1", "zzz=1: unknown key; docs/config.md lists every key"),
        (
            "critic.head=random",
            "critic.head=random: can no longer be set: a new head begins with zeros",
        ),
        (
            "sft.data.sources.a.source=x",
            "sft.data.sources.a.source=x: can no longer be set: only data.train takes several "
            "sources, which megarl sft learns if sft.data "
            "is null",
        ),
        ("max_steps", "max_steps: an override must be of the form key=value, such as trainer.tp=2"),
        ("=3", "=3: an override must be of the form key=value, such as trainer.tp=2"),
        ("trainer=3", "trainer=3: is a section; set its keys, such as trainer.tp"),
        ("trainer=null", "trainer=null: is a section; set its keys, such as trainer.tp"),
        ("trainer.tp=two", "trainer.tp=two: must be an integer"),
        ("trainer.tp=2.0", "trainer.tp=2.0: must be an integer"),
        ("trainer.tp=true", "trainer.tp=true: must be an integer"),
        ("trainer.tp=null", "trainer.tp=null: must be an integer"),
        ("trainer.tp=", "trainer.tp=: must be an integer"),
        ("trainer.tp=[2]", "trainer.tp=[2]: must be an integer"),
        ("trainer.tp=${run_dir}", "trainer.tp=${run_dir}: must be an integer"),
        ("async.max_staleness=few", "async.max_staleness=few: must be an integer or null"),
        ("trainer.recompute=maybe", "trainer.recompute=maybe: must be true or false"),
        ("trainer.recompute=2", "trainer.recompute=2: must be true or false"),
        ("trainer.optimizer.lr=fast", "trainer.optimizer.lr=fast: must be a number"),
        (
            "trainer.optimizer.betas=[0.9]",
            "trainer.optimizer.betas=[0.9]: must be a list of two numbers",
        ),
        (
            "trainer.optimizer.betas=[0.9, 1.0]",
            "trainer.optimizer.betas=[0.9, 1.0]: must be in [0, 1), each",
        ),
        ("trainer.optimizer.lr=.nan", "trainer.optimizer.lr=nan: must be finite"),
        ("trainer.optimizer.lr=-1", "trainer.optimizer.lr=-1.0: must be at least 0"),
        (
            "trainer.optimizer.schedule=sqrt",
            "trainer.optimizer.schedule=sqrt: must be one of constant, cosine, linear",
        ),
        ("trainer.tp=0", "trainer.tp=0: must be at least 1"),
        ("trainer.zero=2", "trainer.zero=2: must be one of 0, 1, 3"),
        ("generator.server_args=3", "generator.server_args=3: must be a mapping"),
        ("generator.mem_fraction=0", "generator.mem_fraction=0.0: must be in (0, 1]"),
        ("async.capacity=-1", "async.capacity=-1: must be at least 0"),
        (
            "async.partial_rollout=wait",
            "async.partial_rollout=wait: must be one of block, in_flight, retract, abort, resume",
        ),
        (
            "algorithm.name=ppoo",
            f"algorithm.name=ppoo: must be one of {', '.join(ALGORITHMS)}, package.module:rule, "
            "./file.py:rule; did you mean ppo?",
        ),
        (
            "algorithm.name=gpro",
            f"algorithm.name=gpro: must be one of {', '.join(ALGORITHMS)}, package.module:rule, "
            "./file.py:rule; did you mean grpo?",
        ),
        (
            "cluster.gpu=h100",
            "cluster.gpu=h100: must be one of RTX4090, L40S, A100, H100, H200, B200, B300, GB200, "
            "GB300, cpu; did you mean H100?",
        ),
        (
            "observe.trackers=[tensorboard, wanbd]",
            'observe.trackers=["tensorboard", "wanbd"]: must be a list of tensorboard, wandb, '
            "mlflow, swanlab, trackio, each at most once; "
            "did you mean wandb?",
        ),
        ("algorithm.kl_coef=-0.1", "algorithm.kl_coef=-0.1: must be at least 0"),
        (
            "reward.name=vibes",
            "reward.name=vibes: must be one of math, last_number, choice, ifeval, code, none, "
            "package.module:function, ./file.py:function, "
            "roles.NAME",
        ),
        (
            "model.dtype=bf16",
            "model.dtype=bf16: must be one of float32, bfloat16; did you mean bfloat16?",
        ),
        ("rollout.temperature=0", "rollout.temperature=0.0: must be above 0"),
        ("rollout.top_p=1.5", "rollout.top_p=1.5: must be in (0, 1]"),
        (
            "rollout.top_k=1",
            "rollout.top_k=1: must be -1, or from 2 to 4096, the most that are recorded",
        ),
        (
            "rollout.top_k=4097",
            "rollout.top_k=4097: must be -1, or from 2 to 4096, the most that are recorded",
        ),
        ("rollout.min_p=1", "rollout.min_p=1.0: must be in [0, 1)"),
        (
            "weights.transport=pigeon",
            "weights.transport=pigeon: must be one of auto, shared_memory, cuda_ipc, mooncake, "
            "nccl, gloo, package.module:Class, "
            "./file.py:Class",
        ),
        ("checkpoint.keep=0", "checkpoint.keep=0: must be at least 1"),
        ("eval.every=-5", "eval.every=-5: must be at least 0"),
        ("run_dir=", "run_dir=: must not be empty"),
        (
            "run_dir=null",
            "run_dir=null: must be a string; null must be in quotes to be a text; so must yes, "
            "no, on, off and null",
        ),
        ("seed=${nosuch}", "seed=${nosuch}: Interpolation key 'nosuch' not found"),
        (
            "data.eval={}",
            "data.eval.source: must be set: synthetic:<task>, a file that ends in .jsonl, .json, "
            ".csv, .tsv or .parquet (docs/data.md), or "
            "a hub name",
        ),
    ],
)
def test_one_mistake_one_line(tmp_path: Path, override: str, problem: str) -> None:
    assert problems_of(write(tmp_path), override) == [problem]


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    path = write(tmp_path, "trainer: {tp: two, colour: red}\nrollout: {n: 0}\n")
    assert problems_of(path, "genrator.tp=2", "oops") == [
        "oops: an override must be of the form key=value, such as trainer.tp=2",
        "trainer.tp=two: must be an integer",
        "trainer.colour=red: unknown key; its section has "
        + ", ".join(key for key in settings() if key.startswith("trainer.")),
        "genrator.tp=2: unknown key; did you mean generator.tp?",
        f"model.path: must be set: {settings()['model.path'].meaning}",
        "rollout.n=0: must be at least 1",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run_dir: true", "run_dir=true: must be a string; true"),
        ("observe: {name: no}", "observe.name=false: must be a string or null; false"),
        (
            "observe: {trackers: [wandb, off]}",
            'observe.trackers=["wandb", false]: must be a list of',
        ),
        ("reward: {parts: {a: {name: on}}}", "reward.parts.a.name=true: must be a string; true"),
        ("algorithm: {name: ~}", "algorithm.name=null: must be a string; null"),
    ],
)
def test_words_that_are_no_text_must_be_quoted(tmp_path: Path, text: str, problem: str) -> None:
    (message,) = problems_of(write(tmp_path, f"{MINIMAL}{text}\n"))
    assert message.startswith(problem)
    assert message.endswith("must be in quotes to be a text; so must yes, no, on, off and null")


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path).rename(tmp_path / "quickstart.yaml")
    assert problems_of(tmp_path / "quikstart.yaml") == [
        f"{tmp_path}/quikstart.yaml: no such file; did you mean {tmp_path}/quickstart.yaml?"
    ]
    assert problems_of(Path("bad=1")) == [
        "bad=1: no such file; the configuration file comes before the overrides: CONFIG bad=1"
    ]
    assert "cannot be read" in problems_of(tmp_path)[0]


def test_dumped_config_loads_back_equal(tmp_path: Path) -> None:
    overrides = [
        "data.eval.source=held_out.jsonl",
        "data.train.prompt_template=Q: {prompt} costs \\${price}\nA: ä",
        "trainer.optimizer.lr=1e-7",
        "trainer.optimizer.betas=[0.5, 0.75]",
        "generator.server_args={page_size: 1, nested: {a: [1, 2]}}",
        "async.capacity=3",
        "sft.output=${run_dir}/out",
    ]
    config = load_config(write(tmp_path), overrides)
    assert config.data.train.prompt_template == "Q: {prompt} costs ${price}\nA: ä"
    assert load_config(write(tmp_path, dump_config(config)), []) == config


def test_sections_named_by_the_user(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        MINIMAL
        + "eval: {suites: {algebra: {source: a.jsonl, samples: 4}, gone: {source: b.jsonl}}}\n",
    )
    config = load_config(
        file,
        [
            "eval.suites.hard.source=c.jsonl",
            "eval.suites.hard.temperature=0.5",
            "eval.suites.gone=null",
        ],
    )
    suites = config.eval.suites
    algebra = suites["algebra"]
    assert (algebra.source, algebra.samples, algebra.prompt_key) == ("a.jsonl", 4, None)
    assert (suites["hard"].source, suites["hard"].temperature) == ("c.jsonl", 0.5)
    assert suites["gone"] is None
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    for override, problem in {
        "eval.suites.algebra.sorce=x": "eval.suites.algebra.sorce=x: unknown key; did you mean "
        "eval.suites.NAME.source?",
        "eval.suites.algebra.samples=0": "eval.suites.algebra.samples=0: must be at least 1",
        "eval.suites.algebra.samples=many": "eval.suites.algebra.samples=many: must be an integer "
        "or null",
        "eval.suites.algebra=3": "eval.suites.algebra=3: is a section; set its keys, such as "
        "eval.suites.NAME.source",
    }.items():
        assert problems_of(file, override) == [problem]


@pytest.mark.parametrize(
    "text, problem",
    [
        ("model:\n\tpath: x\n", ", line 2: not valid YAML: a tab where YAML allows only spaces"),
        ("seed: 1\nseed: 2\n", ", lines 1 and 2: the key seed is set twice"),
        (
            "roles: {j: {verdict_scores: {1: 0,\n 1.0: 1}}}\n",
            ", lines 1 and 2: the key 1.0 is set twice, also as 1",
        ),
        (
            "rollout: {args: {true: 0, True: 1}}\n",
            ", lines 1 and 1: the key True is set twice, also as true",
        ),
        ("rollout: {args: [{1: a, '1': b}]}\n", ", lines 1 and 1: the key 1 is set twice"),
        ("max_steps: [1\n", ", line 2: not valid YAML: did not find expected ',' or ']'"),
        ("- a\n", ": must hold a mapping of keys to values"),
        ("words", ": must hold a mapping of keys to values"),
    ],
)
def test_invalid_yaml_is_refused_with_its_lines(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    assert problems_of(path) == [f"{path}{problem}"]


def test_key_set_twice_in_an_override(tmp_path: Path) -> None:
    override = "roles.j.verdict_scores={1: 0, 1.0: 1}"
    assert problems_of(write(tmp_path), override) == [
        f"{override}: the key 1.0 is set twice, also as 1"
    ]


def test_key_set_with_dots_and_as_a_section(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "trainer.tp: 1\ntrainer: {tp: 2}\n")
    assert problems_of(path) == [f"{path}: trainer.tp is set 2 times, with dots and as a section"]


def test_merged_keys_may_be_set_again(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "rollout: {args: {a: &a {1: x, b: 2}, c: {<<: *a, 1: y}}}\n")
    assert load_config(path).rollout.args["c"] == {"1": "y", "b": 2}
