"""`python tests/studies offpolicy CONFIG`: how well losses cope with data from older weights.

It makes real runs of many kinds.

Every run is a `megarl train` with the shipped program. Runs with the same seed and size begin from
the same warm start. Each run's result is kept in result.json in its folder, and its weights are
removed. The same command continues an interrupted study: it keeps complete runs, continues
interrupted ones, and repeats failed ones.

The settings vary what Noukhovitch et al. (arXiv:2410.18252) vary. All runs of a part have the same
number of samples and of optimizer steps. A run with N mini-batches samples N of them at once from
one version of the weights. Then it makes N optimizer steps, so the weights of its last step are
N - 1 updates newer than its data (section 3.1 there).
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

import plain_reward_model as plain
import torch
from whole_runs import check_settings, ending_runs, note_settings, run_megarl

from megarl.base.files import write_whole
from megarl.base.rollout_types import Prompt
from megarl.config.errors import ConfigError
from megarl.config.limits import find_callable
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.data.tokenizer import Tokenizer
from megarl.observe.metrics import METRICS_FILE, read_metrics
from megarl.rewards.score import (
    ScoreRequest,
    arguments_of,
    parameters_of,
    parts_in_evaluation,
    score_of,
)
from megarl.rewards.verify import VERIFIERS
from megarl.roles.plan import roles_of
from megarl.roles.settings import REWARD_MODEL, role_of

UPDATES = 96  # optimizer steps on new samples; a multiple of every number of mini-batches
SAMPLES_PER_UPDATE = 128
MINIBATCHES = (1, 2, 4, 8, 16)
SIZES = {  # of policies, as keys of a Llama's config.json; None: the shipped model's
    "small": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "medium": None,
    "large": {
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
}
LOSSES: Mapping[str, Sequence[str]] = {  # settings of each besides its name
    "ppo": ("algorithm.ratio=proximal", "critic.warmup_steps=0", "critic.optimizer.lr=1e-3"),
    "rloo": (),
    "proximal_rloo": ("algorithm.ratio=proximal",),
    "copg": ("algorithm.beta=0",),  # as in the paper: no KL penalty on this task
    "online_dpo": (),
    "best_of_n": (),
    "aipo": (),
}
# With a reward model the KL divergence is penalised, with the weights of appendix A there
# (online_dpo has its own, best_of_n none).
_PENALTY = ("algorithm.kl_coef=0.05", "algorithm.kl=reward")
PENALTIES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("ppo", "rloo", "proximal_rloo", "aipo"), _PENALTY),
    "copg": ("algorithm.beta=0.05",),
}
USUAL = "medium"  # size of policies and reward models
OF_REWARD_MODELS = "reward_models"  # the part that needs reward models


@dataclass(frozen=True)
class Cell:
    """One run.

    The same run may be part of several comparisons: its folder depends only on its settings.
    """

    algorithm: str
    minibatches: int = 1
    epochs: int = 1
    samples: int = 4  # a prompt
    policy: str = USUAL
    reward_model: str = USUAL  # its size, if there is one
    capacity: int = 0
    halved: bool = False  # half as many updates, at half the learning rate
    seed: int = 0

    @property
    def name(self) -> str:
        parts = [
            self.algorithm,
            self.policy,
            f"n{self.minibatches}",
            f"t{self.epochs}",
            f"k{self.samples}",
            f"lag{self.capacity}",
        ]
        parts += [f"rm_{self.reward_model}"] * (self.reward_model != USUAL) + ["half"] * self.halved
        return "-".join([*parts, f"seed{self.seed}"])

    @property
    def updates(self) -> int:
        return UPDATES // 2 if self.halved else UPDATES

    @property
    def steps(self) -> int:
        """The number of batches."""
        return self.updates // self.minibatches

    def overrides(self, learning_rate: float, penalised: bool = False) -> list[str]:
        """The run's settings without folders and seed.

        PPO has a critic as baseline, so it takes one sample of each of more prompts. With K samples
        a prompt the number of prompts stays the same (section 4.2). Args: penalised: whether the
        reward is a model's.
        """
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
    return [
        Cell("online_dpo", minibatches, policy=size, seed=seed)
        for size in SIZES
        for minibatches in MINIBATCHES
    ]


def _reward_models(seed: int) -> list[Cell]:
    return [
        Cell("online_dpo", minibatches, reward_model=size, seed=seed)
        for size in SIZES
        for minibatches in MINIBATCHES
    ]


def _epochs(seed: int) -> list[Cell]:
    return [Cell("online_dpo", epochs=epochs, capacity=1, seed=seed) for epochs in (1, 2, 3)]


def _samples(seed: int) -> list[Cell]:
    return [
        Cell("online_dpo", samples=2, capacity=1, seed=seed),
        Cell("online_dpo", samples=4, capacity=1, halved=True, seed=seed),
    ]


def _asynchrony(seed: int) -> list[Cell]:
    return [
        Cell("online_dpo", capacity=capacity, policy=size, seed=seed)
        for size in SIZES
        for capacity in (0, 1)
    ]


PARTS = {
    "losses": _losses,
    "policies": _policies,
    "epochs": _epochs,
    "samples": _samples,
    "asynchrony": _asynchrony,
    OF_REWARD_MODELS: _reward_models,
}


AT_ONCE = 256


@dataclass(frozen=True)
class Quality:
    score: float  # by the judging rule, mean over prompts
    # share of prompts whose response scores higher than the demonstration; a tie counts as half a
    # win
    win_rate: float
    # KL(policy || initial) of a response in nats, the sum over its tokens; mean over prompts
    kl: float
    # of the initial policy on the responses' tokens: the paper's measure of divergence
    perplexity: float
    tokens: float  # mean length of a response
    proxy: float | None  # the reward model's score, mean over prompts


@dataclass(frozen=True)
class HeldOut:
    prompts: Sequence[Prompt]
    demonstrations: Sequence[str]
    tokenizer: Tokenizer
    judge: Callable[[str, Prompt], float]  # scores a response


def judge_of(config: RunConfig) -> Callable[[str, Prompt], float]:
    """The rule that scores held-out responses. Raises ConfigError if there is none."""
    if config.data.eval is None:
        raise ConfigError(
            "data.eval=null: policies are judged on held-out prompts: set data.eval.source"
        )
    [part, *other_parts] = parts_in_evaluation(config)
    if part.role is not None or other_parts:
        raise ConfigError(f"{part.setting}: policies are judged by one rule: set eval.reward")
    verify = VERIFIERS.get(part.name)
    if verify:
        return lambda response, prompt: score_of(verify(response, prompt.answer)).reward
    function = find_callable(part.name, part.setting, VERIFIERS)
    parameters = parameters_of(function, part.setting)

    def judge(response: str, prompt: Prompt) -> float:
        request = ScoreRequest(response, prompt.answer, prompt.text)
        return score_of(function(**dict(zip(parameters, arguments_of(request, parameters))))).reward

    return judge


def held_out_of(config: RunConfig) -> HeldOut:
    """All held-out prompts of data.eval, with their demonstrations.

    Raises ConfigError if no rule scores them.
    """
    from megarl.data.datasets import load_rows
    from megarl.data.prompts import held_out_sets
    from megarl.data.tokenizer import load_tokenizer
    from megarl.plan.resolve import find_spec

    judge = judge_of(config)
    evaluated = config.data.eval
    assert evaluated is not None  # judge_of has checked it
    config = replace(config, eval=replace(config.eval, limit=None))  # the limit is for the runs
    tokenizer = load_tokenizer(config.model)
    prompts = held_out_sets(config, tokenizer, find_spec(config))[0].prompts
    rows = load_rows(evaluated, "data.eval", config.seed, "none", config.model)
    demonstrations = []
    for place in range(len(prompts)):
        answer = rows[place].demonstration
        demonstrations.append(answer if isinstance(answer, str) else answer[-1])
    return HeldOut(prompts, demonstrations, tokenizer, judge)


@torch.no_grad()
def measure(
    policy: Path,
    initial: Path,
    reward_model: Path | None,
    held_out: HeldOut,
    max_tokens: int,
    seed: int,
) -> Quality:
    """Measures the policy's quality, and how far it has moved from its initial weights.

    Transformers samples one response at temperature 1 to each prompt from the Hugging Face
    checkpoint in `policy`, independently of the code that trained it. The KL divergence at each
    position is over the whole vocabulary, so it is exact given the response.
    """
    torch.manual_seed(seed)
    policy_model = _load(policy)
    first = _load(initial)
    proxy = reward_model and plain.load(reward_model)
    tokenizer = held_out.tokenizer
    texts = list[str]()
    proxy_scores = list[float]()
    divergence = []
    surprise = []
    lengths = []
    for start in range(0, len(held_out.prompts), AT_ONCE):
        prompts = held_out.prompts[start : start + AT_ONCE]
        ids, mask = _padded([prompt.token_ids for prompt in prompts])
        full, counted = _sample(policy_model, ids, mask, tokenizer.eos_ids, max_tokens)
        response_positions = slice(ids.shape[1] - 1, -1)
        log_pi, log_first = (
            _logits(model, full, torch.cat([mask, counted], 1))[:, response_positions]
            .double()
            .log_softmax(-1)
            for model in (policy_model, first)
        )
        responses = full[:, ids.shape[1] :]
        divergence += ((log_pi.exp() * (log_pi - log_first)).sum(-1) * counted).sum(1).tolist()
        surprise += (-log_first.gather(2, responses[:, :, None])[:, :, 0] * counted).sum(1).tolist()
        lengths += counted.sum(1).tolist()
        token_rows = [
            row[:length] for row, length in zip(responses.tolist(), lengths[start:], strict=True)
        ]
        texts += [
            tokenizer.decode([token for token in row if token not in tokenizer.eos_ids])
            for row in token_rows
        ]
        if proxy:
            proxy_scores += plain.scores(
                proxy, [[*prompt.token_ids, *row] for prompt, row in zip(prompts, token_rows)]
            ).tolist()
    scores, demonstration_scores = (
        [*map(held_out.judge, answers, held_out.prompts)]
        for answers in (texts, held_out.demonstrations)
    )
    wins = [
        (score > reference) + (score == reference) / 2
        for score, reference in zip(scores, demonstration_scores, strict=True)
    ]
    perplexity = math.exp(sum(surprise) / sum(lengths))
    return Quality(
        fmean(scores),
        fmean(wins),
        fmean(divergence),
        perplexity,
        fmean(lengths),
        fmean(proxy_scores) if proxy else None,
    )


def _sample(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, stop: Sequence[int], max_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, t] prompts and responses; [b, r] a mask of the responses' tokens up to end-of-text, which
    is included.
    """
    sampled = dict(
        do_sample=True,
        top_k=0,
        max_new_tokens=max_tokens,
        eos_token_id=list(stop),
        pad_token_id=stop[0],
    )
    full = model.generate(input_ids=ids, attention_mask=mask, **sampled)
    ends = torch.isin(full[:, ids.shape[1] :], torch.tensor(stop))
    return full, (ends.cumsum(1) - ends.long() == 0).long()


def _logits(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    places = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=places).logits


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # no progress bar to read a megabyte
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, t] ids and mask, padded on the left."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


COLOURS = ("#2f6fab", "#c26a2d", "#3b8f6b", "#8c5a8c", "#d9a441", "#9a9a9a", "#b03a48")


def draw(facts: Mapping[str, Any], path: str) -> None:
    """Writes `path`: score against divergence, a panel for each part.

    As in figures 3 to 5 of arXiv:2410.18252.

    Lines are runs, and points their last weights, larger with more mini-batches or a longer lag.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = {part: results for part, results in facts["parts"].items() if results}
    figure = Figure(figsize=(4.2 * max(1, len(parts)), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(1, len(parts)), sharey=True, squeeze=False)[0]
    for panel, (part, results) in zip(panels, parts.items()):
        _draw_part(panel, part, results)
    panels[0].set_ylabel("score of the last weights")
    figure.savefig(path, dpi=150)


def _draw_part(panel: Any, part: str, results: Sequence[Mapping[str, Any]]) -> None:
    by = {"policies": "policy", "asynchrony": "policy", "reward_models": "reward_model"}.get(
        part, "algorithm"
    )
    for name, colour in zip(dict.fromkeys(result[by] for result in results), COLOURS):
        group_results = [result for result in results if result[by] == name]
        for result in group_results:
            panel.plot(
                [point["kl"] for point in result["curve"]],
                [point["score"] for point in result["curve"]],
                color=colour,
                alpha=0.3,
                lw=0.8,
            )
        last = [result["curve"][-1] for result in group_results]
        sizes = [
            18 * (1 + result["minibatches"] * result["epochs"] + result["capacity"]) ** 0.7
            for result in group_results
        ]
        panel.scatter(
            [point["kl"] for point in last],
            [point["score"] for point in last],
            s=sizes,
            color=colour,
            alpha=0.6,
            label=name,
        )
    panel.set_xlabel("KL from the first weights, nats a response")
    panel.set_title(part, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=7)


Result = Mapping[str, Any]
NEEDED = (
    "score of the last weights (range over seeds) at their divergence from the first in nats "
    "a response"
)
LEARNED = (
    "; in brackets the share of responses that score more than their demonstration, and the "
    "reward model's score"
)


def render(facts: Mapping[str, Any]) -> str:
    lines = [RENDER[part](results) for part, results in facts["parts"].items() if results]
    models = facts.get("reward_models")
    if models:
        lines.append(_reward_model_table(models))
    return "\n\n".join(lines) or "no run is complete"


def _reward_model_table(models: Sequence[Result]) -> str:
    lines = [
        "**Reward models:** share of held-out pairs in the right order",
        "",
        "| | seed | `megarl reward-model` | plain PyTorch |",
    ]
    rows = (
        f"| {model['size']} | {model['seed']} | {model['accuracy']:.3f} | "
        f"{model['accuracy_plain']:.3f} |"
        for model in models
    )
    return "\n".join([*lines, "|---|---|---|---|", *rows])


def _grid(
    title: str,
    results: Sequence[Result],
    row: Callable[[Result], str],
    column: Callable[[Result], str],
) -> str:
    """A table with a cell for each pair of row and column, over seeds."""
    rows, columns = (list(dict.fromkeys(map(key, results))) for key in (row, column))
    learned = LEARNED if results[0]["curve"][-1].get("proxy") is not None else ""
    lines = [
        f"**{title}** {NEEDED}{learned}",
        "",
        f"| | {' | '.join(columns)} |",
        "|" + "---|" * (len(columns) + 1),
    ]
    for name in rows:
        cells = [
            _cell(
                [
                    result
                    for result in results
                    if (row(result), column(result)) == (name, column_name)
                ]
            )
            for column_name in columns
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return "–"
    last = [result["curve"][-1] for result in results]
    scores = [point["score"] for point in last]
    divergence = statistics.fmean(point["kl"] for point in last)
    spread = f" ({min(scores):.2f}–{max(scores):.2f})" if len(scores) > 1 else ""
    text = f"{statistics.fmean(scores):.3f}{spread} at {divergence:.2f}"
    if last[0].get("proxy") is None:
        return text
    wins, proxy = (statistics.fmean(point[key] for point in last) for key in ("win_rate", "proxy"))
    return f"{text} [{wins:.0%}, {proxy:.2f}]"


def _timed(
    title: str,
    results: Sequence[Result],
    row: Callable[[Result], str],
    column: Callable[[Result], str],
) -> str:
    """Like _grid, with the seconds of a step."""
    table = _grid(title, results, row, column)
    times = []
    for name in dict.fromkeys(map(row, results)):
        by_column = {column(result): result for result in results if row(result) == name}
        times.append(
            f"{name}: "
            + ", ".join(
                f"{result['step_s']:.3f} s ({column_name})"
                for column_name, result in by_column.items()
            )
        )
    return f"{table}\n\nMedian seconds of a step: {'; '.join(times)}."


def _minibatches(result: Result) -> str:
    return f"N={result['minibatches']}"


RENDER: Mapping[str, Callable[[Sequence[Result]], str]] = {
    "losses": lambda results: _grid(
        "Losses by mini-batches:", results, lambda result: result["algorithm"], _minibatches
    ),
    "policies": lambda results: _grid(
        "Sizes of policies, online_dpo:", results, lambda result: result["policy"], _minibatches
    ),
    "reward_models": lambda results: _grid(
        "Sizes of reward models, online_dpo:",
        results,
        lambda result: result["reward_model"],
        _minibatches,
    ),
    "epochs": lambda results: _grid(
        "Updates a batch, online_dpo:",
        results,
        lambda result: result["algorithm"],
        lambda result: f"T={result['epochs']}",
    ),
    "samples": lambda results: _grid(
        "Samples to a prompt, online_dpo:",
        results,
        lambda result: result["algorithm"],
        lambda result: (
            f"K={result['samples']}"
            + (", half the updates and learning rate" if result["halved"] else "")
        ),
    ),
    "asynchrony": lambda results: _timed(
        "Synchronous and one step behind, online_dpo:",
        results,
        lambda result: result["policy"],
        lambda result: "synchronous" if result["capacity"] == 0 else "one step behind",
    ),
}


RESULT = "result.json"
LAST_SAMPLES = 1280  # the reward is the mean of the last ones
CURVE_POINTS = 4  # versions of a run's weights that are measured, including the last


@dataclass(frozen=True)
class Study:
    config: str
    overrides: Sequence[str]
    runs: Path
    learned: bool  # the reward is a model's, which has to be trained
    # one run at a time: two threads must not import transformers at once
    measuring: Lock = field(default_factory=Lock)

    def common(self, cell: Cell) -> list[str]:
        model = (
            []
            if SIZES[cell.policy] is None
            else [f"model.path={self.runs / 'models' / cell.policy}"]
        )
        reward_model = [f"reward_model.output={self.reward_model(cell)}"] if self.learned else []
        return [
            *self.overrides,
            *model,
            f"seed={cell.seed}",
            f"sft.output={self.initial(cell)}",
            *reward_model,
        ]

    def initial(self, cell: Cell) -> Path:
        return self.runs / "warm_starts" / f"{cell.policy}-seed{cell.seed}"

    def reward_model(self, cell: Cell) -> Path:
        return self.runs / "reward_models" / f"{cell.reward_model}-seed{cell.seed}"

    def folder(self, cell: Cell) -> Path:
        return self.runs / cell.name

    def of_run(self, cell: Cell) -> list[str]:
        common = self.common(cell)
        learning_rate = load_config(self.config, common).trainer.optimizer.lr
        options = [
            f"checkpoint.hf_every={max(1, cell.steps // CURVE_POINTS)}",
            f"run_dir={self.folder(cell)}",
        ]
        return [*common, *cell.overrides(learning_rate, penalised=self.learned), *options]

    def prepare(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Makes models, warm starts and reward models, and returns how good the reward models are.

        Wrong settings show before anything starts.
        """

        settings = load_config(self.config, self.overrides)
        judge_of(settings)
        check_settings(self.runs, settings)
        judges = (
            list(
                {(cell.reward_model, cell.seed): _of_reward_model(cell) for cell in cells}.values()
            )
            if self.learned
            else []
        )
        for cell in (*cells, *judges):
            size = SIZES[cell.policy]
            if size is not None:
                write_model(Path(settings.model.path), self.runs / "models" / cell.policy, size)
            load_config(self.config, self.of_run(cell))
        for cell in {(cell.policy, cell.seed): cell for cell in (*cells, *judges)}.values():
            run_megarl(
                "sft",
                self.config,
                [*self.common(cell), f"run_dir={self.initial(cell)}.run"],
                Path(f"{self.initial(cell)}.run"),
            )
        note_settings(self.runs, settings)
        return list(map(self._make_reward_model, judges))

    def _make_reward_model(self, cell: Cell) -> dict[str, Any]:
        """Makes a reward model.

        Returns the share of held-out pairs that it orders rightly, and the share of a plain PyTorch
        run.
        """
        import plain_reward_model as plain

        folder = self.reward_model(cell)
        run_dir = Path(f"{folder}.run")
        path = Path(f"{folder}.run") / RESULT
        overrides = [*self.common(cell), f"run_dir={run_dir}"]
        if not (folder / "config.json").exists():
            run_megarl("reward-model", self.config, overrides, run_dir)
        if not path.exists():
            config = load_config(self.config, overrides)
            facts = {
                "size": cell.reward_model,
                "seed": cell.seed,
                "accuracy": read_metrics(run_dir / "reward_model" / METRICS_FILE)[-1][
                    "eval/accuracy"
                ],
                "accuracy_plain": plain.accuracy(plain.train(config, self.initial(cell)), config),
            }
            write_whole(path, json.dumps(facts))
        return _read(path)

    def result(self, cell: Cell) -> dict[str, Any]:
        """The run's result.

        The run is made if it is not complete. Raises RuntimeError if it fails.
        """
        path = self.folder(cell) / RESULT
        if not path.exists():
            print(cell.name, file=sys.stderr, flush=True)
            run_megarl("train", self.config, self.of_run(cell), self.folder(cell))
            with self.measuring:
                measured = self._found(cell, load_config(self.config, self.of_run(cell)))
            write_whole(path, json.dumps(measured))
            for name in ("checkpoints", "hf"):
                shutil.rmtree(self.folder(cell) / name, ignore_errors=True)
        return _read(path)

    def _found(self, cell: Cell, config: RunConfig) -> dict[str, Any]:
        held_out = held_out_of(config)
        settings: dict[str, Any] = {
            "initial": self.initial(cell),
            "reward_model": self.reward_model(cell) if self.learned else None,
            "held_out": held_out,
            "max_tokens": config.rollout.max_tokens,
            "seed": cell.seed,
        }
        curve = [{"updates": 0, **asdict(measure(self.initial(cell), **settings))}]
        for weights in sorted((self.folder(cell) / "hf").glob("step_*")):
            updates = int(weights.name.removeprefix("step_")) * cell.minibatches
            curve.append({"updates": updates, **asdict(measure(weights, **settings))})
        metrics = read_metrics(self.folder(cell) / METRICS_FILE)
        last = max(1, LAST_SAMPLES // (config.rollout.prompts_per_step * config.rollout.n))
        return {
            **asdict(cell),
            "curve": curve,
            "reward": statistics.fmean(row["reward/mean"] for row in metrics[-last:]),
            "staleness_mean": statistics.fmean(row["staleness/mean"] for row in metrics),
            "step_s": statistics.median(
                row["time/train_s"] + row["time/trainer_wait_s"] for row in metrics
            ),
        }


def run(
    config: str,
    overrides: Sequence[str],
    runs: Path,
    parts: Sequence[str],
    seeds: int,
    lanes: int,
    as_json: bool,
    picture: str | None,
) -> None:
    """Prints tables, or one JSON object.

    `lanes` runs go side by side. Raises ConfigError; RuntimeError, at the end, if runs have failed.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ConfigError(f"--parts {','.join(unknown)}: must be of {', '.join(PARTS)}")
    settings = load_config(config, overrides)
    learned = any(role_of(name, role) == REWARD_MODEL for name, role in roles_of(settings).items())
    if not learned and OF_REWARD_MODELS in parts:
        raise ConfigError(
            f"--parts {OF_REWARD_MODELS}: needs a reward model in `roles`; {config} has none"
        )
    study = Study(config, overrides, runs, learned)
    selected = list(parts or [part for part in PARTS if learned or part != OF_REWARD_MODELS])
    cells = {
        cell.name: cell for seed in range(seeds) for part in selected for cell in PARTS[part](seed)
    }
    reward_models = study.prepare(list(cells.values()))
    results: dict[str, dict[str, Any]] = {}
    failures: list[str] = []

    def make(cell: Cell) -> None:
        try:
            results[cell.name] = study.result(cell)
        except (RuntimeError, OSError) as error:  # one failed run must not end the study
            failures.append(f"{cell.name}: {error}")

    # the outer one catches a second Ctrl-C while the runs end
    with ending_runs(), ThreadPoolExecutor(lanes) as pool, ending_runs():
        list(pool.map(make, cells.values()))
    by_part = {
        part: [
            results[cell.name]
            for seed in range(seeds)
            for cell in PARTS[part](seed)
            if cell.name in results
        ]
        for part in selected
    }
    source = {"config": config, "overrides": list(overrides)}
    facts: Mapping[str, Any] = source | {
        "reward_models": reward_models,
        "parts": by_part,
        "failures": failures,
    }
    print(json.dumps(facts) if as_json else render(facts))
    if picture:
        draw(facts, picture)
    if failures:
        raise RuntimeError(
            f"{len(failures)} runs failed; the same command tries them again\n"
            + "\n".join(failures)
        )


def _of_reward_model(cell: Cell) -> Cell:
    """The policy with which the run's reward model begins."""
    return Cell(
        "online_dpo", policy=cell.reward_model, reward_model=cell.reward_model, seed=cell.seed
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"{path}: is damaged ({error}); remove {path.parent} to make it again"
        ) from error
    return facts


def write_model(shipped: Path, folder: Path, sizes: Mapping[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in shipped.iterdir():
        if file.name != "config.json" and file.is_file():
            shutil.copyfile(file, folder / file.name)
    write_whole(
        folder / "config.json",
        json.dumps(json.loads((shipped / "config.json").read_text()) | sizes, indent=2),
    )
