"""Finds the final answer in a text, in linear time. It neither parses nor evaluates expressions."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator

MAX_TEXT_CHARS = 1 << 18  # an answer must be among this many last characters
MAX_ANSWER_CHARS = 512
_MAX_BOXES = 8  # most boxes that are joined to the last one

_BOXES = ("\\boxed", "\\fbox", "\\framebox")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BLANKS = r"(?:[\s$]|\\[()\[\]]|\\q?quad(?![a-z]))*"
_BETWEEN_BOXES = re.compile(  # "x = \\boxed{1} and x = \\boxed{2}" is one answer: the list of both
    _BLANKS
    + r"(?:,|;|(?:,\s*)?(?:[a-z]+ )?(?:and|or)\b|(?:,\s*)?\\text\s*\{[^{}]{0,30}\b(?:and|or)\s*\})"
    + rf"{_BLANKS}(?:[A-Za-z]_?\w?\s*=\s*)?{_BLANKS}"
)
_UNBRACED = re.compile(r"[^\s${}\\]{0,64}")
_PHRASE = re.compile(
    r"answer(?:\*\*|__|[\"'])?(?:\s{1,3}is\b|\s{0,3}[:=])|\[answer\]|答案(?:是|为|[:：])"
    r"|(?P<weak>[\"'](?:\w{1,24}_)?(?:ans|result|solution|output|final|value)[\"']\s{0,3}:)"
    r"|(?:\A|\n)[#*_ ]{0,8}(?:final\s)?answer[*_ ]{0,4}(?=\n)",  # a heading
    re.IGNORECASE,
)
_JSON_VALUE = re.compile(
    r"\s*(?:\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'|(\[[^\[\]]*\]|[^\"',}\]\s]+))\s*[,}]"
)
# Tags around an answer. Those of WEAK count only if no other answer follows: <output> may be a
# program's, <response> may enclose the explanation too.
_WEAK = ("output", "response", "result", "final", "value")
_ENCLOSING_NAME = rf"answers?|ans|final[ _-]?(?:answer|result|response)|solution|{'|'.join(_WEAK)}"
_ENCLOSING = re.compile(
    rf"(?P<begin><\s*({_ENCLOSING_NAME})(?:\s[^<>]{{0,80}})?>|\[(ANSWER)\]|<\|begin_of_(box"
    rf"|solution)\|>"
    r"|<\|START_(TEXT|RESPONSE)\|>|<\|open\|>(response)<\|sep\|>)"
    rf"|<\s*/\s*({_ENCLOSING_NAME})\s*>|\[/(ANSWER)\]|<\|end_of_(box|solution)\|>"
    r"|<\|END_(TEXT|RESPONSE)\|>|<\|close\|>(response)<\|sep\|>",
    re.IGNORECASE,
)
# Where thinking begins and ends, in the spellings of models, of their parsers in SGLang
# (srt/parser/reasoning_parser.py) and of prompts.
_THINKING_TAG = (
    r"(?:[a-z]\w{0,15}[:|_])?(?:think(?:ing)?|thoughts?|reason(?:ing)?|analysis|reflections?"
    r"|scratch_?pad|monologue|cot|plan|draft|brainstorm|critique|verify|internal)(?:[_:]\w{1,15})?"
)
_HARMONY = r"[^<>]{0,80}(?:<\|constrain\|>[^<>]{0,20})?<\|message\|>"
THINKING_BEGINS = re.compile(
    rf"<\s*\|?(?!end){_THINKING_TAG}(?:\s[^<>]{{0,80}})?\|?>|\[THINK(?:ING)?\]|◁think▷"
    rf"|<\|begin_of_thought\|>|<\|START_THINKING\|>"
    r"|<\|inner_prefix\|>|<\|content_thinking\|>|<\|channel>thought|<\|open\|>think<\|sep\|>"
    rf"|(?:assistant)?<\|channel\|>(?:analysis|commentary){_HARMONY}|to=self<\|message\|>",
    re.IGNORECASE,
)
_THINKING_ENDS = re.compile(
    rf"<\s*\|?/\s*{_THINKING_TAG}\s*\|?>|\[/THINK(?:ING)?\]|◁/think▷|<\|end_of_thought\|>"
    rf"|<\|END_THINKING\|>"
    r"|<\|inner_suffix\|>|<\|content_text\|>|<channel\|>|<\|close\|>think<\|sep\|>"
    rf"|<\|channel\|>final{_HARMONY}|to=user<\|message\|>",
    re.IGNORECASE,
)
_THINKING = re.compile(
    rf"(?P<begin>{THINKING_BEGINS.pattern})|{_THINKING_ENDS.pattern}", re.IGNORECASE
)
# Tokens of which only several together are a mark.
_PARTS_OF_MARKS = (
    "<|channel|>", "<|constrain|>", "<|message|>", "<|channel>", "<channel|>",
    "<|open|>", "<|close|>", "<|sep|>",
)  # fmt: skip
_QUOTE_BEFORE = re.compile(r"[`\"']\Z")
_QUOTE_BEHIND = re.compile(r"[`\"']")
_NAMED_BEFORE = re.compile(r"\b(?:and|or|with|the|a|an|my|write|by|before|after|until|closing) \Z")
_NAMED_BEHIND = re.compile(r" (?:tag|mark|block|token|section|element|delimiter|marker)s?\b")
_BEFORE_AMID = re.compile(r"[\w,`\"'(] ?\Z")
_BEHIND_AMID = re.compile(r"[`\"'),.;:]| [a-z]")
# Of HTML, but not what is escaped twice.
_ENTITY = re.compile(
    r"&(?!amp;[#\w]{1,9};)(?:[A-Za-z]{2,8}[1-4]{0,2}|#\d{1,6}|#[xX][\dA-Fa-f]{1,5});"
)
_ESCAPED_MARK = re.compile(
    rf"&lt;\s*\|?/?\s*{_THINKING_TAG}(?:\s[^<>&]{{0,80}})?\|?&gt;", re.IGNORECASE
)
_END_OF_TURN = re.compile(
    r"(?:\s*(?:<\|(?:im_end|im_start|endoftext|end_of_text|eot_id|end|return)\|>\w{0,16}"
    r"|</s>))+\s*\Z"
)
# Full-width and mathematical characters. Unicode had some letters before it gave them a block.
_DRESSED = re.compile("[\uff01-\uff5e\U0001d400-\U0010ffffℊℋℌℎℐℑℒℓℛℜℨℬℭℯℰℱℳℴ]")
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u2060\ufeff"
_WITHOUT_INVISIBLE = dict.fromkeys(map(ord, _INVISIBLE))
_MANY_BLANKS = re.compile(rf"[\s{_INVISIBLE}]{{64,}}+")
_DOUBLED = re.compile(  # LaTeX that was escaped twice; in a matrix \\\\ ends a row
    r"(?<!\\)\\\\(?=(?:boxed|[cdt]?frac|sqrt|left|right|leq?|geq?|pi|cdot|times|infty|cup|pm)"
    r"(?![A-Za-z]))"
)
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?\\?%?"
_RUNNING_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:\.\d+)?", re.ASCII)
_MATH_WORDS = r"(?!(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|and|or)\b)"
_NUMBER_WITH_UNIT = re.compile(
    rf"(-?{_NUMBER})\s+({_MATH_WORDS}[A-Za-z]{{2,}}[A-Za-z "
    rf".]*(?:/[A-Za-z]+)?)(?:\^\{{?[23]\}}?|[\u00b2\u00b3])?",
    re.ASCII,
)
_SENTENCE = re.compile(r"\b(?:is|are|was|were|or|and)\b")  # words that mark a sentence, not a unit
_FEW_WORDS = re.compile(r"[A-Za-z][a-z'-]*(?: [A-Za-z][a-z'-]*){0,2}")
# A free-standing number: in a sentence, after "=" or a currency sign, but not part of an
# expression, a list or a name.
_START = r"(?:^|(?<=[=\s*_\"'`\u3001-\u9fff\uac00-\ud7af\uff0c\uff1a])|(?<=[A-Za-z]:))(?:\\?[$€£]|\\\(|\$\$)?"
_END = r"(?=(?:[a-z]{1,3}[²³])?(?:\\?[$€£]|\\\)|\*\*|[.,;:?\"'`°])*(?:\s|$))"
_FREE_NUMBER = re.compile(rf"{_START}(-?{_NUMBER}){_END}", re.ASCII)
_BEFORE_IT = re.compile(
    r"(?:[-+*/^×·÷(\[{<>≤≥]|\\[A-Za-z]+|\d\s*[,;]|\b(?:or|and)|(?:^|\s)\d[\d.,]*)\s*\Z"
)
_BEHIND_IT = re.compile(r"\s*(?:[-+*/^×·÷=<>≤≥]|\\(?!\)|\]|%|\$)|\d)")
_BOLD = re.compile(r"(?<!\w)\*\*([^*]+)\*\*(?!\w)")
_PROSE = re.compile(rf"(?<![\\A-Za-z]){_MATH_WORDS}[^\W\d_]{{2,}}")
_CLOSING = ("$$", "\\]", "```", "*", "__")
# "The answer is" may end its line
_BEHIND_PHRASE = re.compile(r"[:*_ \t]*(?:(?:[\s*_$:>`]|\\\[|\\\()*\n)?[:*_> \t]*")
_WRAPPERS = (
    ("$$", "$$"),
    ("$", "$"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("**", "**"),
    ("__", "__"),
    ("`", "`"),
)
_THOUSANDS = re.compile(
    r"(?<=\d)(?:,?\\!\s?|\\[,;: ]|\s?\{,\s?\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"
)
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_WITH_BLANKS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?", re.ASCII)
# Fonts of words, which may be units, and fonts of variables. Sizes, styles and colors say nothing.
UPRIGHT = r"\\(?:text(?:bf|it|rm|sf|tt|normal|up|md|sc|sl)?|mathrm|mbox|operatorname\*?)"
# Of a letter that names a set of numbers, this font is its meaning: the real numbers.
_UPRIGHT_GREEK = re.compile(
    r"\\(?:up|Up|sym)(?=(?:alpha|beta|gamma|delta|lambda|mu|omega|phi|pi|sigma|tau|theta)\b)"
)
_OTHER_BLACKBOARD = re.compile(r"\\(?:mathds|mathbbm|symbb|Bbb)(?![A-Za-z])")
_BLACKBOARD = r"mathbb(?!\s*\{?\s*[NZQRCPHF](?![A-Za-z]))"
_SLANTED = (
    r"\\(?:math(?:bf|it|sf|tt|normal|bfit|sfit|bfsf|fr?ak|(?:bf)?(?:cal|scr|frak)|op|ord|inner"
    r"|bin|rel"
    r"|open|close|punct)|sym(?:bf|it|sf|tt|normal|bfit|sfit|bfsf|(?:bf)?(?:cal|scr|frak)|literal)"
    rf"|{_BLACKBOARD}|ensuremath|boldsymbol|unboldmath|boldmath|bold|bm|pmb|frak|cal|mit|oldstyle"
    r"|bf|it|sf|tt|sl|em|(?:bf|md)series|(?:it|sl)shape|(?:sf|tt)family)"
)
_LOOK = re.compile(
    rf"(?:(?:{_SLANTED}|\\(?:tiny|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge"
    r"|(?:display|text|script|scriptscript)style))(?![A-Za-z])\s*"
    r"|\\(?:(?:text|math)?color|colorbox|fcolorbox\s*\{[^{}]*\}|style|class)\s*"
    r"(?:\[[^\[\]]*\])?\s*\{[^{}]*\}\s*"
    r"|\\bbox\s*\[[^\[\]]*\]\s*|\\[hv]space\*?\s*\{[^{}]*\}\s*|\\(?:math)?strut(?![A-Za-z])\s*)+"
    r"(?:\{\s*([-+\d.,/]+|[A-Za-z]+)\s*\})?",
    re.ASCII,
)
_MAY_TAKE_ARGUMENT = re.compile(r"[\^_})A-Za-z]\Z")
_DIGITS_UPRIGHT = re.compile(
    rf"(?<![\^_}})A-Za-z]){UPRIGHT}\s*\{{(\s*-?\d[\d.,/]*\s*)\}}", re.ASCII
)
_OLD_UPRIGHT = re.compile(
    r"(?<![\^_\]}A-Za-z])\{\s*\\(?:rm|rmfamily|upshape)(?![A-Za-z])\s*([A-Za-z]+)\s*\}"  # {\rm cm}
    r"|\\(?:rm|rmfamily|upshape|mathup|symup|symrm|hbox)(?![A-Za-z])\s*([A-Za-z]+|\{?)"
)
_UPRIGHT_LETTER = re.compile(rf"({UPRIGHT})(?![A-Za-z])\s*([A-Za-z0-9])")
# removed if around the whole answer
_FONT = re.compile(rf"(?:(?:{UPRIGHT}|\\(?:underline|emph|boxed|fbox))\s*)?\{{")
# TeX's spaces around an answer; the last one may have lost its blank
_OUTER_SPACES = re.compile(r"^\s*(?:\\[,;:! ]\s*)+|(?:\\[,;:! ]\s*)+$|(?<!\\)\\$")
_SQUARE = re.compile(
    r"(?<!\s)(?:\s|~|\\[ "
    r",;:!]|\\q?quad)*(?:\\(?:square|blacksquare|Box|qed|checkmark)"
    r"|[\u2705\u2713\u2714\u25a0\u25a1])\Z"
)
_SPAN = re.compile(  # inline math
    r"(?<!\\)\$\$?(?=\S)((?:[^$\\]|\\.)*?)(?<=\S)(?<!\\)\$\$?(?!\d)|\\\((.*?)\\\)|\\\[(.*?)\\\]"
    r"|\$ (\\[^$]*) \$"
)
_BETWEEN_SPANS = re.compile(r"\s*(?:,|;|(?:,\s*)?(?:and|or))\s*")
_VALUE = re.compile(rf"{_SPAN.pattern}|(?<![\w^{{_.])-?\d+(?:[.,/]\d+)*")
# Of sentences behind "Answer:".
_JUDGES = re.compile(
    r"\W{0,8}(?:yes|no|not|none|neither|true|false|unknown|nope|wrong|incorrect|let|suppose)\b",
    re.IGNORECASE,
)
_IN_LIST = r"(?<=[\d$)}])[,;]\s+(?:(?:and|or)\s+)?(?=\\?[-$\d(])"  # "3, 4, and 5"
_INTRODUCTION = re.compile(
    r"\A\W{0,8}(?:if|when|after|before|for|with|of|in|at|on|since|because|given|as)\b"
    rf"(?:[^,]|{_IN_LIST}){{0,200}},\s+",
    re.IGNORECASE,
)
_VERB = re.compile(r"\b(?:is|are|was|were|equals|makes|totals|(?:comes?|amounts?) to)\b|=")
_JOINS = re.compile(
    r"\b(?:and|or)\b(?!\s+\\?[-$\d])|\b(?:but|while|whereas|so|then|not)\b", re.IGNORECASE
)
# outside formulas and lists of values
_PARTS = re.compile(rf"(?!{_IN_LIST})[,;](?!\d)(?![^$]*\$(?:[^$]*\$[^$]*\$)*[^$]*\Z)")
_BEHIND_SPAN = re.compile(r"[^\d$\\=<>^]*")  # a unit, a remark
_STATED = re.compile(r"(?:\b(?:is|are|be|equals?|to)\s+|=\s*|:\s+)(?=\S)")
_LEADING = re.compile(  # "16, not 14", "14 (fourteen)": the part before the remark
    rf"(?P<number>\\?\$?-?{_NUMBER}|\([A-J]\))(?:\s+(?!(?:or|and|to)\b)[A-Za-z]{{2,}})?\s*(?:[,;]"
    rf"|\s[\u2013\u2014-]\s|[(\[]\s*(?=[A-Za-z]{{2}}))"
    r"(?!\s*(?:or|and|\d|[-+$\\(]))(?=\s*[A-Za-z])"
)
_OPTION = re.compile(r"\A(?:option|choice)\s+(?=\(?[A-J]\b)", re.IGNORECASE)
_CLAUSE = re.compile(
    r"=|(?<!\d)[,;:.!?]|[,;:.!?](?!\d)|\b(?:but|so|hence|thus|therefore|then|rather|which|it's)\b",
    re.IGNORECASE,
)
# "I think it's not 72", "at least 72", "less than 72": a clause that denies or bounds a value does
# not state one.
DENIED = re.compile(
    r"\b(?:not|never|neither|nor|cannot|no\s+longer|isn|aren|wasn|doubt|unlikely|impossible|wrong"
    r"|incorrect|false"
    r"|at\s+(?:least|most)|than|fewer|up\s+to|exceeds?|either|whether|if|unless|without"
    r"|close\s+to|nearly|almost|too\s+(?:large|small|big|low|high|many|few|much|little))\b"
    r"|n['\u2019]t\b",
    re.IGNORECASE,
)
_REJECTED = re.compile(
    r"\b(?:wrong|incorrect|too\s+\w+|not\s+(?:right|correct|possible|allowed|the))\b", re.IGNORECASE
)  # a remark on a value
_DOUBTED = re.compile(
    r"(?:\b(?:doubt|unlikely|impossible|false|wrong|incorrect|deny|denies)|\b(?:not|never)\s+"
    r"(?:believe|think|sure|true|certain|say|the\s+case)"
    r"|n['\u2019]t\s+(?:believe|think|sure|true|certain|say|know))\b(?:(?!\b(?:but|so|hence|thus"
    r"|therefore)\b)[^.;])*\Z"
    # "I cannot determine if the answer is 18"
    r"|\b(?:if|whether)\s+(?:(?:the|my|your|final|correct|right)\s+)*\Z",
    re.IGNORECASE,
)
_APART = re.compile(
    r"\b(?:by|of|over|plus|minus|times|from|than|divided|if|when|where|for|mod|modulo|until|since"
    r"|because|as)\s*\Z",
    re.IGNORECASE,
)
_NUMBER_OF_DEGREES = re.compile(
    rf"\A(-?{_NUMBER})\s*(?:\^\s*\\circ|\^\s*\{{\s*\\circ\s*\}}|\\degree|°|\u00ba)\Z"
)
_PRODUCT_WITH_BOX = re.compile(r"[\s$(\[\\]*-?\d[\d\s.,*/^+-]*\Z")


def plain(text: str) -> str:
    """The text in the characters that the graders know: composed (NFC), without invisible ones, and
    full-width and mathematical letters and digits as plain ones. Commands that were escaped twice
    have one backslash. LaTeX has few fonts. What is escaped as HTML is what it stands for.
    """
    text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    if not text.isascii():
        composed = unicodedata.normalize("NFC", text).translate(_WITHOUT_INVISIBLE)
        text = _DRESSED.sub(lambda letter: unicodedata.normalize("NFKC", letter[0]), composed)
    # \\boxed, \\frac read as JSON or Python
    text = re.sub(r"[\b\f](?=[a-z])", lambda lost: {"\b": "\\b", "\f": "\\f"}[lost[0]], text)
    return _without_looks(_DOUBLED.sub(r"\\", text))


def _without_looks(text: str) -> str:
    """LaTeX without sizes, colors and the fonts of variables. An upright font has braces."""
    if "\\" not in text:
        return text
    text = _UPRIGHT_GREEK.sub(r"\\", _OTHER_BLACKBOARD.sub(r"\\mathbb", text))
    text = _LOOK.sub(_without_look, text)
    text = _OLD_UPRIGHT.sub(_new_upright, text)
    return _DIGITS_UPRIGHT.sub(r"\1", _UPRIGHT_LETTER.sub(r"\1{\2}", text))


def _without_look(look: re.Match[str]) -> str:
    """What a font, size or color applies to: 12 of \\mathbf{12}, in braces where it may be an
    argument.
    """
    before = look.string[max(0, look.start() - 1) : look.start()]
    content = look[1] or ""
    if not _MAY_TAKE_ARGUMENT.match(before):
        return content
    is_character = not content or (content.isalpha() and len(content) == 1)
    if is_character and before not in ("^", "_"):
        return f" {content}" if before.isalpha() else content
    return f"{{{content}}}" if content else ""


def _new_upright(font: re.Match[str]) -> str:
    """{\\rm cm} and \\hbox{cm} in the form of \\mathrm{cm}; digits need no font."""
    content = font[1] or font[2]
    if content == "{":
        return r"\mathrm{"
    return rf"\mathrm{{{content}}}" if content else ""


def odd_character(text: str) -> str | None:
    """The first control, format (bidirectional), private or unassigned character that is no blank;
    None if there is none.
    """
    if text.isascii() and text.isprintable():
        return None
    for character in text:
        if unicodedata.category(character).startswith("C") and character not in " \t\r\n":
            return character
    return None


def after_thinking(text: str) -> str:
    """What the response says last outside its thinking; nothing of thinking that never ended.

    The prompt may have begun the thinking, so an end without a beginning counts too. A model that
    has learned from web pages may write &lt;think&gt;, which counts as <think>.
    """
    text = _ESCAPED_MARK.sub(lambda mark: html.unescape(mark[0]), text)
    pieces: list[str] = []
    start = 0
    thinks = False
    for mark in _real_marks(_THINKING, text):
        if not mark["begin"]:
            if not thinks:
                pieces.clear()
            thinks = False
            start = mark.end()
        elif not thinks and not _is_amid_sentence(mark):
            pieces.append(text[start : mark.start()])
            thinks = True
    if not thinks:
        pieces.append(text[start:])
    for piece in reversed(pieces):
        if piece.strip():
            return piece
    return ""


def _real_marks(marks: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The marks in a text, without those that it names: "`<think>`", "in <think> tags", "with
    </think>".
    """
    for mark in marks.finditer(text):
        before = text[max(0, mark.start() - 16) : mark.start()]
        behind = text[mark.end() : mark.end() + 16]
        is_quoted = _QUOTE_BEFORE.search(before) and _QUOTE_BEHIND.match(behind)
        is_named = not mark["begin"] and _NAMED_BEFORE.search(before)
        if not (is_quoted or is_named or _NAMED_BEHIND.match(behind)):
            yield mark


def _is_amid_sentence(mark: re.Match[str]) -> bool:
    """Whether a sentence goes on behind the mark, as in "I use <think> when I reason"."""
    before = mark.string[max(0, mark.start() - 2) : mark.start()]
    return bool(_BEFORE_AMID.search(before) and _BEHIND_AMID.match(mark.string, mark.end()))


def thinking_in(prompt: str) -> str:
    """The mark that begins thinking, if the prompt ends with it, as chat templates of thinking
    models do; else empty.
    """
    begin = re.search(rf"(?:{THINKING_BEGINS.pattern})\s*\Z", prompt[-256:], re.IGNORECASE)
    return begin[0] if begin else ""


def is_of_mark(token: str) -> bool:
    """Whether a token is a mark of thinking or of an answer, or a part of one."""
    marks = (_THINKING, _ENCLOSING)
    return token in _PARTS_OF_MARKS or any(mark.fullmatch(token) for mark in marks)


_FORM = re.compile(
    r"(<([A-Za-z][\w-]*)>)[^<>]{0,80}(</\2>)|(\[([A-Z]+)\])[^\[\]]{0,80}(\[/\5\])|(\"\w*(?:answer"
    r"|result|solution)\w*\"\s*:)",
    re.IGNORECASE,
)


def answer_forms(prompt: str) -> list[tuple[str, str]]:
    """What stands before and behind an answer in each form for which the prompt may ask: tags other
    than of thinking, a key of JSON.
    """
    forms = []
    for match in _FORM.finditer(prompt):
        if match[7]:
            forms.append((f'{{{match[7]} "', '"}'))
        elif not THINKING_BEGINS.match(match[0]):
            forms.append((match[1] or match[4], match[3] or match[6]))
    return forms


def final_part(text: str) -> str:
    """The part of a response in which its final answer must stand: after the thinking, and among
    the last MAX_TEXT_CHARS characters, where a run of many blanks counts as one.
    """
    end = _MANY_BLANKS.sub(lambda blanks: "\n" if "\n" in blanks[0] else " ", after_thinking(text))
    turn = _END_OF_TURN.search(end, max(0, len(end) - MAX_ANSWER_CHARS))
    if turn:
        end = end[: turn.start()]
    return plain(end[-MAX_TEXT_CHARS:])


def answers(text: str, is_marked: bool = False) -> list[str]:
    """What the final answer of a text may be, cleaned: what it marks, else its last line, or the
    number or expression that line states.

    Of a sentence that is marked (`is_marked`: as a whole), only `_values_of`.
    """
    enclosed = _enclosed(text)
    if enclosed is not None:
        return answers(enclosed, is_marked=True)
    marked = marked_answer(text)
    line = last_line(text) if marked is None else _whole_sentence(text)
    if odd_character(line):
        return [marked] if marked else []
    if marked is None and not is_marked:
        candidates = [clean(line), last_number(line), last_expression(line)]
    elif marked is None or (marked and line):
        candidates = _values_of(line)
    else:
        candidates = [marked]
    return [answer for answer in dict.fromkeys(candidates) if answer]


def _values_of(sentence: str) -> list[str]:
    """All of what stands at the mark of an answer, such as "Answer:", and the value that it states
    as a sentence.

    That is its first value if only a remark follows ("12, see page 34"), its only value ("She left
    3 hours ago"), or the one behind its only verb if it ends there ("20% of 45 is 9"). A sentence
    with several statements or with "yes" or "no" states none.
    """
    full_text = _without_remark(sentence)
    if not _PROSE.search(full_text) or _JUDGES.match(sentence):
        return [full_text]
    sentence = _INTRODUCTION.sub("", sentence) if len(_values_in(sentence)) > 1 else sentence
    values = _values_in(sentence)
    if _PARTS.search(sentence):
        return [full_text]
    if len(values) > 1:
        verbs = list(_VERB.finditer(sentence))
        gap = sentence[verbs[0].end() : values[-1].start()] if len(verbs) == 1 else ""
        ends_in_value = len(verbs) == 1 and verbs[0].end() <= values[-1].start()
        if not ends_in_value or gap.strip(" *_$:") or _JOINS.search(sentence):
            return [full_text]
    return [full_text, clean(sentence), last_number(sentence), last_expression(sentence)]


def _values_in(sentence: str) -> list[re.Match[str]]:
    """Numbers and formulas, but no names such as $n$; of a list in formulas only the first."""
    values: list[re.Match[str]] = []
    for value in _VALUE.finditer(sentence):
        is_name = not re.search(r"\d|\\[a-z]|[-+=]", value[0])
        in_list = values and _BETWEEN_SPANS.fullmatch(sentence, values[-1].end(), value.start())
        if not is_name and not (in_list and "$" in value[0]):
            values.append(value)
    return values


def marked_answer(text: str) -> str | None:
    """The answer that the text marks, cleaned: between its last tags, such as <answer>, else in its
    last \\boxed{}, else after its last "####" (GSM8K), else after its last "answer is", "Answer:"
    or "answer" as a key of JSON.

    None if it marks none; empty if the marked answer is empty, too long or never closed.
    """
    enclosed = _enclosed(text)
    if enclosed is not None:
        inner = marked_answer(enclosed)
        return clean(enclosed) if inner is None else inner
    boxes = boxed_answers(text)
    if boxes:
        return ", ".join(boxes) if all(boxes) else boxes[-1]
    unopened = _before_lone_brace(text)
    if unopened:
        return unopened
    start = text.rfind("####")
    if start >= 0:
        return clean(_line(text, start + len("####")))
    sentence = _sentence(text)
    return sentence and _without_remark(sentence)


def _before_lone_brace(text: str) -> str:
    """What a response begins with that only closes a box, or an object of JSON, which the prompt
    has opened; empty otherwise.
    """
    depth = 0
    for i, character in enumerate(text[:MAX_ANSWER_CHARS]):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return clean(text[:i].strip().strip("\"'"))
    return ""


def _whole_sentence(text: str) -> str:
    """The sentence after "Answer:", as in "Answer: The total is 34."; empty if another mark counts,
    such as "The answer is".
    """
    phrase = _last_phrase(text)
    if not phrase or phrase[0].endswith("is") or "####" in text or boxed_answers(text):
        return ""
    return _sentence(text) or ""


def _last_phrase(text: str) -> re.Match[str] | None:
    """The last "answer is" or its like.

    A key such as "result" counts only in an object behind which no digit follows.
    """
    weak_counts = not re.search(r"\d", text[text.rfind("}") + 1 :])
    phrases = [phrase for phrase in _PHRASE.finditer(text) if weak_counts or not phrase["weak"]]
    return phrases[-1] if phrases else None


def _enclosed(text: str) -> str | None:
    """What the last tags enclose; None without tags, empty if the last one is never closed.

    The prompt may have opened the first, so it encloses what comes before a lone closing tag.
    """
    openings: dict[str, re.Match[str]] = {}
    opened: set[str] = set()
    enclosed: str | None = None
    weak: str | None = None
    end = weak_end = 0
    for mark in _real_marks(_ENCLOSING, text):
        tag = re.sub(r"[ _-]", "", next(filter(None, mark.groups()[1:]))).casefold()
        if mark["begin"]:
            openings[tag] = mark
            opened.add(tag)
            continue
        opening = openings.pop(tag, None)
        if opening is None and tag in opened:
            continue
        start = opening.end() if opening else 0  # the prompt has opened it
        opened.add(tag)
        if tag in _WEAK:
            weak = text[start : mark.start()]
            weak_end = mark.end()
        else:
            enclosed = text[start : mark.start()]
            end = mark.end()
    if enclosed is None:
        return weak if weak is not None and not _answers_again(text[weak_end:]) else None
    for tag, opening in openings.items():
        if tag not in _WEAK and opening.start() > end and not _is_amid_sentence(opening):
            return ""
    return enclosed


def _answers_again(text: str) -> bool:
    return bool(re.search(r"\d", text)) or marked_answer(text) is not None


def _sentence(text: str) -> str | None:
    """What follows the last "answer is" or its like, up to the end of the sentence or line; empty
    if that is in doubt.
    """
    phrase = _last_phrase(text)
    if phrase is None:
        return None
    if re.search(r"[\"']\s*:", phrase[0]):
        value = _JSON_VALUE.match(text, phrase.end())
        stated = next(filter(None, value.groups()), "") if value else ""
        return stated.strip("[]").replace("\\\\", "\\")
    if _DOUBTED.search(_line_before(text, phrase.start())):
        return ""
    behind = _BEHIND_PHRASE.match(text, phrase.end())
    assert behind is not None  # it may be empty
    return _line(text, behind.end()).split(". ")[0]


def last_line(text: str) -> str:
    """The last line that is not blank, cut from the left to the greatest length of an answer."""
    end = text.rstrip()[-MAX_ANSWER_CHARS:]
    inside = _without_closing(end)
    if "\n" in end[len(inside) :]:
        end = inside
    return end.rsplit("\n", 1)[-1]


def _without_closing(text: str) -> str:
    """The text without closing delimiters at its end.

    (A search from the left would take quadratic time.)
    """
    while True:
        mark = next((mark for mark in _CLOSING if text.endswith(mark)), None)
        shorter = text[: -len(mark)].rstrip() if mark else ""
        if not shorter:
            return text
        text = shorter


def last_number(text: str) -> str:
    """The last number of the last line, if the line is prose.

    Commas between groups of three digits are thousands separators.

    Empty if the number is part of an expression or a list, like the 5 in 2^5, (3, 5), 1e5 and
    \\frac{1}{5}.
    """
    line = _BOLD.sub(r"\1", last_line(text))
    if not _PROSE.search(line):
        return ""
    for match in reversed(list(_FREE_NUMBER.finditer(line))):
        if (
            _BEFORE_IT.search(line, 0, match.start())
            or _BEHIND_IT.match(line, match.end())
            or _denies(line, match.start(), match.end())
        ):
            return ""
        return match[1]
    return ""


def last_expression(text: str) -> str:
    """The expression that the last line states, cleaned, if the line is prose: "The value is
    $2\\sqrt3$.", "**Vertex: (-3, 4)**".

    Several in a row, as in "$3$ or $-3$", are a list. Empty if anything but a remark follows, or if
    the clause denies it.
    """
    line = _BOLD.sub(r"\1", last_line(text)).strip("* ")
    if not _PROSE.search(line):
        return ""
    spans = list(_SPAN.finditer(line))
    if spans:
        first = last = len(spans) - 1
        while first and _BETWEEN_SPANS.fullmatch(
            line, spans[first - 1].end(), spans[first].start()
        ):
            first -= 1
        start = spans[first].start()
        end = spans[last].end()
        behind = _BEHIND_SPAN.fullmatch(line, end)
        if (
            not behind
            or _APART.search(line, 0, start)
            or _BEFORE_IT.search(line, 0, start)
            or _denies(line, start, end)
        ):
            return ""
        return clean(
            ", ".join(clean("".join(filter(None, span.groups()))) for span in spans[first:])
        )
    stated = list(_STATED.finditer(line))
    if not stated or _denies(line, stated[-1].end(), len(line)):
        return ""
    expression = clean(line[stated[-1].end() :])
    return "" if _PROSE.search(expression) and not _FEW_WORDS.fullmatch(expression) else expression


def _denies(line: str, start: int, end: int) -> bool:
    """Whether the clause around a value in a sentence denies or bounds it."""
    clause_start = 0
    for mark in _CLAUSE.finditer(line, 0, start):
        clause_start = mark.end()
    after = _CLAUSE.search(line, end)
    clause_end = after.start() if after else len(line)
    return bool(
        DENIED.search(line, clause_start, start)
        or DENIED.search(line, end, clause_end)
        or _REJECTED.search(line, end)
    )


def _without_remark(answer: str) -> str:
    """What follows "the answer is", cleaned, without a remark such as ", not 14" or "(fourteen)"
    behind it.
    """
    answer = _OPTION.sub("", _BOLD.sub(r"\1", answer))
    leading = _LEADING.match(answer)
    if leading and not (
        _REJECTED.search(answer, leading.end()) or re.search(r"\bor\b", answer[leading.end() :])
    ):
        return clean(leading["number"])
    span = _SPAN.match(answer)
    if (
        span
        and not _REJECTED.search(answer, span.end())
        and re.match(r"\s*[,;(]\s*(?!or\b|and\b)[A-Za-z]{2}", answer[span.end() :])
    ):
        return clean("".join(filter(None, span.groups())))
    return clean(answer)


def last_running_number(text: str) -> str:
    """The last number of the last line, which is a list such as "7,7,6,7,2": every comma separates.

    Empty if there is none.
    """
    numbers = _RUNNING_NUMBER.findall(last_line(text))
    return numbers[-1] if numbers else ""


def clean(answer: str) -> str:
    """The answer without surrounding blanks, math delimiters, bold marks, final full stop, and a
    lone number's unit.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return ""
    before = None
    while answer != before:
        before = answer
        answer = (
            _OUTER_SPACES.sub("", answer)
            .strip()
            .removesuffix(".")
            .removesuffix("\u3002")
            .removesuffix("**")
            .removeprefix("**")
            .strip("` \t\r\n")
        )
        for opening, closing in _WRAPPERS:
            if (
                len(answer) >= len(opening + closing)
                and answer.startswith(opening)
                and answer.endswith(closing)
            ):
                answer = answer[len(opening) : -len(closing)]
    answer = _unwrapped(_SQUARE.sub("", answer))
    answer = (
        answer.removeprefix("=")
        .lstrip()
        .removeprefix("\\$")
        .removeprefix("$")
        .replace("\N{MINUS SIGN}", "-")
        .removesuffix(",")
    )
    answer = _DECIMAL_COMMA.sub(".", _THOUSANDS.sub("", answer))
    answer = _NUMBER_OF_DEGREES.sub(r"\1", answer)
    if _WITH_BLANKS.fullmatch(answer):
        return answer.replace(" ", "")
    with_unit = _NUMBER_WITH_UNIT.fullmatch(answer)
    if with_unit and not (_SENTENCE.search(with_unit[2]) or DENIED.search(with_unit[2])):
        return with_unit[1]
    return answer


def _unwrapped(answer: str) -> str:
    """The content of braces that enclose all of the answer, or of a font that does and holds more
    than words.
    """
    font = _FONT.match(answer)
    if font is None or not answer.endswith("}"):
        return answer
    if font[0] != "{" and not re.search(r"[\d\\,]", answer[font.end() :]):
        return answer
    depth = 1
    for character in answer[font.end() : -1]:
        depth += (character == "{") - (character == "}")
        if depth == 0:  # the brace closes before the end
            return answer
    return clean(answer[font.end() : -1]) if depth == 1 else answer


def boxed_answers(text: str) -> list[str]:
    """The content of the last box, cleaned.

    Contents of earlier boxes come before it if "and", "or" or a comma joins them to it. Empty list
    without a box; a box that is empty or never closed has an empty content.
    """
    last = _last_box(text)
    if last < 0:
        return []
    contents = [clean(_boxed(text, last))]
    start = last
    before = [box.start() for box in _BOX.finditer(text, max(0, last - MAX_ANSWER_CHARS), last)]
    for box in reversed(before[-_MAX_BOXES:]):
        content = _boxed(text, box)
        opening = _BOX.match(text, box)
        assert opening is not None
        end = opening.end() + len(content) + 2
        if not content or not (end == start or _BETWEEN_BOXES.fullmatch(text, end, start)):
            break
        contents = [clean(content), *contents]
        start = box
    return contents


def _line_before(text: str, end: int) -> str:
    """The text from the beginning of the line or sentence to `end`."""
    return text[max(0, end - MAX_ANSWER_CHARS) : end].rsplit("\n", 1)[-1].rsplit(". ", 1)[-1]


def _last_box(text: str) -> int:
    """Where the last box begins, or the box around it; -1 if there is none."""
    last = max(map(text.rfind, _BOXES))
    if last < 0 or not _BOX.match(text, last):  # not a box, or another command such as \\boxedfoo
        return -1
    around = _BOX.finditer(text, max(0, last - MAX_ANSWER_CHARS), last)
    for box in around:
        if box.end() + len(_boxed(text, box.start())) > last:
            return box.start()
    return last


def _line(text: str, start: int) -> str:
    """The text from `start` to the end of its line, cut just beyond the allowed length."""
    return text[start : start + MAX_ANSWER_CHARS + 1].split("\n", 1)[0]


def _boxed(text: str, start: int) -> str:
    """The content of the box at `start`; empty if the box is a factor of a product or not closed
    within the allowed length.
    """
    line = text[max(0, start - MAX_ANSWER_CHARS) : start].rsplit("\n", 1)[-1]
    box = _BOX.match(text, start)
    assert box is not None
    opening = box.end()
    if _PRODUCT_WITH_BOX.fullmatch(line):
        return ""
    if text[opening : opening + 1] != "{":  # \\boxed 5
        unbraced = _UNBRACED.match(text, opening)
        assert unbraced is not None  # it may be empty
        return unbraced[0]
    depth = 0
    for i, character in enumerate(text[opening : opening + MAX_ANSWER_CHARS]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[opening + 1 : opening + i]
    return ""


_LETTER = r"\(?([A-J])(?![A-Za-z0-9'])"
# more letters follow: then no letter is chosen
_HEDGED = r"\)?\s*(?:,|/|&|or\b|and\b)\s*\(?(?-i:[A-HJ]|I(?!\s+[a-z]))(?![A-Za-z])"
_STATEMENT = re.compile(
    rf"answer(?:\s{{1,8}}is)?\s{{0,8}}:?[\s*_$]{{0,16}}"
    rf"(?:\\boxed\{{)?(?:\\text(?:bf)?\{{)?\s{{0,8}}{_LETTER}(?!{_HEDGED})",
    re.IGNORECASE,
)
_PRONOUN = re.compile(r"\s+[a-z]")
_BOXED = re.compile(rf"(?:\\text(?:bf)?\{{)?\s*{_LETTER}\s*\)?[.:]?\s*\}}?")
_ALONE = re.compile(r"[\s*_$`(\[{]*([A-J])[\s*_$`)\]}.:]*")
_CHOICE_WITHIN = 4096  # the choice must be among this many last characters


def chosen_letter(text: str) -> str:
    """The letter that a response chooses: the whole last line, else the marked answer, else the
    last letter after "answer is" or "Answer:". Empty if there is none.

    MMLU-Pro's own extraction is laxer: the first "answer is", then any capital letter that stands
    alone (such as "I"), then a random one.
    """
    end = text[-_CHOICE_WITHIN:]
    enclosed = _enclosed(end)
    if enclosed is not None:
        end = enclosed
    alone = _ALONE.fullmatch(last_line(end))
    if alone:
        return alone[1]
    marked = _BOXED.fullmatch(marked_answer(end) or "")
    if marked:
        return marked[1]
    for statement in reversed(list(_STATEMENT.finditer(end))):
        if statement[1].isupper() and not (
            statement[1] == "I" and _PRONOUN.match(end, statement.end())
        ):
            return statement[1]
    return ""


def choice_reward(text: str, answer: str) -> float:
    return float(chosen_letter(final_part(text)) == answer.strip())
