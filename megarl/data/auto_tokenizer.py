"""Reads a tokenizer with Transformers' AutoTokenizer, and prints it as JSON: python
auto_tokenizer.py SOURCE FOLDER

Transformers imports torch if it can. AutoTokenizer then takes 6 s and 800 MiB to import, without
torch 2 s and 80 MiB. So data/tokenizer.py runs this file as a program of its own, which hides
torch.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Texts that tokenizers of different make, or with different settings, split differently.
TEXTS = (
    "",
    " ",
    "1+2+3=",
    "Hello, World! It's 3.14; don't  you think?",
    "  two leading blanks, a trailing one ",
    "\n\nlines\r\n\tand tabs\n",
    "def f(x):\n    return x**2  # 1234567890",
    "caf\u00e9 cafe\u0301 \ufb01 \u212b \uff11\uff12 \u00bd",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \uc548\ub155",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea "
    "\u200b\u00a0\ufeff\x00\x7f",
    "<s></s><unk><pad><|endoftext|><|im_start|>user\n<|im_end|><eos><bos>[CLS] [SEP] [MASK]<0x41>",
    "\u2581a \u0120b ##c _d",
    "a long text that does not end soon. " * 150,
)
ARGUMENTS = {"city": "Rome", "days": [1, 2], "exact": True}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <b>'now'</b>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def conversations(arguments: Any) -> list[list[dict[str, Any]]]:
    """Conversations to render, with these arguments of a tool call."""
    call = {
        "type": "function",
        "id": "call12345",
        "function": {"name": "weather", "arguments": arguments},
    }
    question = {"role": "user", "content": ' Is it "warm" in R\u00f4me?\n<b> '}
    answer = {"role": "assistant", "content": "Yes.\n"}
    return [
        [question],
        [{"role": "system", "content": "Be brief."}, question],
        [question, answer, question],
        [question, answer],
        [
            question,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "21", "tool_call_id": "call12345"},
        ],
    ]


def strftime(form: str) -> str:
    """For templates that print the date."""
    return datetime.datetime(2024, 7, 26).strftime(form)


def read(source: str, folder: Path) -> dict[str, Any]:
    """The tokenizer that AutoTokenizer makes of `source`, a folder or a hub name whose files are in
    `folder`, and what it does with TEXTS and `conversations`. If it cannot be used, only a
    "problem".
    """
    try:
        return _described(_from_pretrained(source), folder)
    except Exception as error:  # Transformers and its classes raise any kind
        first_line = (str(error).strip().splitlines() or [""])[0]
        if "custom code" in first_line:
            first_line = (
                "its tokenizer needs code of the repository, which MegaRL and its "
                "engines do not run; set model.tokenizer to another"
            )
        return {
            "problem": f"AutoTokenizer of transformers cannot read it: {type(error).__name__}: "
            f"{first_line}"
        }


def _described(tokenizer: Any, folder: Path) -> dict[str, Any]:
    kind = type(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not backend:
        return {
            "problem": f"its class {kind.__name__} runs in Python, and has no fast form of the "
            "tokenizers library"
        }
    names = {"tokenizer.json", "tiktoken.model", "tekken.json", *kind.vocab_files_names.values()}
    if not any((folder / name).is_file() for name in names):
        return {
            "problem": f"it has no vocabulary for {kind.__name__}, which needs one of "
            f"{', '.join(sorted(names))}"
        }
    backend.no_truncation()  # as in each of the tokenizer's calls
    backend.no_padding()
    saved = json.loads(backend.to_str())
    model = saved["model"]
    if model.get("dropout"):
        return {
            "problem": f"its tokenizer.json has dropout={model['dropout']}, with which a text has "
            "other ids each time; set it to null"
        }
    # one that was first added as special keeps being skipped, which is not saved
    for token in saved["added_tokens"]:
        token["special"] |= not tokenizer.decode([token["id"]], skip_special_tokens=True)
    unknown = model.get("unk_token")
    templates = tokenizer.chat_template or {}
    if not isinstance(templates, dict):
        templates = {"default": templates}
    chats = []
    for template in templates.values():
        chats += _chats(tokenizer, template)
    return {
        "backend": json.dumps(saved),
        "splits_special_tokens": tokenizer.split_special_tokens,
        "bos_token": tokenizer.bos_token,
        "eos_token_id": tokenizer.eos_token_id,
        "unknown_id": model.get("unk_id") if unknown is None else backend.token_to_id(unknown),
        "special_tokens": tokenizer.special_tokens_map,
        "chat_templates": templates,
        "texts": [_text(tokenizer, text) for text in (*TEXTS, *_names(tokenizer))],
        "chats": chats,
    }


def _from_pretrained(source: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedConfig

    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except AttributeError:
        # it has no class for some config.json, such as Kimi K2's, and cannot read them without
        return AutoTokenizer.from_pretrained(
            source, local_files_only=True, trust_remote_code=False, config=PreTrainedConfig()
        )


def _names(tokenizer: Any) -> Iterable[str]:
    names = [*tokenizer.get_added_vocab()]
    return "".join(names), " ".join(names), "x".join(names)


def _text(tokenizer: Any, text: str) -> dict[str, Any]:
    # without a warning that the text is longer than the model's context
    ids = tokenizer(text, verbose=False).input_ids
    return {
        "text": text,
        "ids": ids,
        "plain_ids": tokenizer(text, add_special_tokens=False, verbose=False).input_ids,
        # SGLang does not clean up either.
        "decoded": tokenizer.decode(ids, clean_up_tokenization_spaces=False),
        "decoded_text": tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        ),
    }


def _chats(tokenizer: Any, template: str) -> Iterable[dict[str, Any]]:
    """What the template makes of each conversation: null if it refuses.

    Arguments of a call are an object or, as in OpenAI's form, JSON.
    """
    forms = zip(conversations(ARGUMENTS), conversations(json.dumps(ARGUMENTS)))
    for number, messages_of_form in enumerate(forms):
        for tools in (None, TOOLS):
            texts = []
            for messages in messages_of_form:
                try:
                    text = tokenizer.apply_chat_template(
                        messages,
                        tools=tools,
                        chat_template=template,
                        add_generation_prompt=messages[-1]["role"] != "assistant",
                        tokenize=False,
                        strftime_now=strftime,
                    )
                except Exception:  # by the template's code
                    text = None
                texts.append(text)
            yield {"template": template, "number": number, "tools": tools, "texts": texts}


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # to the import system: there is no such module
    print(json.dumps(read(sys.argv[1], Path(sys.argv[2]))))
