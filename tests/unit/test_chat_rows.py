"""Rows in the formats of OpenAI, verl and slime; tools; and the learned parts of a conversation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from json_files import write_json_lines
from transformers import AutoTokenizer

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import LearnedConfig, ModelConfig
from megarl.data.batches import sft_sequence
from megarl.data.datasets import answers_of, load_rows
from megarl.data.rows import Answers, Row
from megarl.data.tokenizer import tokenizer_of

TINY = Path(__file__).parents[2] / "configs/models/tiny-llama"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
HEAD = (
    "{% if tools %}#tools {{ tools | tojson }}\n{% endif %}{% for message in messages %}#{{ "
    "message.role }}\n"
)
CALLS = (
    "{% for call in message.tool_calls %}<call>{{ call.function.name }} a={{ "
    "call.function.arguments.a }}{% endfor %}"
)
TAIL = "\n{% endfor %}{% if add_generation_prompt %}#assistant\n{% endif %}"
PLAIN = HEAD + "{{ message.content }}" + CALLS + "{{ eos_token }}" + TAIL
MARKED = (
    HEAD
    + "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    + CALLS
    + "{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{{ eos_token }}{% endif %}"
    + TAIL
)
SHORT = MARKED.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}")
# Like Qwen3's and Nemotron 3's templates, which leave thinking out of turns before the last.
FORGETTING = (
    "{{ message.content }}",
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}",
)
FORGETFUL = PLAIN.replace(*FORGETTING)


def say(role: str, content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


TALK = [
    say("system", "be brief"),
    say("user", "1+1?"),
    say("assistant", "2"),
    say("user", "2*3?"),
    say("assistant", "<think>6</think>6"),
]
CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL_TALK = [
    say("user", "1+1?"),
    say("assistant", None, tool_calls=[CALL]),
    say("tool", "2", tool_call_id="1"),
    say("assistant", "it is 2"),
]


def model(folder: Path, template: str = PLAIN) -> str:
    shutil.copytree(TINY, folder / "model", dirs_exist_ok=True)
    (folder / "model/chat_template.jinja").write_text(template)
    return str(folder / "model")


def write(path: Path, *rows: Any) -> str:
    write_json_lines(path, rows)
    return str(path)


def load(
    tmp_path: Path, row: Any, answers: Answers = "none", template: str = PLAIN, **settings: Any
) -> Row:
    source = write(tmp_path / "rows.jsonl", row)
    (loaded,) = load_rows(
        LearnedConfig(source=source, **settings),
        "data.train",
        0,
        answers,
        ModelConfig(path=model(tmp_path, template)),
    )
    return loaded


def problem(
    tmp_path: Path, row: Any, answers: Answers = "none", template: str = PLAIN, **settings: Any
) -> str:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, row, answers, template, **settings)
    (message,) = error.value.problems
    assert message.startswith(f"{tmp_path}/rows.jsonl, line 1: ")
    return message.removeprefix(f"{tmp_path}/rows.jsonl, line 1: ")


def learned(row: Row) -> list[str]:
    """The learned texts of a row's sequence."""
    tokenizer = tokenizer_of(str(TINY), "model.path")
    sequence = sft_sequence(row, tokenizer, 4096)
    edges = np.flatnonzero(
        np.diff(np.concatenate([[False], sequence.loss_mask, [False]]).astype(int))
    )
    return [
        tokenizer.decode_all(sequence.token_ids[first:end].tolist())
        for first, end in edges.reshape(-1, 2)
    ]


@pytest.mark.parametrize("template", [PLAIN, MARKED, SHORT])
def test_turns_are_learned_with_their_ends(template: str, tmp_path: Path) -> None:
    """Whether the template marks them or not."""
    row = load(tmp_path, {"messages": TALK}, template=template)
    assert learned(row) == ["2<eos>", "<think>6</think>6<eos>"]
    assert learned(load(tmp_path, {"messages": TALK}, template=template, learn="last")) == [
        "<think>6</think>6<eos>"
    ]
    for skipped in ({"weight": 0}, {"train": False}):
        unequal = [*TALK[:2], {**TALK[2], **skipped}, *TALK[3:]]
        assert learned(load(tmp_path, {"messages": unequal}, template=template)) == [
            "<think>6</think>6<eos>"
        ]
    row = load(tmp_path, {"messages": TOOL_TALK, "tools": TOOLS}, template=template)
    assert learned(row) == ["<call>add a=1<eos>", "it is 2<eos>"]
    assert row.prompt.startswith("#tools [{")
    as_json = {"messages": TOOL_TALK, "tools": json.dumps(TOOLS)}
    assert load(tmp_path, as_json, template=template) == row


def test_templates_of_several_kinds(tmp_path: Path) -> None:
    """Traits of real templates: marks cut in two (Gemma 4), an end-of-text after the whole (Phi 3),
    arguments as JSON (DeepSeek V3).
    """
    cut = MARKED.replace(
        "{{ eos_token }}{% endgeneration %}",
        "{% endgeneration %}{% generation %}{{ eos_token }}{% endgeneration %}",
    )
    end_of_text = PLAIN + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    for template in (cut, end_of_text):
        row = load(tmp_path, {"messages": TALK}, template=template)
        assert learned(row) == ["2<eos>", "<think>6</think>6<eos>"]
    as_text = PLAIN.replace(
        "a={{ call.function.arguments.a }}", "{{ '' + call.function.arguments }}"
    )
    row = load(tmp_path, {"messages": TOOL_TALK}, template=as_text)
    assert row.demonstration[0] == '<call>add {"a": 1}<eos>'


def test_marked_header_of_a_turn_is_not_learned(tmp_path: Path) -> None:
    """Only tokens that a rollout would sample are learned: not the header, nor the opening of the
    thinking, which is part of the prompt.
    """
    around = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation "
        "%}#assistant\n{{ message.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}#{{ message.role }}\n{{ message.content }}{{ eos_token }}{% "
        "endif %}" + TAIL
    )
    row = load(tmp_path, {"messages": TALK}, template=around)
    assert learned(row) == ["2<eos>", "<think>6</think>6<eos>"]
    opened = MARKED.replace("#assistant\n{% endif %}", "#assistant\n<think>{% endif %}")
    row = load(tmp_path, {"messages": TALK}, template=opened)
    assert learned(row) == ["2<eos>", "6</think>6<eos>"]


def test_empty_turn_is_not_learned(tmp_path: Path) -> None:
    empty = [*TALK[:2], say("assistant", " \n"), *TALK[3:]]
    for template in (PLAIN, MARKED):
        assert problem(tmp_path, {"messages": empty}, template=template) == (
            "field 'messages': message 3: it is empty: the model would learn to stop at once; "
            '"weight": 0 leaves it out'
        )
        skipped = [*empty[:2], {**empty[2], "weight": 0}, *empty[3:]]
        assert learned(load(tmp_path, {"messages": skipped}, template=template)) == [
            "<think>6</think>6<eos>"
        ]
    assert learned(load(tmp_path, {"messages": TOOL_TALK}))[0] == "<call>add a=1<eos>", (
        "a call is not nothing"
    )


def test_conversation_may_begin_with_the_assistant(tmp_path: Path) -> None:
    """Qwen 3.5's template refuses conversations without a user's message."""
    refusal = "{{ raise_exception('No user query') }}"
    strict = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        + refusal
        + "{% endif %}"
        + MARKED
    )
    greeting = [say("assistant", "hi"), *TALK[1:3]]
    for template in (MARKED, PLAIN, strict):
        assert learned(load(tmp_path, {"messages": greeting}, template=template)) == [
            "hi<eos>",
            "2<eos>",
        ]
    rewriting = strict.replace(
        "{% generation %}{{ message.content }}",
        "{% generation %}{{ message.content }}{{ messages | length }}",
    )
    message = problem(tmp_path, {"messages": greeting}, template=rewriting)
    assert message.startswith(
        "field 'messages': message 1: the chat template changes this turn, or text before it"
    )


def test_messages_left_out_by_a_template_are_refused(tmp_path: Path) -> None:
    assert problem(tmp_path, {"messages": TOOL_TALK}, template=PLAIN.replace(CALLS, "")) == (
        "field 'messages': message 2: the chat template leaves out the call of 'add'"
    )
    assert problem(
        tmp_path,
        {"messages": TALK},
        template=PLAIN.replace("{{ message.content }}", "{{ message.content[0].text }}"),
    ) == ("field 'messages': message 1: the chat template leaves out what it says, up to 'brief'")
    quoting = PLAIN.replace(
        "{{ message.content }}",
        "{{ message.content | tojson if message.role == 'tool' else message.content }}",
    )
    quoted = [*TOOL_TALK[:2], say("tool", '{"sum": "2"}'), TOOL_TALK[3]]
    assert learned(load(tmp_path, {"messages": quoted}, template=quoting))[1] == "it is 2<eos>"


def test_tokens_and_masks_are_those_of_transformers(tmp_path: Path) -> None:
    path = model(tmp_path, MARKED)
    reference = AutoTokenizer.from_pretrained(path, local_files_only=True)
    for talk, tools in (
        (TALK, None),
        (
            [{**TOOL_TALK[0]}, say("assistant", "2"), say("user", "9?"), say("assistant", "9")],
            TOOLS,
        ),
    ):
        expected = reference.apply_chat_template(
            talk, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        sequence = sft_sequence(
            load(tmp_path, {"messages": talk, "tools": tools}, template=MARKED),
            tokenizer_of(path, "model.path"),
            4096,
        )
        # the template adds a newline after the last turn, which is not learned
        count = len(sequence)
        mask = expected["assistant_masks"]
        assert sequence.token_ids.tolist() == expected["input_ids"][:count]
        assert sequence.loss_mask.tolist() == list(map(bool, mask[:count]))
        assert not any(mask[count:])


def test_template_that_rewrites_turns_needs_learn_last(tmp_path: Path) -> None:
    talk = [say("user", "1?"), say("assistant", "<think>x</think>1"), *TALK[3:]]
    assert problem(tmp_path, {"messages": talk}, template=FORGETFUL) == (
        "field 'messages': message 2: the chat template does not show which text the assistant "
        "wrote: it changes this turn, or text before "
        "it, when more messages follow; with learn=last only the last turn is learned"
    )
    row = load(tmp_path, {"messages": talk}, template=FORGETFUL, learn="last")
    assert learned(row) == ["<think>6</think>6<eos>"] and "#assistant\n1<eos>" in row.prompt
    assert problem(tmp_path, {"messages": talk}, template=MARKED.replace(*FORGETTING)) == (
        "field 'messages': message 2: the chat template changes this turn, or text before it, "
        "when more messages follow; with learn=last "
        "only the last turn is learned"
    )
    assert learned(
        load(tmp_path, {"messages": talk}, template=MARKED.replace(*FORGETTING), learn="last")
    ) == ["<think>6</think>6<eos>"]
    forced = PLAIN.replace("#assistant\n{% endif %}", "#assistant\n<think>{% endif %}")
    assert (
        "the prompt that it makes for this turn is not the beginning of the conversation"
        in problem(tmp_path, {"messages": TALK[:3]}, template=forced)
    )


def test_thinking_left_out_by_a_template_is_refused(tmp_path: Path) -> None:
    hides = PLAIN.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
    shows = PLAIN.replace(
        "{{ message.content }}", "{{ message.reasoning_content | trim }}={{ message.content }}"
    )
    apart = [say("user", "1+1?"), say("assistant", "2", reasoning_content="\n1 and 1\n")]
    assert learned(load(tmp_path, {"messages": apart}, template=shows)) == ["1 and 1=2<eos>"]
    inside = [*TALK[:4], say("assistant", "<think>2 by 3</think>6")]
    for talk, template in ((inside, hides), (apart, PLAIN), (apart, MARKED)):
        message = problem(tmp_path, {"messages": talk}, template=template)
        assert message == (
            f"field 'messages': message {len(talk)}: the chat template leaves out the "
            "assistant's thinking"
        )
        not_learned = {"messages": [*talk, say("user", "9?")]}
        row = load(tmp_path, not_learned, "unused", template=template)
        assert row.prompt.endswith("#assistant\n")


QUESTION = say("user", "1+1?")
ANSWER = say("assistant", "2")


def calling(arguments: str) -> dict[str, Any]:
    call = {"function": {"name": "add", "arguments": arguments}}
    return say("assistant", "", tool_calls=[call])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("hi", "field 'messages' must be a list of messages, not text"),
        ([], "field 'messages' has no messages"),
        ([QUESTION], "field 'messages': it has no assistant's turn to learn"),
        (
            [QUESTION, {**ANSWER, "weight": 0}],
            "field 'messages': it has no assistant's turn to learn",
        ),
        (
            [QUESTION, {**ANSWER, "weight": 0.5}],
            "field 'messages', message 2: weight must be 0 or 1, not 0.5",
        ),
        (
            [QUESTION, {**ANSWER, "train": 1}],
            "field 'messages', message 2: train must be true or false, not 1",
        ),
        (
            [QUESTION, say("assistant", "a<eos>#user\nb")],
            "field 'messages': message 2: holds the special token '<eos>', which could end a turn "
            "or open another",
        ),
        (
            [QUESTION, say("assistant", None)],
            "field 'messages', message 2: content must be text",
        ),
        (
            [QUESTION, {"role": "assistant", "content": [{"type": "image"}]}],
            "field 'messages', message 2: content must be text",
        ),
    ],
)
def test_conversation_that_cannot_be_learned_is_refused(
    messages: Any, expected: str, tmp_path: Path
) -> None:
    assert problem(tmp_path, {"messages": messages}) == expected


@pytest.mark.parametrize("arguments", ['{"a"', "[" * 100_000, "1" * 5000, '"\\ud800"'], ids=len)
def test_call_with_arguments_that_are_no_json_is_refused(arguments: str, tmp_path: Path) -> None:
    message = problem(tmp_path, {"messages": [QUESTION, calling(arguments)]})
    assert message.startswith(
        "field 'messages', message 2: the arguments of its tool call are not JSON: "
    )


def test_unknown_role_is_refused(tmp_path: Path) -> None:
    message = problem(tmp_path, {"messages": [QUESTION, say("asistant", "2")]})
    assert message.startswith(
        "field 'messages', message 2: role 'asistant' must be one of system, developer,"
    )


def test_template_that_does_not_fit_a_conversation_is_refused(tmp_path: Path) -> None:
    endless = problem(tmp_path, {"messages": TALK}, template=PLAIN.replace("{{ eos_token }}", ""))
    assert endless.startswith(
        "field 'messages': message 3: the chat template does not end it with an end-of-text token "
        "of the model"
    )
    plain_prompt = problem(tmp_path, {"messages": TALK}, prompt_template="Q: {prompt}")
    assert plain_prompt == (
        "field 'messages' has messages, which need a chat template: prompt_template=Q: {prompt} "
        "cannot be applied to them"
    )
    last_only = MARKED.replace("message.role == 'assistant'", "loop.last")
    assert problem(tmp_path, {"messages": TALK}, template=last_only) == (
        "field 'messages': the chat template marks 1 turns of the assistant; the conversation has 2"
    )


def test_tools_that_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    without_tools = PLAIN.replace("tools", "nothing")
    assert problem(tmp_path, {"messages": TALK, "tools": TOOLS}, template=without_tools) == (
        "field 'tools' has tools, but the model's chat template shows none"
    )
    special = [{"type": "function", "function": {"name": "add", "description": "<eos>"}}]
    assert problem(tmp_path, {"messages": TALK, "tools": special}) == (
        "field 'messages': tool 1: holds the special token '<eos>', which could end a turn or "
        "open another"
    )
    assert problem(tmp_path, {"messages": TALK, "tools": "add"}).startswith(
        "field 'tools' is neither a list of tools nor JSON of one"
    )


def test_parts_of_contents_and_nulls_of_parquet(tmp_path: Path) -> None:
    talk = [
        say("user", [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]),
        say("assistant", "2", weight=1),
    ]
    assert "#user\n1+1?<eos>" in load(tmp_path, {"messages": talk}).prompt
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(
            [{"messages": [say("user", "9?"), say("assistant", "9", weight=1)]}]
        ),
        path,
    )
    (row,) = load_rows(
        LearnedConfig(source=str(path)), "sft.data", 0, "none", ModelConfig(path=model(tmp_path))
    )
    assert learned(row) == ["9<eos>"]


def of_city(unit: str | None, **properties: Any) -> dict[str, Any]:
    """A row with a tool of these properties, and a call of it with a null inside JSON."""
    properties = {"a": {"type": "number"}, **properties}
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": properties}},
    }
    call = {
        "type": "function",
        "id": "1",
        "function": {"name": "add", "arguments": json.dumps({"a": 1, "unit": unit})},
    }
    talk = [
        say("user", "1+1?"),
        say("assistant", None, tool_calls=[call]),
        say("tool", "2", tool_call_id="1"),
        say("assistant", "2"),
    ]
    return {"messages": talk, "tools": [tool]}


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_tools_of_arrow_rows_are_those_of_json_rows(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [
        of_city(None, zone={"type": "string"}),
        of_city("C", day={"type": "string", "enum": ["a"]}),
    ]
    in_json = write(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "rows").mkdir()
    source = tmp_path / "rows/train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    assert "null" in json.dumps(pyarrow.parquet.read_table(source).to_pylist())
    template = model(
        tmp_path, PLAIN.replace("call.function.arguments.a", "call.function.arguments | tojson")
    )
    texts = []
    for path in (in_json, str(source if kind == "parquet" else source.parent)):
        loaded = load_rows(
            LearnedConfig(source=path), "data.train", 0, "none", ModelConfig(path=template)
        )
        texts.append([(row.prompt, row.demonstration) for row in loaded])
    assert texts[0] == texts[1]
    assert '"unit": null' in texts[1][0][1][0] and '"zone"' not in texts[1][1][0]


def test_answers_of_arrow_rows_are_those_of_json_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1", "label": {"city": "Rome"}},
        {"prompt": "2", "label": {"zone": [1, None]}},
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    loaded = load_rows(LearnedConfig(source=str(path)), "data.train", 0, "whole")
    assert [json.loads(row.answer) for row in loaded] == [row["label"] for row in rows]
    assert loaded[0].record == {"prompt": "1", "label": {"city": "Rome", "zone": None}}


@pytest.mark.parametrize("reward", ["math", "none"])
def test_rollout_by_name_has_row_and_answer(reward: str, tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": "2", "board": [1, 2]}
    write(tmp_path / "rows.jsonl", row)
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {train: {source: ./rows.jsonl}}\n")
    built_in = load_config(file, [f"reward.name={reward}"])
    by_name = load_config(file, [f"reward.name={reward}", "rollout.name=games:play"])
    loaded = load(tmp_path, row, answers_of(by_name))
    assert (loaded.answer, loaded.record) == ("2", row)
    assert load(tmp_path, row, answers_of(built_in)).record == {}


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [say("user", "1+1?")],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
}
SLIME = {"prompt": [say("user", "1+1?")], "label": "2", "metadata": {"level": 1}}


@pytest.mark.parametrize(
    "row",
    [
        VERL,
        SLIME,
        {"messages": [say("user", "1+1?")], "answer": "2"},
        {"messages": [say("user", "1+1?"), say("assistant", "2", weight=1)]},
        {"messages": [say("user", "1+1?"), say("assistant", "so 2")], "answer": "2"},
        {"question": "1+1?", "answer": "#### 2"},
        {**SLIME, "prompt": "1+1?"},
    ],
)
def test_prompts_in_known_formats(row: dict[str, Any], tmp_path: Path) -> None:
    prompt = "1+1?"
    if isinstance(row.get("prompt", row.get("messages")), list):
        prompt = "#user\n1+1?<eos>\n#assistant\n"
    with_final_answer = load(tmp_path, row, "final")
    assert (with_final_answer.prompt, with_final_answer.answer) == (prompt, "2")
    with_whole_row = load(tmp_path, row, "whole")
    assert (with_whole_row.prompt, with_whole_row.record) == (prompt, row)


def test_prompts_with_tools(tmp_path: Path) -> None:
    assert load(tmp_path, {**VERL, "tools": TOOLS}, "final").prompt.startswith("#tools [{")


def test_row_of_two_formats_is_refused(tmp_path: Path) -> None:
    assert problem(tmp_path, {**VERL, "label": "2"}, "final") == (
        "it has the columns 'prompt' with 'reward_model' (verl's) and 'prompt' with 'label' "
        "(slime's): set data.train.prompt_key and "
        "data.train.answer_key"
    )
    assert "'question' (question and answer) and 'messages' (OpenAI's)" in problem(
        tmp_path, {"question": "1", "messages": TALK}, "final"
    )
    assert (
        load(
            tmp_path, {**VERL, "label": "3"}, "final", prompt_key="prompt", answer_key="label"
        ).answer
        == "3"
    )
    assert problem(
        tmp_path, {"messages": TALK}, "final", prompt_key="messages", answer_key="messages"
    ) == ("field 'messages': the last message is the assistant's, so there is nothing to answer")
    assert problem(tmp_path, {"messages": TALK[:2]}, "final") == (
        "field 'messages': the last message is not the assistant's answer, and there is no column "
        "'answer'"
    )


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", VERL)
    with pytest.raises(ConfigError) as error:
        load_rows(
            LearnedConfig(source=source), "data.train", 0, "final", ModelConfig(path=str(TINY))
        )
    assert error.value.problems == [
        f"data.train.source={source}: {TINY} has no chat template; its rows have messages, which "
        "need one"
    ]
