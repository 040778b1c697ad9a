"""The verifier: correct answers in the forms that people and models use, refused hostile answers,
and the fast path against SymPy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.config.schema import RewardConfig
from megarl.rewards.answers import (
    AnswerRefused,
    check_characters,
    check_text,
    plain_equal,
    plain_number,
)
from megarl.rewards.extract import (
    MAX_TEXT_CHARS,
    after_thinking,
    answer_forms,
    chosen_letter,
    final_part,
    last_number,
    last_running_number,
    marked_answer,
)
from megarl.rewards.pool import RewardPool
from megarl.rewards.score import Score, ScoreRequest
from megarl.rewards.verify import VERIFIERS, last_number_reward, math_reward, vote

logging.getLogger("math_verify").setLevel(logging.ERROR)

RIGHT = [
    ("42", "42"),
    ("42.0", "42"),
    ("The answer is 42.", "42"),
    ("6 * 7 = 42\n#### 42", "42"),
    (r"Hence $\boxed{42}$.", "42"),
    ("#### 1,234", "1234"),
    ("It costs $1,234.50", "1234.5"),
    ("The answer is 18 dollars.", "18"),
    ("**Answer:** $18", "18"),
    ("-3", "\N{MINUS SIGN}3"),
    ("0.5", "1/2"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{\frac12}", r"\dfrac{2}{4}"),
    (r"\boxed{0.333333}", r"\frac{1}{3}"),
    (r"\boxed{50\%}", "0.5"),
    ("50%", "0.5"),
    ("50%", "50"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{x = 5}", "5"),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}"),
    (r"first \boxed{1}, then \boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt3}{2}"),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
    (r"\boxed{90^\circ}", "90"),
    ("2*x + x", "3x"),
    ("So we get 7, 8 and finally 9", "9"),
    ("1/3 + 1/6", "0.5"),
]

WRONG = [
    ("41", "42"),
    ("", "42"),
    ("no number", "42"),
    (r"\boxed{}", "42"),
    (r"\boxed{42", "42"),
    (r"\boxed{41} or 42", "42"),
    ("#### ", "42"),
    ("1/3", "0.5"),
    (r"\boxed{x+1}", "x-1"),
    ("142", "42"),
    ("0.42", "42"),
    ("1,042", "42"),
    ("5%", "50"),
    (r"\boxed{1,2}", "(2,1)"),
    ("1/0", "42"),
]

HOSTILE = [
    "9**9**9**9",
    "10**10**10",
    "factorial(10**9)",
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{(10^9)!}",
    r"\boxed{1000000!}",
    r"\boxed{((99!)!)!}",
    r"\boxed{\binom{1000000000}{500000000}}",
    r"\boxed{\frac{1}{10^{10^{10}}}}",
    r"\boxed{\sum_{n=1}^{10^9} n}",
    r"\boxed{(x+y+z)^{9999}}",
    r"\boxed{10^{99999999}}",
    "[" * 10_000 + "1" + "]" * 10_000,
    r"\boxed{" + "(" * 200 + "1" + ")" * 200 + "}",
    r"\boxed{" + r"\frac{1}{" * 40 + "1" + "}" * 40 + "}",
    r"\boxed{" + r"\frac" * 90 + "12}",
    r"\boxed{" + "x^" * 200 + "2}",
    r"\boxed{" + "1" * 300 + "}",
    "1" * 1_000_000,
    "\\boxed{" * 100_000,
    "#### " + "9" * 100_000,
    "__import__('os').system('touch {pwned}')",
    r"\boxed{__import__('os').system('touch {pwned}')}",
    "open('/etc/passwd')",
    "().__class__.__bases__",
    r"\boxed{" + "|x" * 60 + "}",
    r"\boxed{" + "x_" * 200 + "1}",
    r"\boxed{" + "|" * 40 + "5" + "|" * 40 + "}",
    r"\boxed{(x+y+z+1)^{60}-(x+y+z)^{60}}",
    r"\boxed{\exp(10^{300})}",
    r"\boxed{e^{e^{e^{10}}}}",
    r"\boxed{" + "1<" * 200 + "5}",
    r"\boxed{2^{\infty}}",
    r"\boxed{|\infty|}",
    r"\boxed{\frac{1}{0}}",
    r"\boxed{().__class__.__bases__[0].__subclasses__()}",
    "eval('1')",
    "exec('1')",
    r"\boxed{os.system}",
    "lambda: 1",
    "is $x" * 100,
    "$" * 500,
    "the value is " + "$a$ or " * 60 + "$7$.",
    "word " + "\\(a\\)" * 80,
    r"\boxed{" + "{" * 250 + "1" + "}" * 250 + "}",
    r"\boxed{" + r"\text{" * 80 + "1" + "}" * 80 + "}",
    r"\boxed{1} or " * 8000 + r"\boxed{2}",
    "not " * 30_000,
    "the answer is " * 15_000,
    "I doubt " * 15_000 + "the answer is 7",
    r"\boxed{" + "√(" * 100 + "1" + ")" * 100 + "}",
    r"\boxed{" + "1:" * 200 + "1}",
    r"\boxed{" + "x<1 or " * 60 + "x>2}",
    r"\boxed{" + "(0-0)^0+" * 20 + "1}",
    "4\u200b5",
    "5\x00",
    "\x1b[31m5",
    "\u202e5",
    "\\boxed{\u06f5}",
    "\ud800 5",
]


JUXTAPOSED = {
    "(3)(4)": 12, "(3)(4)(5)": 60, "3(4)(5)": 60, "(-3)(4)": -12, "(3)4": 12, "3{4}": 12,
    r"2\cdot 3(4)": 24, "1-(3)(4)": -11,
    r"(2)\left(\frac{1}{2}\right)": 1, r"\frac{3(4)}{2}": 6, r"\sqrt{(3)(12)}": 6, "2^{3(2)}": 64,
    r"\frac{(3)(4)}{(2)(3)}": 2,
    r"\frac{2}{3}(3)(2)": 4, r"\frac{1}{2}0.5": 0.25, "e^{0}(4)": 4, r"\binom{5}{2}(3)": 30,
    r"3\binom{5}{2}": 30,
    r"\binom{5}{2}\binom{4}{2}": 60, r"\frac{10(9)(8)}{3!}": 120, r"2\frac{1}{2}": 2.5,
    r"-2\frac12": -2.5, "100(1.05)^2": 110.25,
    r"\log_2(8)(2)": 6, "10^-2": 0.01,
}  # fmt: skip


@pytest.mark.parametrize("text", JUXTAPOSED)
def test_factors_side_by_side_are_a_product(text: str):
    assert math_reward(rf"\boxed{{{text}}}", str(JUXTAPOSED[text])) == 1.0
    assert math_reward(rf"\boxed{{{JUXTAPOSED[text]}}}", text) == 1.0
    assert math_reward(rf"\boxed{{{text}}}", str(JUXTAPOSED[text] + 1)) == 0.0


def test_the_sum_of_two_groups_is_not_their_product():
    assert math_reward(r"\boxed{(3)(4)}", "7") == 0.0
    assert (
        math_reward(
            r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"
        )
        == 1.0
    )
    assert math_reward(r"\boxed{\sin^2(x)}", r"1-\cos^2(x)") == 1.0


@pytest.mark.parametrize(("text", "answer"), [
    ("a^{b}", "a^b"), (r"\left(\frac{n+1}{n}\right)^n", r"(1+\frac{1}{n})^n"),
    ("x^{1/n}", r"\sqrt[n]{x}"), (r"a^b a^c", "a^{b+c}"),
    (r"\frac{10!}{3!7!}", "120"), ("1010_{2}", "1010_2"), ("1010", "1010_2"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"x\in\mathbb{R}", r"\mathbb{R}"), (r"\varnothing", r"\emptyset"), ("x=1,000", "1000"),
    (r"2\cdot 500=1,000", "1000"), ("No", "no"),
])  # fmt: skip
def test_other_ways_to_write_an_answer(text: str, answer: str):
    assert math_reward(rf"\boxed{{{text}}}", answer) == 1.0


@pytest.mark.parametrize(("text", "answer"), [
    ("b^a", "a^b"), ("1010_3", "1010_2"), ("3_1+5", "8"), ("on", "no"), ("neve", "even"),
    ("%" * 400, "5"), ("5" + "%" * 400, "5"),
    (r"\mathbb{Z}", r"(-\infty,\infty)"),
])  # fmt: skip
def test_answers_that_only_look_alike(text: str, answer: str):
    assert math_reward(rf"\boxed{{{text}}}", answer) == 0.0


@pytest.mark.parametrize(("text", "answer"), [
    (r"\boxed{32348}", r"32,\!348"), (r"\boxed{\textbf{113}}", "113"),
    (r"\boxed{\mathbf{113}}", "113"), (r"\boxed{\text{113}}", "113"),
    (r"\boxed{{113}}", "113"), (r"The value is $2\sqrt3$.", r"2\sqrt{3}"), (r"**The probability "
                                                                            r"is $\frac37$**",
                                                                                r"\frac{3}{7}"),
    ("The area is 36π.", r"36\pi"), ("It is not 14 but 16.", "16"),
    ("The answer is 16, not 14.", "16"),
    (r"\boxed{2516_{\text{eight}}}", "2516_8"),
    (r"\boxed{x<2 \text{ or } x>3}", r"(-\infty,2)\cup(3,\infty)"), (r"\boxed{236 "
                                                                     r"\pmod{1000}}", "236"),
    (r"so it is \boxed{\frac12} or \boxed{.5}", "0.5"),
    (r"Hence the length is $AB = 2\sqrt{3}$.", r"2\sqrt{3}"), (r"\boxed{\angle ABC = "
                                                               r"60^\circ}", r"60^\circ"),
    (r"\boxed{[ABC]=6}", "6"), ("答案是 721。", "721"), ("9 x 2 = 18", "18"),
    ("If n = 9, the answer is 18.", "18"),
    (r"\boxed{f(x)=x(x^2-3)}", "f(x)=x^3-3x"),
    (r"\boxed{f(x)=x^2 \text{ and } f(x)=0}", "$f(x)=0, f(x)=x^2$"),
])  # fmt: skip
def test_wrappers_and_closing_prose_hide_no_right_answer(text: str, answer: str):
    assert math_reward(text, answer) == 1.0


@pytest.mark.parametrize(("text", "answer"), [
    (r"\boxed{2,5}", "[2,5)"), (r"\boxed{-\infty,5}", r"(-\infty,5]"), (r"\boxed{0^0}", "1"),
    (r"\boxed{15_{16}}", "15"),
    ("I think it's not 72", "72"),
    ("The answer is not 0.", "0"), (r"\boxed{\text{not } 0}", "0"), ("At least 72.", "72"),
    (r"\boxed{71} or \boxed{72}", "72"),
    ("I cannot determine if the answer is 18.", "18"), ("$AC = 6$", "5"),
    (r"\boxed{f(x)=x^3}", "f(x)=x^2"),
    (r"\boxed{g(x)=x^2}", "f(x)=x^2"), (r"\boxed{3 x 4}", "34"), (r"\boxed{2:5:1}", r"\frac{2}{5}"),
    (r"\boxed{(32, 348)}", r"32,\!348"),
])  # fmt: skip
def test_denied_answers_and_intervals_without_brackets_are_wrong(text: str, answer: str):
    assert math_reward(text, answer) == 0.0


@pytest.mark.parametrize(("text", "answer"), RIGHT)
def test_right_answers_score_one(text: str, answer: str):
    assert math_reward(text, answer) == 1.0


@pytest.mark.parametrize(("text", "answer"), WRONG)
def test_wrong_answers_score_zero(text: str, answer: str):
    assert math_reward(text, answer) == 0.0


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:24]))
@pytest.mark.parametrize("answer", ["5", r"\frac{1}{3}"])
def test_hostile_answers_score_zero(text: str, answer: str, tmp_path):
    pwned = tmp_path / "pwned"
    assert math_reward(text.replace("{pwned}", str(pwned)), answer) == 0.0
    assert not pwned.exists()


MARKS = {  # @ stands for the answer
    "box": r"So \boxed{@}.", "fbox": r"\fbox{@}", "gsm8k": "6 * 7\n#### @",
        "r1_zero": "<answer>@</answer>",
    "tag_on_lines": "<answer>\n@\n</answer>\nDone.", "tag_and_box": r"<answer>It is "
                                                                    r"\boxed{@}</answer>",
    "tag_and_words": "<answer>The answer is @</answer>", "upper_case_tag": "<SOLUTION>@</SOLUTION>",
    "final_tag": "<final_answer>@</final_answer>", "glm": "It is <|begin_of_box|>@<|end_of_box|>.",
    "block": "[ANSWER]@[/ANSWER]",
    "bracket": "[ANSWER] @", "says": "The answer is @. I hope it is correct.", "colon": "Answer: @",
    "bold_colon": "**Answer:** @",
    "colon_after_bold": "**Answer**: @", "equals": "Answer = @", "final": "Final Answer: The "
                                                                          "final answer is @.",
    "heading": "## Final Answer\n@\n\nThat was easy.",
    "bold_heading": "**Final Answer**\n\n@\n\nThat was easy.",
    "unlike_tags": "<answer>@</Answer>", "blanks_in_tags": "< answer\n>@</ answer >",
    "attribute": '<answer type="final">@</answer>',
    "blank_tag": "<final answer>@</final answer>", "camel_tag": "<FinalAnswer>@</FinalAnswer>",
    "output": "<output>@</output>\nDone.",
    "final_only": "<final>@</final>", "result_tag": "<result>\n@\n</result>",
    "response": "<response>\nThe answer is @.\n</response>",
    "solution_marks": "<|begin_of_solution|>So \\boxed{@}.<|end_of_solution|>",
    "cohere": "<|START_TEXT|>@<|END_TEXT|>",
    "kimi_k3": "<|open|>response<|sep|>@<|close|>response<|sep|><|close|>message<|sep|>",
    "python": "{'answer': '@'}",
    "json_result": '{"steps": "2 of 2", "result": "@"}', "json_final": '{"final_result": "@"}',
    "json": 'It is {"answer": "@"}', "json_lines": '{\n "answer": "@"\n}',
    "after_thinking": "<think>1 or 2?</think>\n<answer>@</answer>",
    "end_of_turn": "The answer is @.<|im_end|>\n<|im_start|>user",
    "opened_by_prompt": "@</answer>", "opened_by_prompt_with_work": "It is 1 or 2.\nAnswer: @\n</answer>\nDone.",
    "opened_after_thinking": "1 or 2?</think>@</answer>", "mark_opened_by_prompt": "@<|end_of_box|>",
    "box_opened_by_prompt": "@}$.\nThat was easy.", "json_opened_by_prompt": '@"}',
    "output_opened_by_prompt": "@\n</output>", "html": "&lt;answer&gt;@&lt;/answer&gt;",
}  # fmt: skip


@pytest.mark.parametrize("mark", MARKS)
def test_answer_counts_in_each_mark(mark: str):
    answers = (
        ("12", "13"),
        ("-3.5", "3.5"),
        (r"\frac{1}{2}", r"\frac{1}{3}"),
        ("1,234", "1,235"),
        ("(1, 2)", "(2, 1)"),
        ("Rome", "Bonn"),
    )
    for answer, wrong in answers:
        assert math_reward(MARKS[mark].replace("@", answer), answer) == 1.0, answer
        assert math_reward(MARKS[mark].replace("@", wrong), answer) == 0.0, wrong


def test_last_tag_counts_and_must_be_closed():
    assert math_reward("<answer>1</answer> no, <answer>2</answer>", "2") == 1.0
    assert (
        math_reward("<answer>1</answer> no, <answer>2", "1") == math_reward("<answer>2", "2") == 0.0
    )
    assert (
        math_reward(r"\boxed{1} <answer>2</answer>", "1")
        == math_reward("<answer></answer> 2", "2")
        == 0.0
    )


def test_weak_marks_yield_to_an_answer_behind_them():
    for weak in "<output>1</output>", "<result>1</result>", '{"result": 1}', "{'output': '1'}":
        assert (
            math_reward(rf"{weak}\nSo \boxed{{2}}", "2")
            == math_reward(f"{weak}\nSo it is 2.", "2")
            == 1.0
        ), weak
    assert (
        math_reward("<result>1</result> <answer>2</answer>", "2")
        == math_reward("<answer>2</answer> <result>1</result>", "2")
        == 1.0
    )


@pytest.mark.parametrize("blank", [" ", "\n", "\t \n", "\u200b"])
def test_blanks_behind_an_answer_do_not_count(blank: str):
    many = blank * (MAX_TEXT_CHARS // len(blank) + 1)
    for text in (
        rf"\boxed{{5}}{many}",
        f"Answer: 5{many}",
        f"#### 5{many}<|im_end|>{many}",
        f"<answer>5{many}</answer>",
        f"so 5{many}",
    ):
        assert math_reward(text, "5") == 1.0, text[:20]
        assert math_reward(text, "6") == 0.0, text[:20]


def test_other_graders_read_the_marks_too():
    for text in (
        "<answer>B</answer>",
        "<answer>\n(B)\n</answer> Done.",
        "<|begin_of_box|>B<|end_of_box|>",
        '{"answer": "B"}',
        "#### B",
    ):
        assert chosen_letter(text) == "B", text
    assert (
        last_number_reward("<answer>7,7,2</answer>\nDone in 3 steps.", "2")
        == last_number_reward('{\n"answer": 2\n}', "2")
        == 1.0
    )
    assert vote("math", "<answer>7</answer>", False) == vote("math", r"\boxed{7}", False) == "7"


TAGS = [
    "think", "thinking", "thought", "reasoning", "seed:think", "Think", "think\n", " THINK",
    "thoughts", "thought_process", "analysis",
    "scratchpad", "Scratch_Pad", "reflection", "inner_monologue", "mm:think", "ifm|think_fast",
    "longcat_think", "think:opensource", "|thinking|",
    "chain_of_thought", "cot", "plan",
]  # fmt: skip
THINKING = [(f"<{tag}>", f"</{tag}>".replace("/|", "|/")) for tag in TAGS] + [
    ('<thinking effort="high">', "</thinking>"), ("[THINK]", "[/THINK]"),
    ("[THINKING]", "[/THINKING]"), ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
     "<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"),
    ("<|channel>thought\n", "<channel|>"), ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"), ("<|content_thinking|>", "<|content_text|>"),
]  # fmt: skip


@pytest.mark.parametrize(("begin", "end"), THINKING)
@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [("math", r"\boxed{5}", "5"), ("last_number", "5", "5"), ("choice", "B", "B")],
)
def test_answer_counts_only_after_thinking(begin: str, end: str, name: str, text: str, answer: str):
    reward = VERIFIERS[name]
    assert (
        reward(f"{begin}Let me see. {text}", answer)
        == reward(f"{begin}{text}\n{end}\n", answer)
        == 0.0
    )
    assert (
        reward(f"{begin}or 6?{end}\n{text}", answer) == reward(f"or 6?{end}\n{text}", answer) == 1.0
    )
    assert asyncio.run(scored(name, text, answer, prompt=f"Q {begin}\n")) == Score(0.0)
    assert asyncio.run(scored(name, f"6?{end}\n{text}", answer, prompt=f"Q {begin}\n")) == Score(
        1.0
    )
    assert asyncio.run(scored(name, text, answer, prompt=f"Q {begin}\n\n{end}\n\n")) == Score(
        1.0
    ), "thinking is switched off"


def test_marks_escaped_as_html_are_marks():
    assert math_reward(r"&lt;think&gt;\boxed{12}", "12") == 0.0
    assert math_reward(r"&lt;Thinking &gt;\boxed{12}&lt;/Thinking&gt;\boxed{13}", "12") == 0.0
    assert math_reward("&lt;think&gt;7?&lt;/think&gt; &lt;answer&gt;12&lt;/answer&gt;", "12") == 1.0
    named = r"The tags &lt;think&gt; and &lt;/think&gt; hold my work. \boxed{12}"
    assert math_reward(named, "12") == 1.0
    twice = r"&amp;lt;think&amp;gt; is not a mark. \boxed{12}"
    assert math_reward(final_part(twice), "12") == 1.0
    assert after_thinking("&lt;think&gt;a&lt;/think&gt;if a &lt; b: print('&lt;b&gt;')") == (
        "if a &lt; b: print('&lt;b&gt;')"
    )


@pytest.mark.parametrize("text", [
    "I use <think> tags to reason. The answer is 12.", "My work is in `<think>` tags.\nAnswer: 12",
    "\\boxed{12}\n(I left out the </think> tag.)",
    "The marks <think> and </think> hold my work. \\boxed{12}",
    "I thought \"<reasoning>\" and \"</reasoning>\" were optional. \\boxed{12}",
    "<think>I end with </think> tags.</think>\n\\boxed{12}",
    "<answer>12</answer>, as asked, in <answer> tags", "I won't use <analysis>: \\boxed{12}",
    "<think>7?</think>The answer is 12.<think>Let me check: 13", "Answer: 12\n<scratchpad>13",
])  # fmt: skip
def test_marks_that_prose_names_hide_no_answer(text: str):
    assert math_reward(text, "12") == 1.0
    assert math_reward(text, "13") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "Sure. <think>",
        "Sure <think>",
        "<b><think>",
        "<think>I use <think></think> tags. ",
        "7?</think> <think>",
    ],
)
def test_unfinished_thinking_inside_a_line_hides_the_answer(text: str):
    assert math_reward(rf"{text}\boxed{{12}}", "12") == 0.0


async def scored(name: str, response: str, answer: str, prompt: str = "") -> Score:
    """The score by a RewardPool whose worker is in this process."""
    pool = RewardPool(RewardConfig(name=name))

    async def call(*arguments):
        return {"reward": VERIFIERS[name](*arguments), "parts": {}, "failures": []}

    pool.call = call  # pyright: ignore
    return await pool.score(ScoreRequest(response, answer, prompt))


@pytest.mark.parametrize("name", ["math", "last_number"])
def test_end_of_a_very_long_response_counts(name: str):
    long = "so 4 it goes\n" * (MAX_TEXT_CHARS // 6)
    assert asyncio.run(scored(name, f"{long}so it is 5", "5")) == Score(1.0)
    assert asyncio.run(scored(name, f"<think>{long}so it is 5", "5")) == Score(0.0), (
        "the thinking began before the part that is read"
    )
    assert math_reward(f"\\boxed{{5}}\n{long}", "5") == 0.0


def test_response_that_cannot_be_scored_is_a_failure():
    [failure] = asyncio.run(scored("ifeval", "a " * MAX_TEXT_CHARS, "{}")).failures
    assert (failure.kind, failure.reason) == (
        "error",
        f"the response has more than {MAX_TEXT_CHARS} characters",
    )


@pytest.mark.parametrize(("text", "answer"), [
    (r"1-\frac{1}{\mathrm{e}}", r"1-\frac{1}{e}"), (r"\operatorname{ln} 2", r"\ln 2"),
    (r"\text{e}^2", "e^2"),
    (r"\mathrm{ln}\,2", r"\ln 2"),
    (r"\text{sin}(x)", r"\sin x"), (r"2\mathbf{x}+1", "2x+1"), (r"3+2\mathrm{i}", "3+2i"),
    (r"\boldsymbol{\pi}", r"\pi"),
    ("\uff15\uff10", "50"), ("\uff0d\uff15", "-5"), ("\U0001d7d3", "5"), ("5\u200b", "5"),
    ("\ufeff12", "12"), ("1\u20602", "12"),
    ("caf\u00e9", "cafe\u0301"), ("cafe\u0301", "caf\u00e9"),
    ("\\text{A\u0308pfel}", "\\text{\u00c4pfel}"),
    ("\frac{1}{3}", r"\frac{1}{3}"), (r"\\frac{1}{3}", r"\frac{1}{3}"), (r"\mathtt{x}", "x"),
    (r"\mathnormal x+1", "x+1"),
    (r"\pmb{12}", "12"), (r"\bm x+1", "x+1"), (r"2\mathrm x", "2x"),
    (r"\mathrm{x}+\mathrm{y}", "x+y"), (r"{\rm e}^2", "e^2"),
    (r"{\rm ln}\,2", r"\ln 2"), (r"\mathbf{1}2", "12"), (r"1\mathbf 2", "12"),
    (r"x^\mathbf{2}", "x^2"), (r"\frac\mathbf{1}{3}", "1/3"),
    (r"\rm x", "x"), (r"\frac{\rm a}{b}", "a/b"), (r"\boxed{12}", "12"), (r"\hspace{1em}12", "12"),
    (r"\pi\bm x", r"\pi x"), (r"3\mathit{ab}", "3ab"), (r"\vec{\mathbf{v}}", r"\vec v"),
    (r"{\bf 12}", "12"), (r"\texttt{12}", "12"),
    (r"\color{red}{12}", "12"), (r"\textcolor{#f00}{-}12", "-12"),
    (r"\color[rgb]{1,0,0}x^2", "x^2"), (r"\colorbox{red}{$12$}", "12"),
    (r"\large 12", "12"), (r"{\Huge 12}", "12"), (r"\scriptstyle\frac{1}{3}", "1/3"),
    (r"\bbox[red]{12}", "12"),
    (r"\textcolor{red}{\text{Rome}}", "Rome"), (r"\mathrm{Rome}", "Rome"),
    (r"\arctg 2", r"\arctan 2"), ("arctg 2", r"\arctan 2"),
    (r"\mathrm{tg}\,x", r"\tan x"), (r"\ctg x", r"\cot x"), (r"\sh x", r"\sinh x"),
    (r"\lg 100", "2"), ("1{,}5", "1.5"),
    (r"\mathfrak{x}+1", "x+1"), (r"2\mathcal x", "2x"), (r"\mathscr{L}", "L"), (r"{\cal L}", "L"),
    (r"\mathbb{x}", "x"), (r"\Bbb k", "k"), (r"\mathbb R", r"\mathbb{R}"), (r"\Bbb{R}", r"\mathbb{R}"),
    (r"\frak{a}+\frak{b}", "a+b"), (r"\symbf{x}^2", "x^2"), (r"\symup{x}", "x"), (r"\mit x", "x"),
    (r"\mathbfcal{A}", "A"), (r"\bold{12}", "12"), (r"\mathfrak{12}", "12"), (r"2\mathsfit{x}", "2x"),
    ("\u210e+1", "h+1"), ("\u2112", "L"), (r"2\uppi", r"2\pi"), ("\U0001d525", "h"),
    (r"\,113\,", "113"), (r"13\ ", "13"), (r"\,(3,4)\,", "(3,4)"), (r"\;p-q\:", "p-q"),
    ("x &lt; 5", "x<5"), ("&pi;", r"\pi"), ("x&sup2;", "x^2"), ("5&nbsp;&minus;&#120;", "5-x"),
])  # fmt: skip
def test_fonts_and_unicode_forms_change_no_answer(text: str, answer: str):
    assert (
        math_reward(rf"\boxed{{{text}}}", answer)
        == math_reward(rf"\boxed{{{answer}}}", text)
        == 1.0
    )
    assert math_reward(rf"\boxed{{{text}}}", "7") == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [(r"5\mathrm{m}", r"5\mathrm{n}x"), ("4\u200b5", "5"), ("x\u00b2", "x2"), (r"\text{E}", "e+1"),
    (r"\mathrm{1}{2}", "12"), (r"2\mathrm{x}+\mathrm{y}", "x+2y"), (r"3\text{ 4}", "34"),
    (r"\tg x", r"\cot x"), (r"\color{red}{13}", "12"), (r"\mathfrak{x}", "y"),
    (r"\mathbb{Q}", r"\mathbb{R}"), ("&lt;5", "5"), ("&amp;lt;5", "<5")]
)  # fmt: skip
def test_fonts_and_unicode_forms_that_differ(text: str, answer: str):
    assert math_reward(rf"\boxed{{{text}}}", answer) == 0.0


@pytest.mark.parametrize(("text", "answer", "right"), [
    (r"\frac 1 2", "1/2", True), (r"\dfrac 3 4", "3/4", True), (r"\frac 3{40}", "3/40", True),
    (r"\frac{3} 4", "3/4", True),
    (r"\frac \pi 6", r"\frac{\pi}{6}", True), (r"\frac a b", r"\frac{a}{b}", True),
    (r"3\frac 1 2", "7/2", True), (r"\binom 5 2", "10", True),
    (r"\frac{\sqrt 3}2", r"\frac{\sqrt{3}}{2}", True), (r"\sqrt[3] 8", "2", True),
    (r"\sqrt12", r"\sqrt{12}", True), (r"2\sqrt 12", r"4\sqrt3", True), (r"\sqrt[3]64", "4", True),
    (r"\sqrt2.25", "1.5", True), (r"\sqrt12x", r"x\sqrt{12}", True), (r"\surd 12", r"\sqrt{12}", True),
    ("√12.25", "3.5", True), (r"\frac{\sqrt12}{4}", r"\frac{\sqrt3}2", True),
    (r"\sqrt12", "2", False), (r"\sqrt12", r"\sqrt{1}2", False), (r"\sqrt[3]64", "2", False),
    (r"\nicefrac 1 2", "1/2", True), (r"\frac 1 25", "1/25", False), (r"\frac 1 3", "1/2", False),
])  # fmt: skip
def test_arguments_of_one_character(text: str, answer: str, right: bool):
    assert math_reward(rf"\boxed{{{text}}}", answer) == right


@pytest.mark.parametrize(("text", "answer", "right"), [
    (r"\boxed{3,5}", "5,3", True), (r"\boxed{3,5}", "3,50", False),
    (r"\boxed{-1,5}", "5, -1", True), (r"\boxed{1,5}", "1.5", True),
    (r"$x=\boxed{3}$ or $x=\boxed{5}$", "5,3", True),
    (r"$x=\boxed{3}$ or $x=\boxed{5}$", "3.5", False),
    (r"\boxed{1} and \boxed{234}", "1234", False), ("The roots are $3$ and $5$.", "3.5", False),
    ("The roots are $1$ and $234$.", "1234", False),
    (r"\boxed{1,234} and \boxed{5}", "5, 1234", True), (r"\boxed{(1,234)}", "(1234)", False),
])  # fmt: skip
def test_comma_between_two_numbers_separates_a_list(text: str, answer: str, right: bool):
    assert math_reward(text, answer) == right


SENTENCES = [
    ("Answer: The total is 34.", "34"), ("Final Answer: The largest $n$ is 34.", "34"),
    ("Answer: She left 3 hours ago.", "3"),
    (r"**Answer:** The area is $2\pi$.", r"2\pi"), ("The total is 34.", "34"), (r"The matrix is $ "
                                                                                r"\frac{1}{2} $.",
                                                                                    r"\frac{1}{2}"),
    ("It is not 10, which is 1,000.5€", "1000.5"), ("The room has 12.5m²", "12.5"),
    ("Answer: 34, see page 12", "34"), ("Answer: 34 (exercise 7, page 12)", "34"),
    ("Answer: If n = 9, the total is 34", "34"),
    ("Answer: After 2 hours, the distance is 34 km.", "34"), ("Answer: 20% of 170 is 34", "34"),
    ("Answer: The sum of 30 and 4 is 34.", "34"),
    ("Answer: the points $A$ and $B$ are 34 cm^2 apart", "34"),
    ("<answer>34, see page 12</answer>", "34"), ("Answer: 30 + 4 = 34", "34"),
    ("Answer: The mean of 3, 4 and 5 is 4", "4"), ("Answer: The sum of 2, 3, and 7 is 12.", "12"),
    (r"Answer: The median of $3$, $4$ and $5$ is $4$.", "4"), ("Answer: gcd(12, 18) is 6", "6"),
    ("Answer: Of 3, 4 and 5, the mean is 4", "4"), ("Answer: f(2, 3) = 5", "5"),
    ("Answer: The average of 3; 4; and 5 equals 4", "4"), (r"Answer: The LCM of $\{4, 6\}$ is 12", "12"),
    ("<answer>The mean of -3, 4 and 5.5 is 2</answer>", "2"), ("Answer: The mean of 3, 4, and 5 is **4**", "4"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "answer"), SENTENCES)
def test_answer_may_be_a_sentence(text: str, answer: str):
    assert math_reward(text, answer) == 1.0


@pytest.mark.parametrize("text", [
    "Answer: The total is not 34.", "Answer: It is less than 34.",
    "The answer is 7, so the other is 34.", "Answer: 12, see page 34",
    "Answer: 12 on page 34", "Answer: He is 12 and Ann is 34", "Answer: He is 34 and Ann is 12",
    "Answer: No, 34", "Answer: Yes: 34",
    "Answer: x is 12, y is 34", "Answer: The width is 12 while the length is 34",
    "Answer: Ann has $x=12$ and Bob $y=34$",
    "Answer: 12 of the 34 pass", "Answer: from 12 to 34", "Answer: 12, cf. Table 34",
    "Answer: the sum $30+34$ is $64$",
    "Answer: Nope, 34", "Answer: I don't know, 34", "Answer: Let $n=34$. Then 12",
    "Answer: option 34, i.e. 12", "Answer: $3x+4$ where $x=34$",
    "<answer>No, 34</answer>", "<answer>He is 12 and Ann is 34</answer>",
    '{"answer": "He is 12 and Ann is 34"}', "## Answer\nNo, 34", "Answer: The mean of 3, 34 and 5 is 14",
    "Answer: 12, 34 is wrong", "Answer: It is 12, 34 less than 46", "Answer: Of 12, 34 and 5, none is 1",
    "Answer: a is 12, 34 is b", "Answer: The mean is 12, not 34",
])  # fmt: skip
def test_sentence_that_states_another_answer(text: str):
    assert math_reward(text, "34") == 0.0


@pytest.mark.parametrize(("text", "answer", "right"), [
    ("12 500", "12500", True), ("1250,75", "1250.75", True), ("1,234", "1.234", False),
    ("25 {, }000", "25000", True),
    ("-y > -3", "y < 3", True), ("-y > -3", "y > 3", False), ("2", "|PQ|=2", True),
    ("3:5", "S_{1}:S_{2}=3:5", True),
    (r"\frac{2}{3}", r"\frac{PQ}{QR}=\frac{2}{3}", True), ("6, 7", "PQ=6, QR=7", True),
    ("6, 8", "PQ=6, QR=7", False),
    ("1", "x+z=1", False),
    ("(4,1),(8,1)", "m=4,n=1;m=8,n=1", True), ("(4,1),(8,2)", "m=4,n=1;m=8,n=1", False),
    ("(3,9), (9,3)", "(9,3)or(3,9)", True),
    ("(1,2), (2,1), (1,2)", "(1,2),(2,1)", True), ("(1,2), (2,1), (1,3)", "(1,2),(2,1)", False),
    (r"x_1=7^{\frac{1-\sqrt{5}}{4}},\quadx_2=1", r"7^{\frac{1-\sqrt{5}}{4}}, 1", True),
])  # fmt: skip
def test_ways_to_write_an_answer_that_other_graders_know(text: str, answer: str, right: bool):
    assert math_reward(rf"\boxed{{{text}}}", answer) == right


@pytest.mark.parametrize(("text", "right"), [
    (r"\boxed{4}\boxed{9}", True), (r"$$\boxed{4} \quad \text{and} \quad \boxed{9}$$", True),
    (r"\boxed{4} cats and \boxed{9} dogs", True),
    (r"\(a = \boxed{4} \) and \( b = \boxed{9} \)", True), (r"\boxed{4} was wrong, it is "
                                                            r"\boxed{9}", False),
])  # fmt: skip
def test_boxes_that_belong_together(text: str, right: bool):
    assert math_reward(text, "4, 9") == right


def test_forms_for_which_a_prompt_asks():
    assert answer_forms("Think in <think> </think>, then <answer> your answer </answer>.") == [
        ("<answer>", "</answer>")
    ]
    assert answer_forms('As {"result": 5}, or [FINAL]...[/FINAL]') == [
        ('{"result": "', '"}'),
        ("[FINAL]", "[/FINAL]"),
    ]
    assert answer_forms("<question>" + "long " * 40 + "</question> a < b > c, [x]") == []


def test_running_totals_are_scored_by_their_last_number():
    assert last_number_reward("7,7,6,7,2", "2") == 1.0
    assert last_number_reward("7,7,6,7,12", "2") == 0.0
    assert last_number_reward("7,7,6,7,-2", "2") == 0.0
    assert last_number_reward("7,7,6,7,", "7") == 1.0
    assert last_number_reward("", "2") == 0.0
    assert last_number_reward("7,7,6,7,1\u200b2", "2") == 0.0
    # here every comma separates; `math` reads thousands
    assert last_number_reward("1,234", "1234") == 0.0


def test_extraction():
    assert marked_answer("#### 7 and then \\boxed{\\frac{a}{b}} #### 8") == "\\frac{a}{b}"
    assert marked_answer("nothing marked") is None
    assert marked_answer("The answer is $\\frac{1}{2}$. I hope it is correct.") == "\\frac{1}{2}"
    assert last_number("from 1,200 to -1,234.5") == "-1,234.5"
    assert last_number("from 3-2") == ""
    assert last_number("2^5") == ""
    assert last_number("the point (3, 5)") == ""
    assert (
        marked_answer("**The answer is 42.**")
        == marked_answer("The answer is\n\n**42**")
        == marked_answer("\\boxed 42")
        == "42"
    )
    assert marked_answer("\\boxed{7 \\boxed{5}}") == "7 \\boxed{5}"
    assert marked_answer("7 \\boxed{5}") == ""
    assert last_running_number("10-3,-4") == "-4"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("(" * 13 + ")" * 13, "nested"),
        ("9" * 65, "digits"),
        ("x^{10000}", "exponent"),
        ("9 ** 10000", "exponent"),
        ("1000!", "factorial"),
        ("a.__b__", "dunder"),
        ("x^" * 25, "powers"),
        ("|x" * 9, "bars"),
        ("x_" * 13 + "1", "subscripts"),
        ("\\pi" * 49, "commands"),
        (r"\int_0^1 x", "integral"),
    ],
)
def test_text_limits_name_their_reason(answer: str, reason: str):
    with pytest.raises(AnswerRefused, match=reason):
        check_text(answer)


def test_ordinary_text_in_any_script_passes_the_character_check():
    check_characters("résumé 答案 π ≤ 3\n\t")


number = st.one_of(
    st.integers(-10_000, 10_000).map(str),
    st.integers(0, 10_000_000).map("{:,}".format),
    st.decimals(-1000, 1000, places=3).map("{:f}".format),
    st.tuples(st.integers(-30, 30), st.integers(1, 12)).map(lambda pq: f"{pq[0]}/{pq[1]}"),
)


@settings(max_examples=150, deadline=None)
@given(a=number, b=number)
@example("1/3", "0.333")
@example("-0", "0")
@example("2/4", "0.5")
def test_plain_numbers_are_decided_as_math_verify_decides_them(a: str, b: str):
    import math_verify

    def parse(text: str):
        return math_verify.parse(
            f"${text}$", [math_verify.LatexExtractionConfig()], fallback_mode="no_fallback"
        )

    fast = plain_equal(plain_number(a), plain_number(b))
    assert fast is None or fast == math_verify.verify(parse(a), parse(b))


def test_decimals_are_compared_to_six_places_or_digits():
    """To the sixth place, and small ones to their sixth digit."""
    for a, b, same in [
        ("0.333333", "1/3", True), ("0.33333", "1/3", False), ("1000000.4", "1000000", False),
        ("0.0000001", "0.0000002", False),
        ("0.0000001", "0", False), ("1/3", "1/4", False), ("2.\\overline{3}", "7/3", True),
        ("2.3", "2.\\overline{3}", False),
        ("1e5", "100,000", True), ("1e-3", "0.001", True), ("1 2/3", "5/3", True),
    ]:  # fmt: skip
        assert plain_equal(plain_number(a), plain_number(b)) is same, (a, b)
    assert plain_number("1/0") is None
    assert plain_number("1.5/2") is None
    assert plain_number("") is None
    assert plain_number("\u0661") is None
    assert plain_number("1e9999") is None
    assert plain_number("1 2/0") is None
    assert plain_number("9" * 65) is None


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_no_text_breaks_the_verifier(text: str):
    """SymPy may raise any Python error (the worker scores it 0), but extraction and limits raise
    only AnswerRefused.
    """
    marked_answer(text), last_number(text), last_running_number(text)
    for check in (check_characters, check_text):
        with contextlib.suppress(AnswerRefused):
            check(text)
    assert last_number_reward(text, "7") in (0.0, 1.0)
