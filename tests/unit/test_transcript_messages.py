"""Turns of a chat model in a transcript: the ids are those of the rendered conversation, and the
template's tokens are masked.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.base.rollout_types import Prompt
from megarl.data.chat import load_chat_template
from megarl.data.tokenizer import Tokenizer, tokenizer_of
from megarl.generator.completions import Completion
from megarl.rollouts.environments.base import Transcript

MODELS = Path(__file__).parents[2] / "configs/models"
CHATML = """{% for message in messages %}<bos>{{ message.role }}
{% if message.role == 'assistant' and loop.last %}[thought]{% endif %}{{ message.content }}<eos>
{% endfor %}{% if add_generation_prompt %}<bos>assistant
{% endif %}"""
ASKED = [{"role": "user", "content": "1+1?"}]
MORE = [{"role": "user", "content": "And 2+2?"}]


@pytest.fixture(params=["chatml", "agent"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "agent":
        return str(MODELS / "tiny-agent")
    folder = shutil.copytree(MODELS / "tiny-llama", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(CHATML)
    return str(folder)


def begun(source: str, answer: str, ended: bool) -> Transcript:
    """A transcript after the policy's first turn."""
    tokenizer = tokenizer_of(source, "model.path")
    text = load_chat_template(tokenizer_of(source, "model.path"), "model.path").render(ASKED)
    transcript = Transcript(
        Prompt(0, tokenizer.encode_prompt(text), text, "2"), tokenizer, max_tokens=200
    )
    say(transcript, tokenizer, answer, ended)
    return transcript


def say(transcript: Transcript, tokenizer: Tokenizer, answer: str, ended: bool) -> None:
    ids = tokenizer.encode_text(answer) + [tokenizer.eos_id] * ended
    transcript.add_policy(
        Completion(ids, [-1.0] * len(ids), [1] * len(ids), "stop" if ended else "length")
    )


@pytest.mark.parametrize("ended", [True, False])
def test_framed_turns_are_the_rendered_conversation(source: str, ended: bool) -> None:
    transcript = begun(source, "2", ended)
    assert transcript.turn_ended == ended
    assert transcript.add_messages(MORE)
    rendered = load_chat_template(tokenizer_of(source, "model.path"), "model.path").render(
        [*ASKED, {"role": "assistant", "content": "2"}, *MORE]
    )
    assert transcript.token_ids == transcript.tokenizer.encode_prompt(rendered)
    say(transcript, transcript.tokenizer, "4", ended=True)
    sample = transcript.sample(1.0)
    learned = [token for token, of_policy in zip(sample.token_ids, sample.policy_mask) if of_policy]
    tokenizer = transcript.tokenizer
    assert learned == [
        *tokenizer.encode_text("2"),
        *[tokenizer.eos_id] * ended,
        *tokenizer.encode_text("4"),
        tokenizer.eos_id,
    ]


def test_text_of_a_message_cannot_end_a_turn(source: str) -> None:
    transcript = begun(source, "2", ended=True)
    before = transcript.token_ids
    assert transcript.add_messages([{"role": "user", "content": "no <eos> yet"}])
    added = transcript.token_ids[len(before) :]
    plain = begun(source, "2", ended=True)
    assert plain.add_messages(MORE)
    eos = transcript.tokenizer.eos_id
    assert added.count(eos) == plain.token_ids[len(before) :].count(eos)
    assert "no <eos> yet" in transcript.tokenizer.decode_all(added)


def test_results_of_tools_are_framed(source: str) -> None:
    transcript = begun(source, "2", ended=True)
    assert transcript.add_messages([{"role": "tool", "content": "42"}])
    text = transcript.tokenizer.decode_all(transcript.token_ids)
    assert "42" in text
    assert text.count("1+1?") == 1
    assert text.rstrip().rstrip(">").endswith("assistant")


def test_template_without_ends_of_turns_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(MODELS / "tiny-llama", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    )
    with pytest.raises(ValueError, match="does not end the assistant's turn"):
        begun(str(folder), "2", ended=True).add_messages(MORE)
