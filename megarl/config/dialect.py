"""The one dialect of YAML in which settings are read and written: OmegaConf's, in which 1e5 is a
number and a date is a text.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

import yaml
from omegaconf._yaml import get_yaml_loader

_OmegaConfLoader: Any = get_yaml_loader()
_SPECIAL_KEYS = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")  # << and =
_NUMBER_OF_YAML_1_1 = re.compile(r"[-+]?(0[\d_]+|.*:.*)")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class RepeatedKey(yaml.MarkedYAMLError):
    """A mapping has two equal keys. YAML libraries keep the last one without a word."""

    def __init__(self, key: yaml.ScalarNode, first: yaml.ScalarNode):
        written = f", also as {first.value}" if first.value != key.value else ""
        super().__init__(
            problem=f"the key {key.value} is set twice{written}", problem_mark=key.start_mark
        )
        self.lines = first.start_mark.line + 1, key.start_mark.line + 1


class Loader(_OmegaConfLoader):
    """OmegaConf's loader.

    It also refuses repeated keys that are numbers, true, false or null; 1 equals 1.0 and true. And
    010 and 1:30 are texts, as in YAML 1.2, not YAML 1.1's 8 and 90.
    """

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        tag = super().resolve(kind, value, implicit)
        if tag in _NUMBERS and _NUMBER_OF_YAML_1_1.fullmatch(value):
            return "tag:yaml.org,2002:str"
        return tag

    def construct_document(self, node: yaml.Node) -> Any:
        self._check_keys(node, set())
        return super().construct_document(node)

    def _check_keys(self, node: yaml.Node, visited: set[yaml.Node]) -> None:
        if node in visited or isinstance(node, yaml.ScalarNode):
            return
        visited.add(node)
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self._check_keys(item, visited)
            return
        first: dict[Any, yaml.ScalarNode] = {}
        for key, value in node.value:
            self._check_keys(value, visited)
            if not isinstance(key, yaml.ScalarNode) or key.tag in _SPECIAL_KEYS:
                continue
            name = self.construct_object(key)
            if name in first:
                raise RepeatedKey(key, first[name])
            first[name] = key


class TextLoader(Loader):
    """Reads what stands for a number as the text that was written: `010` is not 8."""

    yaml_implicit_resolvers = {  # noqa: RUF012, as PyYAML declares it
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
        for first, resolvers in Loader.yaml_implicit_resolvers.items()
    }


class Dumper(yaml.SafeDumper):
    """Writes in quotes each text that `Loader` would read as something else, and repeats a value
    instead of an alias.
    """

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    """Only double quotes keep every character, and a text of several lines on one."""
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    )


Dumper.add_representer(str, _represent_text)
Dumper.add_multi_representer(str, _represent_text)  # OmegaConf has a class of its own for ???
Dumper.add_multi_representer(PurePath, lambda dumper, path: _represent_text(dumper, str(path)))


def read_yaml(text: str) -> Any:
    """The value of a YAML text. Raises yaml.YAMLError."""
    return yaml.load(text, Loader)


def read_texts(text: str) -> Any:
    """Like `read_yaml`, but numbers are the texts that were written."""
    return yaml.load(text, TextLoader)


def write_yaml(value: Any) -> str:
    """`value` in YAML. `read_yaml` gives an equal value."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def write_line(value: Any) -> str:
    """`value` in YAML on one line, as in an override. `read_yaml` gives an equal value."""
    text = yaml.dump(
        [value], Dumper=Dumper, sort_keys=False, default_flow_style=True, width=float("inf")
    )
    return text.strip()[1:-1]
