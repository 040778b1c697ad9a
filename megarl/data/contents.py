"""What a run learns from, by contents: hashes of its rows, tokenizer, chat template and reward functions. A resumed run compares them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from megarl.base.files import write_whole
from megarl.config.errors import ConfigError
from megarl.config.limits import find_module
from megarl.config.schema import RunConfig
from megarl.data.rows import ROW_DIGEST_BYTES
from megarl.rewards.score import Part

FILE = "begun_with_data.json"  # in the folder of the job, beside its checkpoints
ACCEPT = "checkpoint.accept_changed_data"
# Settings whose effect is in the hashes. So the same contents may come from another place.
KEYS = (
    *(
        f"data.train.{source}{name}"
        for source in ("", "sources.NAME.")
        for name in ("source", "split", "subset", "prompt_key", "prompt_template", "answer_key", "demonstration_key", "learn", "size")
    ),
    "model.tokenizer",
    "model.chat_template.name",
    "model.chat_template.arguments",
    "reward.name",
    "reward.parts.NAME.name",
)


@dataclass(frozen=True)
class Contents:
    rows: dict[str, str]  # config section of each source -> base64 of the digests of its usable rows, in order
    tokenizer: str
    template: str
    rewards: dict[str, str]  # setting -> the built-in reward's name, or the hash of the own function's file, and its name

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, json.dumps(asdict(self)))

    def changes(self, now: Contents) -> Iterable[str]:
        """What is otherwise in `now`, one text for each source, tokenizer, template or reward."""
        if now.tokenizer != self.tokenizer:
            yield "the tokenizer differs"
        if now.template != self.template:
            yield "the chat template differs"
        for key in sorted({*self.rewards, *now.rewards}):
            if self.rewards.get(key) != now.rewards.get(key):
                yield f"{key}: the reward or the file of its function differs"
        for key in sorted({*self.rows, *now.rows}):
            if found := _difference(_digests(self.rows, key), _digests(now.rows, key)):
                yield f"{key}: {found}"


def contents_of(config: RunConfig, rows: Mapping[str, bytes], rewards: Sequence[Part]) -> Contents:
    """`rows`: config section of each source that is learned -> the digests of its rows (`digests_of`); `rewards`: parts of the
    reward that the job learns from. Raises ConfigError if the tokenizer or a function cannot be loaded."""
    from megarl.data.tokenizer import load_tokenizer  # not at the top: the kit for a GPU has no tokenizers, and reads checkpoints

    tokenizer = load_tokenizer(config.model)
    template = json.dumps([tokenizer.chat_templates, asdict(config.model.chat_template)], sort_keys=True)
    return Contents(
        rows={key: base64.b64encode(digests).decode() for key, digests in rows.items()},
        tokenizer=_digest(f"{tokenizer.backend.to_str()} {tokenizer.bos_token} {tokenizer.eos_ids}".encode()),
        template=_digest(template.encode()),
        rewards={part.setting.partition("=")[0]: _reward(part.name) for part in rewards},
    )


def read_contents(folder: Path) -> Contents | None:
    """What the job in `folder` began with; None if an earlier version of MegaRL began it. Raises ConfigError if the file is damaged."""
    try:
        return Contents(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder / FILE}: is damaged ({error}); remove it, and the resumed run compares paths instead") from error


def keep_contents(folder: Path, resumed: bool, now: Contents, accept: bool) -> list[str]:
    """Records what a job begins with, or compares it with what the resumed job began with. Returns lines for the user.

    Raises ConfigError that names all differences, unless they are to be accepted.
    """
    before = read_contents(folder) if resumed else None
    changes = [] if before is None else [*before.changes(now)]
    if changes and not accept:
        then = f"restore that, use another run_dir, or set {ACCEPT}=true: some prompts are then trained twice or never"
        raise ConfigError([f"{change}. The run in {folder} began otherwise: {then}" for change in changes])
    if before != now:
        now.write(folder)
    if resumed and before is None:
        return ["Data: it is not known whether the rows are those that the run began with, since an earlier version began it"]
    return [f"Data: {change}; the run began otherwise, and goes on as {ACCEPT} allows" for change in changes]


def _difference(before: bytes, now: bytes) -> str:
    """How two lists of digests differ, in words; empty if they do not."""
    if before == now:
        return ""
    counts = [len(digests) // ROW_DIGEST_BYTES for digests in (before, now)]
    more = counts[1] - counts[0]
    size = f"{abs(more):,} row{'s' * (abs(more) > 1)} {'more' if more > 0 else 'fewer'}"
    same = next((row for row in range(min(counts)) if _row(before, row) != _row(now, row)), min(counts))
    if same == min(counts):
        return f"{size} at the end"
    return f"row {same:,} is the first that differs{f'; {size}' if more else ''}"


def _row(digests: bytes, row: int) -> bytes:
    return digests[row * ROW_DIGEST_BYTES : (row + 1) * ROW_DIGEST_BYTES]


def _digests(rows: Mapping[str, str], key: str) -> bytes:
    return base64.b64decode(rows.get(key, ""))


def _reward(name: str) -> str:
    module, colon, function = name.rpartition(":")
    if not colon:
        return name
    file = find_module(module, f"reward.name={name}").__file__
    return f"{_digest(Path(file).read_bytes()) if file else module}:{function}"


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
