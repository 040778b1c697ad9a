"""Ten kinds of tokenizers and several damaged ones: token ids and texts equal those of
Transformers' AutoTokenizer, or the folder is refused.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from megarl.base.rollout_types import Prompt
from megarl.config.errors import ConfigError
from megarl.data.tokenizer import tokenizer_of
from megarl.generator.completions import Completion
from megarl.rewards.verify import math_reward
from megarl.rollouts.environments.base import Transcript

TRAINED_ON = [
    "The quick brown fox jumps over the lazy dog. 1+2+3=6, it's 3.14159 of 1,234,567!",
    "def f(x):\n    return x ** 2\n",
    "Rome was not built in a day; caf\u00e9, na\u00efve, \u4f60\u597d\u4e16\u754c, "
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440",
] * 3
# Not those of megarl/data/auto_tokenizer.py, with which every start compares.
CORPUS = [
    "",
    "a",
    " a  b   c    ",
    "\n \t\r\n\n",
    "What is 12,345.678 * 9?",
    "IT'S we'll I'M",
    "e\u0301\u00e9 \u0130i\u0307 \ufb03 \uff21\u3000\u1e9b\u0323",
    "\U0001f9d1\U0001f3fd\u200d\U0001f4bb \u2764\ufe0f \x01\u2028\u00ad",
    "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u05e2\u05d1\u05e8\u05d9\u05ea \u65e5\u672c\u8a9e",
    "<s>a</s> <unk> [UNK] <|im_end|><|tool|> <late> <listed> <mapped> <extra>",
    "<|endoftext|>x<|endoftext|>",
    "x" * 5000 + " end",
]


def save(folder: Path, tokenizer: Tokenizer, **settings: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    )


def byte_level(folder: Path, *more_special: str, **settings: Any) -> Tokenizer:
    """Like GPT-2's, Qwen's and Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>", *more_special]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINED_ON, trainer)
    save(folder, tokenizer, eos_token="<|endoftext|>", **settings)
    return tokenizer


def llama_3(folder: Path) -> None:
    tokenizer = byte_level(folder, "<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    save(folder, tokenizer, eos_token="<|im_end|>", bos_token="<s>")


def qwen(folder: Path) -> None:
    """Its class ignores much of tokenizer.json."""
    byte_level(folder, tokenizer_class="Qwen2Tokenizer")
    (folder / "config.json").write_text('{"model_type": "qwen2"}')


def byte_fallback(folder: Path, **settings: Any) -> None:
    """Like Llama 2's and Mistral's."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    pieces = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(pieces)
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    tokenizer.train_from_iterator(
        [text.replace(" ", "\u2581") for text in TRAINED_ON],
        trainers.BpeTrainer(
            vocab_size=460, special_tokens=[*special, *bytes_], show_progress=False
        ),
    )
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "LlamaTokenizer",
        **settings,
    }
    save(folder, tokenizer, add_bos_token=True, **settings)


def unigram(folder: Path) -> None:
    """Like T5's: an end-of-text is added, and a normalizer changes the text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        TRAINED_ON,
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    save(folder, tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def word_piece(folder: Path) -> None:
    """Like BERT's: lower case without accents."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        TRAINED_ON,
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    save(
        folder,
        tokenizer,
        eos_token="[SEP]",
        cls_token="[CLS]",
        unk_token="[UNK]",
        clean_up_tokenization_spaces=True,
    )


def word_level(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        TRAINED_ON, trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"], show_progress=False)
    )
    save(folder, tokenizer, eos_token="</s>", unk_token="<unk>")


def tiktoken(folder: Path) -> None:
    """As DeepSeek, Kimi and Qwen's first keep theirs: bytes and ranks, no merges."""
    pieces = [bytes([number]) for number in range(256)] + [
        b"th",
        b"the",
        b" the",
        b"12",
        b"qu",
        b"\xe4\xbd",
    ]
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (folder / "tiktoken.model").write_text("".join(lines))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    settings["added_tokens_decoder"] = {
        "262": {"content": "<|im_end|>", "special": True},
        "264": {"content": "<|tool|>", "special": False},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def sentence_piece(folder: Path, kind: str) -> None:
    """Only tokenizer.model, without tokenizer.json."""
    (folder / "text").write_text("\n".join(TRAINED_ON) + "\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), model_type=kind,
        vocab_size=380, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False})
    )


def vocab_and_merges(folder: Path) -> None:
    """As GPT-2 keeps its own."""
    byte_level(folder).model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": true}'
    )


def truncating(folder: Path) -> None:
    tokenizer = byte_level(folder)
    tokenizer.enable_truncation(4)
    save(folder, tokenizer, eos_token="<|endoftext|>", model_max_length=4)


def padding(folder: Path) -> None:
    tokenizer = byte_level(folder)
    tokenizer.enable_padding(length=64, pad_id=1, pad_token="<|im_end|>")
    save(folder, tokenizer, eos_token="<|endoftext|>", pad_token="<|im_end|>")


def late_tokens(folder: Path) -> None:
    """Tokens that stand in only one place each."""
    size = byte_level(folder).get_vocab_size()
    late = {
        "content": "<late>",
        "special": False,
        "lstrip": True,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "added_tokens_decoder": {str(size): late},
        "extra_special_tokens": {"extra_token": "<extra>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def listed_tokens(folder: Path) -> None:
    size = byte_level(folder, additional_special_tokens=["<listed>"]).get_vocab_size()
    (folder / "added_tokens.json").write_text(json.dumps({"<|tool|>": size}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<mapped>"}))


def added_tokens(folder: Path) -> None:
    tokenizer = byte_level(folder)
    tokenizer.add_tokens(
        [
            AddedToken("<|tool|>", lstrip=True),
            AddedToken("end", single_word=True),
            AddedToken("\u00e9", normalized=True),
        ]
    )
    save(folder, tokenizer, eos_token="<|endoftext|>")


def dropping(folder: Path) -> None:
    byte_level(folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["model"]["dropout"] = 0.1
    (folder / "tokenizer.json").write_text(json.dumps(saved))


def without_vocabulary(folder: Path) -> None:
    (folder / "vocab.json.old").touch()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')


def with_code(folder: Path) -> None:
    byte_level(folder, auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own")


KINDS: dict[str, Callable[[Path], Any]] = {
    "byte-level BPE (GPT-2)": byte_level,
    "byte-level BPE with BOS (Llama 3)": llama_3,
    "byte-level BPE of a class (Qwen 2)": qwen,
    "BPE with byte fallback (Llama 2, Mistral)": byte_fallback,
    "the same, legacy, BOS and EOS": lambda folder: byte_fallback(
        folder, add_eos_token=True, legacy=True
    ),
    "the same, without prefix space": lambda folder: byte_fallback(
        folder, add_prefix_space=False, legacy=False
    ),
    "Unigram with a normalizer (T5)": unigram,
    "WordPiece (BERT), cleans up": word_piece,
    "WordLevel": word_level,
    "tiktoken.model alone": tiktoken,
    "tokenizer.model alone, BPE": lambda folder: sentence_piece(folder, "bpe"),
    "tokenizer.model alone, Unigram": lambda folder: sentence_piece(folder, "unigram"),
    "vocab.json and merges.txt, prefix space": vocab_and_merges,
    "truncation left on": truncating,
    "padding left on": padding,
    "tokens in added_tokens_decoder, extra_special_tokens": late_tokens,
    "tokens in added_tokens.json, additional_special_tokens": listed_tokens,
    "tokens that strip, single words, normalized": added_tokens,
    "split_special_tokens": lambda folder: byte_level(folder, split_special_tokens=True),
}
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "dropout": (
        dropping,
        "its tokenizer.json has dropout=0.1, with which a text has other ids each time; set it to null",
    ),
    "no vocabulary": (
        without_vocabulary,
        "it has no vocabulary for Qwen2Tokenizer, which needs one of merges.txt, ",
    ),
    "code of its own": (
        with_code,
        "AutoTokenizer of transformers cannot read it: ValueError: its tokenizer needs code of "
        "the repository",
    ),
    "nothing": (
        lambda folder: None,
        "holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json or the like)",
    ),
    "not JSON": (
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        "AutoTokenizer of transformers cannot read it: JSONDecodeError",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_equal_those_of_autotokenizer(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path)
    tokenizer = tokenizer_of(str(tmp_path), "model.path")
    reference = AutoTokenizer.from_pretrained(tmp_path)
    added_ends = reference("").input_ids.count(reference.eos_token_id)
    for text in [*CORPUS, "x".join(reference.get_added_vocab())]:
        ids = reference(text, add_special_tokens=False).input_ids
        assert (
            tokenizer.encode_text(text, special_tokens=True)
            == ids
            == tokenizer.encode_prompt(text, rendered=True)
        )
        reference_ids = reference(text).input_ids
        assert tokenizer.encode_prompt(text) == reference_ids[: len(reference_ids) - added_ends]
        assert tokenizer.decode_all(ids) == reference.decode(
            ids, clean_up_tokenization_spaces=False
        )
        assert tokenizer.decode(ids) == reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert (
            tokenizer.encode_text(text)
            == reference(text, add_special_tokens=False, split_special_tokens=True).input_ids
        )
    assert tokenizer.bos_token == reference.bos_token
    assert tokenizer.eos_ids[:1] == (reference.eos_token_id,)
    if not reference.split_special_tokens:
        for name, number in reference.get_added_vocab().items():
            assert tokenizer.token_id(name) in (
                number,
                None if number == tokenizer.unknown_id else number,
            )


# Marks of families that are special tokens, and a turn: what it thinks, and its answer.
TURNS = {
    "gpt-oss": "<|channel|>analysis<|message|>@<|end|><|start|>assistant<|channel|>final<|message|>",
    "magistral": "[THINK]@[/THINK]",
    "kimi_k3": "<|open|>think<|sep|>@<|close|>think<|sep|><|open|>response<|sep|>",
    "seed_oss": "<seed:think>@</seed:think>",
    "hunyuan": "<think:opensource>@</think:opensource>",
    "ernie": "<think>@</think><response>",
    "minimax_m3": "<mm:think>@</mm:think>",
    "gemma_4": "<|channel>thought\n@<channel|>",
    "apertus": "<|inner_prefix|>@<|inner_suffix|>",
    "command_a": "<|START_THINKING|>@<|END_THINKING|><|START_TEXT|>",
    "inkling": "<|content_thinking|>@<|end_message|><|content_text|>",
    "glm": "It is @?<|begin_of_box|>",
}
AFTER = {
    "kimi_k3": "<|close|>response<|sep|>",
    "ernie": "</response>",
    "command_a": "<|END_TEXT|>",
    "glm": "<|end_of_box|>",
}
HIDDEN = ["<|pad|>", "<|end|>", "<|start|>", "<|end_message|>", "<tool_call>"]


@pytest.mark.parametrize("name", TURNS)
def test_turn_keeps_special_tokens_that_mark_thinking(name: str, tmp_path: Path) -> None:
    turn = TURNS[name]
    marks = re.findall(r"<\|?\w+\|?>|</?\w+:?\w*>|\[/?THINK\]", turn + AFTER.get(name, ""))
    byte_level(tmp_path, *dict.fromkeys([*marks, *HIDDEN]))
    tokenizer = tokenizer_of(str(tmp_path), "model.path")
    for thought, answer, score in ("6", "5", 1.0), ("5", "6", 0.0):
        text = turn.replace("@", rf"so \boxed{{{thought}}}") + answer + AFTER.get(name, "")
        ids = tokenizer.encode_text(f"<|pad|>{text}<|endoftext|>", special_tokens=True)
        transcript = Transcript(Prompt(0, [5], "", "5"), tokenizer, max_tokens=1000)
        transcript.add_policy(Completion(ids, [-1.0] * len(ids), [1] * len(ids), "stop"))
        response = transcript.to_score.response
        assert math_reward(response, "5") == score, response
        assert not [token for token in (*HIDDEN, "<|endoftext|>") if token in response]
        cut = response[: response.index(thought) + len(thought) + 1]
        assert name == "glm" or math_reward(cut, thought) == 0.0, "the thinking has not ended"


def test_turn_hides_a_mark_that_ends_the_text(tmp_path: Path) -> None:
    byte_level(tmp_path, "</answer>")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    tokenizer = tokenizer_of(str(tmp_path), "model.path")
    assert tokenizer.decode_turn(tokenizer.encode_text("5</answer>", special_tokens=True)) == "5"


def test_family_without_a_config_class_in_transformers_is_read(tmp_path: Path) -> None:
    byte_level(tmp_path)
    shutil.copy(Path(__file__).parents[2] / "configs/models/kimi-k2/config.json", tmp_path)
    assert tokenizer_of(str(tmp_path), "model.path").encode_text(
        "<|im_end|>", special_tokens=True
    ) == [1]


@pytest.mark.parametrize("kind", REFUSED)
def test_other_tokenizers_are_refused_with_one_message(kind: str, tmp_path: Path) -> None:
    make, reason = REFUSED[kind]
    make(tmp_path)
    with pytest.raises(ConfigError) as error:
        tokenizer_of(str(tmp_path), "model.path")
    [problem] = error.value.problems
    assert problem.startswith(f"model.path={tmp_path}: {reason}")
