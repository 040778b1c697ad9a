"""Texts are UTF-8 whatever the locale: every call that opens a text names its encoding."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    file
    for folder in ("megarl", "kernels", "launch", "configs")
    for file in (ROOT / folder).rglob("*.py")
)
# position of `mode` among the arguments, default mode
OPENERS = {
    "open": (1, "r"),
    "fdopen": (1, "r"),
    "NamedTemporaryFile": (0, "w+b"),
    "TemporaryFile": (0, "w+b"),
}
PROCESSES = ("run", "Popen", "check_output")


def opens_text_without_encoding(call: ast.Call) -> bool:
    """Whether `call` reads or writes text in the encoding of the locale.

    Methods named `open` count only if they name a mode.
    """
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in keywords:
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("read_text", "write_text"):
        return True
    if name in PROCESSES:
        return "text" in keywords or "universal_newlines" in keywords
    if name not in OPENERS:
        return False
    position, default = OPENERS[name]
    if name == "open" and isinstance(call.func, ast.Attribute):
        position = 0
        # Path.open; sessions, memories and pools have an `open` of their own
        default = "not a file"
    mode = keywords.get(
        "mode", call.args[position] if len(call.args) > position else ast.Constant(default)
    )
    return (
        isinstance(mode, ast.Constant)
        and isinstance(mode.value, str)
        and re.fullmatch(r"[rwax]\+?t?", mode.value) is not None
    )


@pytest.mark.parametrize(
    ("source", "without"),
    [
        ("path.read_text()", True),
        ("path.write_text(text, encoding='utf-8')", False),
        ("open(path, 'a')", True),
        ("open(path)", True),
        ("open(path, 'rb')", False),
        ("subprocess.run(['a'], text=True)", True),
        ("session.open(version)", False),
    ],
)
def test_call_without_an_encoding_is_seen(source: str, without: bool) -> None:
    call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call)
    assert opens_text_without_encoding(call) == without


def test_every_text_names_its_encoding() -> None:
    calls = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and opens_text_without_encoding(node)
    ]
    assert not calls, "\n".join(calls)


def test_chat_template_is_read_as_utf8_under_an_ascii_locale(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "configs/models/tiny-agent", folder)
    (folder / "chat_template.jinja").write_text(
        "{{ messages[0].content }} «é» 你好", encoding="utf-8"
    )
    code = (
        "import sys; from megarl.data.chat import load_chat_template; from megarl.data.tokenizer "
        "import tokenizer_of; "
        f"template = load_chat_template(tokenizer_of({str(folder)!r}, 'model.path'), "
        "'data.train.prompt_template=chat'); "
        "sys.stdout.buffer.write(template.render([{'role': 'user', 'content': 'Hi'}]).encode())"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, cwd=ROOT, check=True
    )
    assert result.stdout.decode() == "Hi «é» 你好"
