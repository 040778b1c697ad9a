"""Writes docs/config.md from the dataclasses: `python -m megarl.config.reference >
docs/config.md`.
"""

from __future__ import annotations

from omegaconf import MISSING

from megarl.config.keys import Section, Setting, sections, settings, yaml_text
from megarl.config.limits import INPUT, OUTPUT

HEAD = """\
# Configuration

Every key of a run, in the order of `megarl/config/schema.py`, from which this file is generated:
`python -m megarl.config.reference > docs/config.md`.

A configuration file is YAML with these keys nested at their dots. On the command line, `dotted.key=value` after the file overrides
it. `${other.key}` stands for the value of another key. If there are unknown keys, wrong types or values that are not allowed, the
program reports all of them in one message and exits with status 2 before anything starts. NAME in a key is a name that you choose;
there may be several.

A path that begins with `./` or `../` is relative to the folder of the file that it stands in; any other, and every path on the command
line, is relative to the working directory. If only the other of the two has such a file, or both have one, the run is refused with a
message that says what to write. The same holds for Python: `package.module:name` is imported from the working directory or from what is
installed, `./file.py:name` from a file beside the YAML.
"""
TYPES = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    tuple[float, float]: "two numbers",
    list[str]: "texts",
}


def reference() -> str:
    """The text of docs/config.md: one table of every key."""
    rows = ["| key | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    for key in settings():
        rows += [
            _section_row(section)
            for section in sections().values()
            if section.optional and _first_of(section) == key
        ]
        rows.append(_row(settings()[key]))
    return HEAD + "\n" + "\n".join(rows) + "\n"


def _first_of(section: Section) -> str:
    return next(key for key in settings() if key.startswith(f"{section.key}."))


def _section_row(section: Section) -> str:
    return _cells(f"`{section.key}`", "section or null", "`null`", "", section.meaning)


def _row(setting: Setting) -> str:
    kind = "path" if setting.path in (INPUT, OUTPUT) else TYPES.get(setting.type, "mapping")
    kind += " or null" if setting.optional else ""
    default = "must be set" if setting.default == MISSING else f"`{yaml_text(setting.default)}`"
    return _cells(
        f"`{setting.key}`",
        kind,
        default,
        setting.limit.text if setting.limit else "",
        setting.meaning,
    )


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |"


if __name__ == "__main__":
    print(reference(), end="")
