"""Chat templates that behave like the released ones, rewritten from their behavior; and released templates."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _with(template: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert template.count(old) == 1, old
        template = template.replace(old, new)
    return template


INSTRUCT, THINKING = _read("released_template.jinja"), _read("released_thinking_template.jinja")
QWEN3_5 = _read("thinking_template.jinja")
_OFF, _WRITTEN = "enable_thinking is defined and enable_thinking is false", "if loop.index0 > question.last"
_TURN = "{%- for m in messages -%}\n    {%- set text = written(m.content) | trim -%}\n    {%- if m.role == 'system' -%}"
# Thinks only if it is asked to.
QWEN3_5_SMALL = _with(QWEN3_5, (_OFF, "enable_thinking is undefined or enable_thinking is false"))
QWEN3_6 = _with(QWEN3_5, (_WRITTEN, "if preserve_thinking is true or loop.index0 > question.last"))
HARD, LITTLE = "Think hard.", "Think little."
# Says in the system prompt how much to think, keeps reasoning of earlier turns, and reads it from its field alone.
QWEN3_8 = _with(
    QWEN3_5,
    ("{%- set question = namespace(last=-1) -%}",
     "{%- set effort = reasoning_effort | default('xhigh') -%}"
     "{%- if enable_thinking is false -%}{%- set effort = 'medium' -%}{%- endif -%}"
     "{%- if effort not in ('xhigh', 'medium', 'low') -%}{{- raise_exception('No effort ' + effort) -}}{%- endif -%}"
     f"{{%- set effort = {{'xhigh': '{HARD}', 'medium': '', 'low': '{LITTLE}'}}[effort] -%}}"
     "{%- set question = namespace(last=-1) -%}"),
    ("'<|im_start|>system\\n# Tools\\n\\n<tools>'",
     "'<|im_start|>system\\n' + (effort + '\\n\\n' if effort else '') + '# Tools\\n\\n<tools>'"),
    (_TURN, "{%- if effort and not tools and messages[0].role != 'system' -%}"
     "{{- '<|im_start|>system\\n' + effort + '<|im_end|>\\n' -}}{%- endif -%}\n"
     + _TURN + "{%- set text = [effort, text] | select | join('\\n\\n') -%}"),
    ("elif '</think>' in text", "elif false"),
    (_WRITTEN, "if preserve_thinking is undefined or preserve_thinking is true or loop.index0 > question.last"),
)  # fmt: skip

# The SHA-256 of released templates begins so.
RELEASED = {
    "Qwen3-VL": "3636d0f0bd6b", "Qwen3.5": "a4aee8afcf2e", "Qwen3.5 small": "273d8e0e683b", "Qwen3.6": "e84f32a23fdd",
    "Qwen3.8": "c3cf9e34abf4",
}  # fmt: skip


def released(name: str) -> str | None:
    """Return a released template from the package trl; skip the test if it is missing."""
    found = find_spec("trl")
    for folder in found.submodule_search_locations or () if found else ():
        for path in Path(folder, "chat_templates").glob("*.jinja"):
            if hashlib.sha256(path.read_bytes()).hexdigest().startswith(RELEASED[name]):
                return path.read_text(encoding="utf-8")
    return None
