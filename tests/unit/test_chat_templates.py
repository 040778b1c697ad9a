"""Chat templates: rendered as by apply_chat_template of Transformers, with the template and the
arguments that the config names.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from transformers import AutoTokenizer

from megarl.config.errors import ConfigError
from megarl.config.schema import LearnedConfig, ModelConfig
from megarl.data.chat import ChatTemplate, load_chat_template
from megarl.data.datasets import load_rows, read_rows
from megarl.data.prompts import count_tokens
from megarl.data.rows import Reading, Row, RowProblem
from megarl.data.tokenizer import load_tokenizer, tokenizer_of
from megarl.roles.settings import ChatTemplateConfig

TINY = Path(__file__).parents[2] / "configs/models/tiny-llama"
ENDING = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% "
    "endfor %}"
)
OPENED = (
    ENDING + "{% if add_generation_prompt %}assistant: {% if enable_thinking is defined and not "
    "enable_thinking %}#{% endif %}{% endif %}"
)
WITH_TOOLS = "tools {{ tools | tojson }} " + OPENED
CALLING = "{% for message in messages %}{{ message.role }}{{ message.content }}"
CALLING += "{% for call in message.tool_calls %}@{% endfor %}{{ eos_token }}{% endfor %}"
USER = [{"role": "user", "content": "1+1?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ARGUMENTS = {"city": "R\u00f4me", "days": [1, 2], "exact": True}


def folder_with(path: Path, **settings: Any) -> Path:
    folder = shutil.copytree(TINY, path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder


def template_of(folder: Path, **settings: Any) -> ChatTemplate:
    tokenizer = tokenizer_of(str(folder), "model.path", ChatTemplateConfig(**settings))
    return load_chat_template(tokenizer, "x=chat")


@pytest.mark.parametrize(
    ("printed", "texts"),
    [
        (
            "{{ call.function.arguments | tojson }}",
            '{"city": "R\u00f4me", "days": [1, 2], "exact": true}',
        ),
        ("{{ call.function.arguments }}", '{"city": "R\u00f4me", "days": [1, 2], "exact": true}'),
        (
            "{{ call.function.arguments ~ '' }}",
            '{"city": "R\u00f4me", "days": [1, 2], "exact": true}',
        ),
        (
            "{{ '' + call.function.arguments }}",
            '{"city": "R\u00f4me", "days": [1, 2], "exact": true}',
        ),
        (
            "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
            "city=R\u00f4me;days=[1, 2];exact=True;",
        ),
        (
            "{% if call.function.arguments is mapping %}{{ call.function.arguments | length }}{% "
            "endif %}",
            "3",
        ),
    ],
)
def test_arguments_of_calls_are_rendered_as_json(printed: str, texts: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, chat_template=CALLING.replace("@", printed))
    call = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    talk = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rendered = template_of(folder).render(talk, answered=True)
    assert rendered == f"user1+1?<eos>assistant{texts}<eos>"
    json_arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    json_call = {**call, "function": {"name": "weather", "arguments": json_arguments}}
    json_talk = [*USER, {**talk[1], "tool_calls": [json_call]}]
    transformers_tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = []
    for messages in (talk, json_talk):
        try:
            expected.append(transformers_tokenizer.apply_chat_template(messages, tokenize=False))
        except (TypeError, UndefinedError):  # a template of the other form
            expected.append(None)
    assert rendered in expected


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
def test_named_templates_are_those_of_transformers(place: str, tmp_path: Path) -> None:
    named = {"default": OPENED, "tool_use": WITH_TOOLS, "rag": "{{ documents }}" + OPENED}
    if place == "tokenizer_config.json":
        folder = folder_with(
            tmp_path,
            chat_template=[{"name": name, "template": text} for name, text in named.items()],
        )
    else:
        folder = folder_with(tmp_path)
        (folder / "chat_template.jinja").write_text(named.pop("default"))
        (folder / place).mkdir()
        for name, text in named.items():
            (folder / place / f"{name}.jinja").write_text(text)
    transformers_tokenizer = AutoTokenizer.from_pretrained(folder)
    for tools in (None, TOOLS):
        expected = transformers_tokenizer.apply_chat_template(
            USER, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert template_of(folder).render(USER, tools) == expected
        expected = transformers_tokenizer.apply_chat_template(
            USER, tools=tools, tokenize=False, add_generation_prompt=True, chat_template="rag"
        )
        assert template_of(folder, name="rag").render(USER, tools) == expected
    with pytest.raises(
        ConfigError, match="^x=chat: chat_template.name=other: the templates of .* are default, "
    ):
        template_of(folder, name="other")


def test_arguments_of_the_config_reach_the_template(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, chat_template=OPENED)
    model = ModelConfig(
        path=str(folder), chat_template=ChatTemplateConfig(arguments={"enable_thinking": False})
    )
    source = tmp_path / "rows.jsonl"
    source.write_text('{"question": "1+1?", "answer": "2"}\n')
    [row] = load_rows(
        LearnedConfig(source=str(source), prompt_template="chat"), "data.train", 0, model=model
    )
    transformers_tokenizer = AutoTokenizer.from_pretrained(folder)
    text = transformers_tokenizer.apply_chat_template(
        USER, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert row.prompt == text == "user: 1+1?<eos>assistant: #"
    ids = transformers_tokenizer.apply_chat_template(
        USER, add_generation_prompt=True, enable_thinking=False
    ).input_ids
    assert load_tokenizer(model).encode_prompt(row.prompt, row.rendered) == ids
    with pytest.raises(
        ConfigError,
        match="^x=chat: chat_template.arguments.messages: is set for every conversation",
    ):
        template_of(folder, arguments={"messages": []})


def test_rendered_template_gets_no_bos(tmp_path: Path) -> None:
    """As in Transformers: the template writes it, or there is none."""
    for template in (OPENED, "{{ bos_token }}" + OPENED):
        folder = folder_with(tmp_path / str(len(template)), chat_template=template)
        tokenizer = tokenizer_of(str(folder), "model.path")
        text = load_chat_template(tokenizer, "x=chat").render(USER)
        ids = (
            AutoTokenizer.from_pretrained(folder)
            .apply_chat_template(USER, add_generation_prompt=True)
            .input_ids
        )
        assert tokenizer.encode_prompt(text, rendered=True) == ids


def test_prompt_with_a_second_bos_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(str(TINY), "model.path")
    with pytest.raises(
        RowProblem, match="^the prompt begins with <bos>, which the tokenizer adds by itself"
    ):
        count_tokens(Row("<bos>1+1=", "", "", ""), tokenizer, 64, "")
    assert count_tokens(Row("<bos>1+1=", "", "", "", rendered=True), tokenizer, 64, "") == 5


@pytest.mark.parametrize(
    ("end", "remark"),
    [
        ("{{ eos_token }}", ""),
        (
            "<pad>",
            "the chat template ends the assistant's turns with '<pad>', which is no end-of-text "
            "token",
        ),
    ],
)
def test_turns_without_end_of_text_get_a_remark(end: str, remark: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"question": "1+1?", "answer": "2"}\n')
    folder = folder_with(tmp_path, chat_template=OPENED.replace("{{ eos_token }}", end))
    data = LearnedConfig(source=str(source), prompt_template="chat")
    reading = Reading()
    read_rows(data, "data.train", 0, "final", ModelConfig(path=str(folder)), reading)
    assert reading.remark.startswith(remark) and bool(reading.remark) == bool(remark)


def test_date_in_a_template_may_be_set(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, chat_template="{{ date_string | default(strftime_now('%d %b %Y')) }}" + OPENED
    )
    template = template_of(folder, arguments={"date_string": "26 Jul 2024"})
    assert template.render(USER).startswith("26 Jul 2024user: ")


def test_error_of_the_hub_is_not_blamed_on_the_template(hub_offline: None, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"question": "1+1?", "answer": "2"}\n')
    with pytest.raises(ConfigError) as error:
        load_rows(
            LearnedConfig(source=str(source), prompt_template="chat"),
            "data.train",
            0,
            model=ModelConfig(path="owner/none"),
        )
    assert error.value.problems == [
        "model.path=owner/none: it is not in the hub's cache, and HF_HUB_OFFLINE is set"
    ]
