"""Texts that would end a process, or cost minutes or gigabytes, are refused in a moment; others are parsed."""

import contextlib
import itertools
import re
import time
from pathlib import Path

import qwen3vl_bridge
from qwen3vl_bridge.core.files import check_plain, parse_json, parse_record, read_json, read_yaml

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

SOURCE = Path(qwen3vl_bridge.__file__).parent
NAMES = [chr(ord("a") + i) for i in range(12)]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise(NAMES)
)


@pytest.mark.parametrize(("text", "message"), [
    ("[" * 50_000, "more than 50 deep"), ("{a: " * 50_000, "more than 50 deep"), ("- " * 50_000, "more than 50 deep"),
    ("? " * 50_000, "more than 50 deep"), ("\n".join(" " * i + "a:" for i in range(2_000)), "more than 50 deep"),
    ("a: [" + "x, " * 300_000 + "]", "more than 200,000 values"), (BOMB, "more than 200,000 values"),
    ("a: &a [*a]", r"\*a refers to a node that contains it"),
    ("a: *b", r"\*b refers to a node that contains it, or is undefined"), ("a: [", "expected"),
    ("a: 2001-99-99", "month"), ("a: !!bool x", "x"), ("a: !!timestamp x", "."), ("a: !!int ''", "."),
    ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ("b: 1\na: " + "9" * 6_000, r"line 2 has the number 9{20}\.\.\. of 6,000 characters, expected at most 100"),
    ("a: 1" + ":1" * 2_000_000, "line 1 has the number 1:1"),
    ("a: 1" + ":1" * 2_000_000 + ".5", "line 1 has the number 1:1"),
    ("a: !!int '1" + ":1" * 2_000_000 + "'", "line 1 has the number 1:1"),
    ("a: 0x" + "f" * 1_000_000, "line 1 has the number 0xf"), ("a: 0b" + "1" * 1_000_000, "line 1 has the number 0b1"),
    ("a: {b: [1, 1" + "0" * 60 + "]}", "a.b is an integer of more than 64 bits, expected a smaller one"),
    ("{[a]: b}", "unhashable"), ("\udcff", "."),
])  # fmt: skip
def test_read_yaml_raises_if_text_is_invalid(text, message, tmp_path):
    (tmp_path / "x.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
    begun = time.process_time()
    with pytest.raises(ValueError, match=message) as error:
        read_yaml(tmp_path / "x.yaml")
    assert str(tmp_path / "x.yaml") in str(error.value) and "\n" not in str(error.value)
    assert time.process_time() - begun < 10  # the longest is 1 s here


def test_parse_json_accepts_unlimited_model_max_length_of_transformers():
    """As transformers writes its `VERY_LARGE_INTEGER`."""
    text = '{"model_max_length": 1000000000000000019884624838656}'
    assert parse_json(text) == {"model_max_length": int(1e30)}
    with pytest.raises(ValueError, match="model_max_length is an integer of more than 64 bits"):
        parse_json(text.replace("656}", "657}"))


def test_read_yaml_restores_dumped_config_with_aliases(tmp_path):
    betas = [0.9, 0.95]
    value = {"optimizer": {"betas": betas, "again": betas, "threshold": float("inf")}, "a": {"b": None, "c": {1, 2}}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(value))
    assert "*id001" in (tmp_path / "x.yaml").read_text()
    assert read_yaml(tmp_path / "x.yaml") == value


@given(st.text("[]{}:,-?&*!|>'\"#%@` ab\n\t<1.", max_size=60))
def test_read_yaml_raises_only_value_error_for_random_text(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text)
    with contextlib.suppress(ValueError):
        read_yaml(path)


@pytest.mark.parametrize(("text", "message"), [
    ("[" * 1_000_000, "more than 50 deep"), ('{"a":' * 51 + "1" + "}" * 51, "more than 50 deep"),
    ('{"a": 1, "a": 2}', "'a' occurs twice"),
    ('{"text_config": {"rms_norm_eps": NaN}}', "text_config.rms_norm_eps is nan, expected a finite number"),
    ('{"a": [1, {"b": -Infinity}]}', "a.b is -inf"), ('{"a": 1e999}', "a is inf"),
    ('{"a": ' + "9" * 5_000 + "}", "a is an integer of more than 64 bits, expected a smaller one"),
    ('{"a": {"b": [-' + "9" * 400 + "]}}", "a.b is an integer of more than 64 bits"),
    ('{"a": 18446744073709551616}', "a is an integer of more than 64 bits"), ('{"a": 1}'.encode("utf-16"), "utf-8"),
    (b"\xef\xbb\xbf{}", "BOM"), (b'{"a": "\xff"}', "utf-8"),
])  # fmt: skip
def test_parse_json_raises_if_text_is_invalid(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        parse_json(text)
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as error:
        read_json(path)
    assert str(path) in str(error.value)


def test_parse_record_accepts_nan_and_duplicate_keys_but_not_deep_nesting():
    assert parse_record('{"a": NaN, "a": 1, "b": Infinity}') == {"a": 1, "b": float("inf")}
    for text in ("[" * 1_000_000, "[" * 51 + "]" * 51):
        with pytest.raises(ValueError, match="more than 50 deep"):
            parse_record(text)


def test_read_json_and_read_yaml_raise_if_file_is_too_large(tmp_path):
    for name, read in (("x.json", read_json), ("x.yaml", read_yaml)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(300 << 30)
        with pytest.raises(ValueError, match="bytes, expected"):
            read(tmp_path / name)


def test_json_and_yaml_are_parsed_in_listed_modules_only():
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"\b(json\.loads?|yaml\.\w*load\w*|OmegaConf\.load)\(", path.read_text())
    }
    # The others read what a tokenizer returns, and a file that the tiny processor has written itself.
    assert found == {"core/files.py", "data/encoding.py", "testing/tiny_processor.py"}


def test_parsers_accept_long_strings_and_64_bit_integers(tmp_path):
    value = {"text": "9" * 5_000, "words": "1 " * 5_000, "seed": 2**64 - 1, "less": -(2**63), "pi": 3.14}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(value))
    assert read_yaml(tmp_path / "x.yaml") == value
    assert parse_json('{"seed": 18446744073709551615}') == {"seed": 2**64 - 1}
    assert parse_record('{"hash": ' + "9" * 60 + "}") == {"hash": int("9" * 60)}


def test_check_plain_error_names_path_of_nan_value():
    check_plain({"a": 1.0, "b": [2.0]})
    with pytest.raises(ValueError, match=r"peft\.alpha is nan, expected a finite number"):
        check_plain({"alpha": float("nan")}, "peft")
