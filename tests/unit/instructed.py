"""Shared by the tests of IFEval: nltk's sentence data, if a package has it; and made-up responses,
some of which follow an instruction.
"""

from __future__ import annotations

import json
import os
import random
from importlib.util import find_spec
from pathlib import Path

# instruction, its arguments, a response that follows it, one that does not
Case = tuple[str, dict, str, str]

_WORDS = (
    "river stone market window garden letter silver morning forest harbor candle winter "
    "copper meadow bridge lantern"
).split()
_ENGLISH = (
    "The small village lies between the hills and the river, and every morning the people "
    "walk to the old market."
)
_GERMAN = (
    "Das kleine Dorf liegt zwischen den Hügeln und dem Fluss, und jeden Morgen gehen die "
    "Leute zum alten Markt."
)
_FRENCH = (
    "Le petit village se trouve entre les collines et la rivière, et chaque matin les gens "
    "vont au vieux marché."
)


def sentence_data() -> str | None:
    """The folder of nltk's data in llama-index-core.

    It is set for this process and its children.
    """
    spec = find_spec("llama_index.core") if find_spec("llama_index") else None
    folder = Path(spec.origin).parent / "_static/nltk_cache" if spec and spec.origin else None
    if folder is None or not (folder / "tokenizers/punkt_tab/english").is_dir():
        return None
    os.environ["NLTK_DATA"] = str(folder)
    return str(folder)


def cases(rng: random.Random) -> list[Case]:
    """One case for each of the 25 kinds."""
    n = rng.randint(2, 6)
    words = rng.sample(_WORDS, 8)
    a, b, c = words[:3]
    plain = " ".join(words)
    sentences = [f"The {word} is old." for word in (words * 2)[: n + 1]]
    language, right_language, wrong_language = rng.choice(
        [("en", _ENGLISH, _GERMAN), ("de", _GERMAN, _FRENCH), ("fr", _FRENCH, _ENGLISH)]
    )
    bullets = [f"* {word}" for word in words[: n + 1]]
    paragraphs = [f"{word} and more of it" for word in words[: n + 1]]
    ask = f"Write about the {a}."
    return [
        ("keywords:existence", {"keywords": [a, b]}, f"A {a} and a {b.upper()}.", f"A {a} alone."),
        (
            "keywords:frequency",
            {"keyword": a, "frequency": n, "relation": "at least"},
            f"{a} " * n,
            f"{a} " * (n - 1),
        ),
        (
            "keywords:forbidden_words",
            {"forbidden_words": [a, b]},
            f"Only a {c}s {a}x.",
            f"Only a {a}.",
        ),
        (
            "keywords:letter_frequency",
            {"letter": "q", "let_frequency": n, "let_relation": "less than"},
            "Q" * (n - 1),
            "q" * n,
        ),
        ("language:response_language", {"language": language}, right_language, wrong_language),
        (
            "length_constraints:number_sentences",
            {"num_sentences": n, "relation": "less than"},
            " ".join(sentences[: n - 1]),
            " ".join(sentences[:n]),
        ),
        (
            "length_constraints:number_paragraphs",
            {"num_paragraphs": n},
            "\n***\n".join(paragraphs[:n]),
            "\n***\n".join(paragraphs),
        ),
        (
            "length_constraints:number_words",
            {"num_words": 8, "relation": "at least"},
            plain,
            " ".join(words[:7]),
        ),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": n, "nth_paragraph": 2, "first_word": words[1]},
            "\n\n".join(paragraphs[:n]),
            "\n\n".join(reversed(paragraphs)),
        ),
        (
            "detectable_content:number_placeholders",
            {"num_placeholders": n},
            " ".join(f"[{word}]" for word in words[:n]),
            " ".join(f"[{word}]" for word in words[: n - 1]),
        ),
        (
            "detectable_content:postscript",
            {"postscript_marker": "P.S."},
            f"{plain}\nP.S. {a}",
            f"{plain}\nS.P. {a}",
        ),
        (
            "detectable_format:number_bullet_lists",
            {"num_bullets": n},
            "\n".join(bullets[:n]),
            "\n".join(bullets),
        ),
        (
            "detectable_format:constrained_response",
            {},
            f"My answer is {rng.choice(['yes', 'no', 'maybe'])}.",
            "Yes.",
        ),
        (
            "detectable_format:number_highlighted_sections",
            {"num_highlights": n},
            " ".join(f"*{word}*" for word in words[:n]),
            " ".join(f"*{word}*" for word in words[: n - 1]),
        ),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Section", "num_sections": n},
            "\n".join(f"Section {i}\n{words[i]}" for i in range(1, n + 1)),
            "\n".join(f"Section {i}\n{words[i]}" for i in range(1, n)),
        ),
        (
            "detectable_format:json_format",
            {},
            "```json\n" + json.dumps({a: [b, n]}) + "\n```",
            "{" + a + ": 1}",
        ),
        ("detectable_format:title", {}, f"<<{a} {b}>>\n{plain}", f"<{a} {b}>\n{plain}"),
        ("combination:two_responses", {}, f"{a} {b}******{c}", f"{a} {b}***{c}"),
        (
            "combination:repeat_prompt",
            {"prompt_to_repeat": ask},
            f"{ask}\n{plain}",
            f"{plain}\n{ask}",
        ),
        (
            "startend:end_checker",
            {"end_phrase": f"That is the {a}."},
            f"{plain}. That is the {a}.",
            f"That is the {a}. {plain}",
        ),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": n, "capital_relation": "at least"},
            " ".join(words).replace(" ", " AND ", n),
            " ".join(words).replace(" ", " AND ", n - 1),
        ),
        ("change_case:english_capital", {}, _ENGLISH.upper(), _ENGLISH),
        ("change_case:english_lowercase", {}, _ENGLISH.lower(), _ENGLISH),
        ("punctuation:no_comma", {}, plain, f"{a}, {b}"),
        ("startend:quotation", {}, f'"{plain}"', f'"{plain}" {a}'),
    ]


def record(name: str, arguments: dict, prompt: str = "Write about the river.") -> dict:
    """A row in the hub's form: it has every argument of any instruction, null unless it belongs to
    this instruction.
    """
    keys = [
        "num_highlights",
        "relation",
        "num_words",
        "num_placeholders",
        "prompt_to_repeat",
        "num_bullets",
        "section_spliter",
        "num_sections",
        "capital_relation",
        "capital_frequency",
        "keywords",
        "num_paragraphs",
        "language",
        "let_relation",
        "letter",
        "let_frequency",
        "end_phrase",
        "forbidden_words",
        "keyword",
        "frequency",
        "num_sentences",
        "postscript_marker",
        "first_word",
        "nth_paragraph",
    ]
    return {
        "key": 1000,
        "prompt": prompt,
        "instruction_id_list": [name],
        "kwargs": [dict.fromkeys(keys) | arguments],
    }
