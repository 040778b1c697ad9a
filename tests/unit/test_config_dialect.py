"""Settings are written and read in one dialect of YAML: what is dumped, or written as an override,
loads as the same value.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from megarl.config.dialect import read_yaml, write_line, write_yaml
from megarl.config.errors import ConfigError
from megarl.config.keys import field_path, settings, value_at
from megarl.config.load import dump_config, load_config, override_text
from megarl.config.schema import RunConfig

LOOKALIKES = """1e5 1e-3 -1e1 0x10 010 0b1 1_000 .5 5. +1e3 1:30 yes no on null ~ = << .inf NaN
2024-01-01 ??? \\??? ${seed} \\${x} \\\\${x} ${async.capacity} {a [b - : # & * ! | > % @ ` ' \" """.split()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1) | st.sampled_from(
    [*LOOKALIKES, " a ", "a\n\n b\n", "\x85", "\ufeff"]
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = TEXTS | FLOATS | st.integers(-(10**15), 10**15) | st.booleans() | st.none()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS.filter(lambda text: text != "???"),  # the mark of a setting that must be set
    float: st.floats(1e-300, 1e300),
    list[str]: st.lists(TEXTS, max_size=3),
    dict[str, Any]: st.dictionaries(TEXTS, VALUES, max_size=3),
}
FREE = ("rollout.args", "generator.server_args", "trainer.megatron")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dialect") / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train: {source: rows.jsonl}}\n", encoding="utf-8")
    return path


def exact(value: Any) -> Any:
    """`value` with the type of everything in it, since 1 == 1.0 == True."""
    if isinstance(value, dict):
        return [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [exact(item) for item in value]
    return (str if isinstance(value, str) else type(value)), value


@examples(max_examples=100, deadline=None)
@given(VALUES)
def test_written_yaml_reads_as_the_same_value(value: Any) -> None:
    assert exact(read_yaml(write_yaml(value))) == exact(value)
    assert exact(read_yaml(write_line(value))) == exact(value)
    assert "\n" not in write_line(value)


# settings that take any text or any number, a list of any texts, or a mapping of any values
KEYS = [
    *FREE,
    *("rollout.stop", "observe.tags"),
    *(
        key
        for key, setting in settings().items()
        if key.startswith("data.train.")
        and setting.type is str
        and not setting.limit
        and "NAME" not in key
    ),
    *("trainer.optimizer.lr", "algorithm.kl_coef"),
]


@examples(max_examples=20, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_any_setting_comes_back_from_file_and_override(file: Path, data: st.DataObject) -> None:
    """The value is set on the dataclass, so that no reader has seen it before it is written."""
    key = data.draw(st.sampled_from(KEYS))
    value = data.draw(OF_TYPE[settings()[key].type])
    config = changed(load_config(file), field_path(key).split("."), value)
    dumped = file.with_name("dumped.yaml")
    dumped.write_text(dump_config(config), encoding="utf-8")
    for loaded in (load_config(dumped), load_config(file, [override_text(key, value)])):
        assert loaded == config
        assert exact(value_at(loaded, key)) == exact(value)


def changed(settings_of: Any, path: list[str], value: Any) -> Any:
    name, *inner_path = path
    if inner_path:
        value = changed(getattr(settings_of, name), inner_path, value)
    return replace(settings_of, **{name: value})


@pytest.mark.parametrize("text", ["1e5", "010", "0x10", "1_000", "5."])
def test_number_in_place_of_a_text_keeps_its_form(file: Path, text: str) -> None:
    written = file.with_name("written.yaml")
    written.write_text(
        f"{file.read_text()}run_dir: {text}\nrollout: {{stop: [{text}]}}\n", encoding="utf-8"
    )
    of_overrides = load_config(file, [f"run_dir={text}", f"rollout.stop=[{text}]"])
    assert [of_overrides.run_dir, *of_overrides.rollout.stop] == [text, text]
    of_file = load_config(written)
    assert [of_file.run_dir, *of_file.rollout.stop] == [text, text]


@pytest.mark.parametrize("text", ["010", "0100", "1:30", "-07", "1:30.5"])
def test_octal_and_base_60_of_yaml_1_1_are_no_numbers(text: str) -> None:
    assert read_yaml(text) == text


def test_quoted_texts_of_overrides_stay_texts(file: Path) -> None:
    config: RunConfig = load_config(
        file, ['rollout.stop=["1e5", "???"]', 'rollout.args.a="1e-3"', "rollout.args.b=1e-3"]
    )
    assert config.rollout.stop == ["1e5", "???"] and config.rollout.args == {"a": "1e-3", "b": 1e-3}


def test_list_of_texts_refuses_true_and_null(file: Path) -> None:
    for value in ("[yes]", "[null]", "[[a]]"):
        with pytest.raises(ConfigError) as caught:
            load_config(file, [f"rollout.stop={value}"])
        assert "must be a list of texts" in caught.value.problems[0]
