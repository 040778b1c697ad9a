"""What a run learns from, by contents: hashes of its rows, tokenizer, chat template and own code.

A resumed run compares them.
"""

from __future__ import annotations

import ast
import base64
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.util import resolve_name
from itertools import accumulate
from pathlib import Path
from types import ModuleType

from megarl.base.files import HubAway, write_whole
from megarl.config.errors import ConfigError
from megarl.config.limits import find_module
from megarl.config.schema import RunConfig
from megarl.config.tasks import tasks_of, with_source_keys
from megarl.data.rows import ROW_DIGEST_BYTES
from megarl.rewards.score import trained_parts

FILE = "begun_with_data.json"  # in the folder of the job, beside its checkpoints
ACCEPT = "checkpoint.accept_changed_data"
# Settings whose effect is in the hashes. So the same contents may come from another place.
KEYS = (
    *(
        f"{section}.{name}"
        for section in ("data.train", "data.train.sources.NAME", "sft.data")
        for name in (
            "source",
            "split",
            "subset",
            "prompt_key",
            "prompt_template",
            "answer_key",
            "demonstration_key",
            "learn",
            "size",
        )
    ),
    "model.tokenizer",
    "model.chat_template.name",
    "model.chat_template.arguments",
    *(
        f"{section}{name}"
        for section in ("", "data.train.sources.NAME.")
        for name in ("reward.name", "reward.parts.NAME.name", "rollout.name")
    ),
)


@dataclass(frozen=True)
class Contents:
    """What cannot be read on this machine is None, and is not compared."""

    # config section of each source -> base64 of the digests of its usable rows, in order
    rows: dict[str, str | None]
    tokenizer: str | None
    template: str | None
    # setting -> the name of what is built in, or the hash of the user's own code, and the
    # function's name
    code: dict[str, str]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, json.dumps(asdict(self)))

    def changes(self, now: Contents) -> Iterable[str]:
        """What is otherwise in `now`, one text for each source, tokenizer, template or function."""
        if now.tokenizer not in (None, self.tokenizer):
            yield "the tokenizer differs"
        if now.template not in (None, self.template):
            yield "the chat template or its date differs"
        for key in sorted({*self.code, *now.code}):
            if self.code.get(key) != now.code.get(key):
                yield f"{key}: what it names differs, or a file of your own code behind it"
        for key in sorted({*self.rows, *now.rows}):
            rows = now.rows.get(key, "")
            difference = "" if rows is None else _difference(self.rows.get(key) or "", rows)
            if difference:
                yield f"{key}: {difference}"


def contents_of(config: RunConfig, rows: Mapping[str, bytes | None], rewarded: bool) -> Contents:
    """`rows`: config section of each source that is learned -> the digests of its rows
    (`digests_of`); `rewarded`: whether the job learns from rollouts and their rewards. Raises
    ConfigError if the tokenizer or a function cannot be loaded.
    """
    # not at the top: the kit for a GPU has no tokenizers, and reads checkpoints
    from megarl.data.tokenizer import load_tokenizer

    names = {part.key: part.name for part in trained_parts(config)}
    for source, task in tasks_of(config).items():
        names[with_source_keys("rollout.name", config, source)] = task.rollout.name
    names["algorithm.name"] = config.algorithm.name
    try:
        tokenizer = load_tokenizer(config.model)
    except ConfigError as error:
        if not isinstance(error.__cause__, HubAway):
            raise
        tokenizer = None
    template = asdict(config.model.chat_template)
    if tokenizer and not any("strftime_now" in text for text in tokenizer.chat_templates.values()):
        del template["date"]
    row_digests: dict[str, str | None] = {}
    for key, digests in rows.items():
        row_digests[key] = None if digests is None else base64.b64encode(digests).decode()
    code = {key: _code(name, key) for key, name in names.items()} if rewarded else {}
    if tokenizer is None:
        return Contents(row_digests, None, None, code)
    description = f"{tokenizer.backend.to_str()} {tokenizer.bos_token} {tokenizer.eos_ids}"
    templates = json.dumps([tokenizer.chat_templates, template], sort_keys=True)
    return Contents(row_digests, _digest(description.encode()), _digest(templates.encode()), code)


def read_contents(folder: Path) -> Contents | None:
    """What the job in `folder` began with; None if an earlier version of MegaRL began it.

    Raises ConfigError if the file is damaged.
    """
    try:
        return Contents(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder / FILE}: is damaged ({error}); remove it, and the resumed run compares "
            "paths instead"
        ) from error


def compare_contents(
    before: Contents | None, now: Contents, accept: bool, first_job: str, instead: str
) -> list[str]:
    """Compares what a job goes on with to what it began with. Returns lines for the user.

    Args: first_job, the job that began; instead, what to do but accept. Raises ConfigError that
    names all differences, unless `accept`.
    """
    if before is None:
        return [
            f"Data: it is not known whether the rows are those that {first_job} began with, since "
            "an earlier version began it"
        ]
    changes = [*before.changes(now)]
    if changes and not accept:
        then = f"{instead}, or set {ACCEPT}=true: some prompts are then trained twice or never"
        remedy = f"{first_job[0].upper()}{first_job[1:]} began otherwise: restore that, {then}"
        raise ConfigError([f"{change}. {remedy}" for change in changes])
    consequence = f"{first_job} began otherwise, and goes on as {ACCEPT} allows"
    return [f"Data: {change}; {consequence}" for change in changes]


def _difference(rows_before: str, rows_now: str) -> str:
    """How two lists of digests, each in base64, differ, in words; empty if they do not."""
    before = base64.b64decode(rows_before)
    now = base64.b64decode(rows_now)
    if before == now:
        return ""
    counts = [len(digests) // ROW_DIGEST_BYTES for digests in (before, now)]
    growth = counts[1] - counts[0]
    size = f"{abs(growth):,} row{'s' * (abs(growth) > 1)} {'more' if growth > 0 else 'fewer'}"
    for row in range(min(counts)):
        if _row(before, row) != _row(now, row):
            return f"row {row:,} is the first that differs{f'; {size}' if growth else ''}"
    return f"{size} at the end"


def _row(digests: bytes, row: int) -> bytes:
    return digests[row * ROW_DIGEST_BYTES : (row + 1) * ROW_DIGEST_BYTES]


def _code(name: str, key: str) -> str:
    module_name, colon, function = name.rpartition(":")
    if not colon:
        return name
    files = own_code(find_module(module_name, f"{key}={name}"))
    return f"{_digest(repr(sorted(path.read_bytes() for path in files)).encode())}:{function}"


def own_code(module: ModuleType) -> list[Path]:
    """The files of `module` and of what it imports, also inside functions; not what is installed or
    MegaRL's own.

    Imports are read from the sources, and looked up in sys.path. So nothing is executed, and
    modules whose names are computed are missed.
    """
    if getattr(module, "__file__", None) is None:
        return []
    own_package = module.__name__.partition(".")[0]
    files = {module.__name__: Path(str(module.__file__))}
    known_names = {module.__name__}
    pending = [module.__name__]
    while pending:
        name = pending.pop()
        path = files.get(name) or _own_file(name, own_package)
        if path:
            files[name] = path
            imported = {*_imports(path, name)} - known_names
            known_names |= imported
            pending += imported
    return [*files.values()]


def _own_file(name: str, own_package: str) -> Path | None:
    """The file of a module, unless that is installed, or MegaRL's own.

    `own_package`: the package that counts even if it is installed.
    """
    top = name.partition(".")[0]
    if top in (__name__.partition(".")[0], *sys.builtin_module_names):
        return None
    for folder in sys.path:
        stem = Path(folder, *name.split("."))
        for path in (stem / "__init__.py", stem.with_suffix(".py")):
            if path.is_file():
                is_package = "site-packages" in path.parts or "dist-packages" in path.parts
                is_installed = is_package or path.is_relative_to(sysconfig.get_path("stdlib"))
                return path if top == own_package or not is_installed else None
    return None


def _imports(path: Path, name: str) -> Iterator[str]:
    """The modules that a file names in imports, and their packages.

    `from a import b` gives a.b too, which may be a module.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    try:
        nodes = [*ast.walk(ast.parse(path.read_bytes()))]
    except (SyntaxError, ValueError):  # not Python's source, such as a compiled module
        return
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (f"{node.module}." if node.module else "")
            names += [base + alias.name for alias in node.names]
    for imported in names:
        try:
            absolute = resolve_name(imported, package) if imported.startswith(".") else imported
        except ImportError:  # above the outermost package: it would fail if it were reached
            continue
        yield from accumulate(absolute.split("."), "{}.{}".format)


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
