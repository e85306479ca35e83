"""Scorers against the scores that lmms-eval and VLMEvalKit give to 1,000 answers each, and definitions by example.

`reference_scores.jsonl.gz` has lines [scorer, answer, accepted answers, option texts, score], made on 2026-11-30 by
running functions of lmms-eval 75571cfe0 (`multiple_choice`: of VLMEvalKit e8e78f05f).
"""

import gzip
import json
from pathlib import Path
from string import ascii_uppercase

from qwen3vl_bridge.inference.scorers import SCORERS, Reference, choices_in

import pytest

CASES = [
    json.loads(line)
    for line in gzip.decompress(Path(__file__).with_name("reference_scores.jsonl.gz").read_bytes())
    .decode()
    .splitlines()
]
# Cases that only the surroundings of a reference explain: a message of a failed request; NumPy's arrays of fixed width,
# which end a text at "\0" and cut the second character of a lower-case "İ".
OTHERWISE = {"multiple_choice": ("Failed to obtain answer via API",), "normalized_match": ("\0", "İ", "i̇")}


@pytest.mark.parametrize("name", [name for name in SCORERS if name not in ("exact", "contains", "box_accuracy")])
def test_scorer_matches_scores_of_reference_implementation(name):
    cases, skipped = [case for case in CASES if case[0] == name], 0
    assert len(cases) == 1000
    for _, answer, accepted, options, score in cases:
        if any(text in given for text in OTHERWISE.get(name, ()) for given in (answer, *accepted)):
            skipped += 1
            continue
        reference = Reference(tuple(accepted), dict(zip(ascii_uppercase, options, strict=False)))
        assert SCORERS[name](answer, reference) == pytest.approx(score, abs=1e-12), (answer, reference)
    assert skipped <= 20


@pytest.mark.parametrize(("name", "answer", "accepted", "score"), [
    ("exact", " seven\n", ["7", "seven"], 1), ("exact", "Seven", ["seven"], 0),
    ("contains", "It is a seven.", ["seven"], 1), ("contains", "It is a 7.", ["seven"], 0),
    ("box_accuracy", "[0, 0, 2, 1]", ["[0, 0, 1, 1]"], 1), ("box_accuracy", "[0, 0, 2.1, 1]", ["[0, 0, 1, 1]"], 0),
    ("box_iou", "no box", ["[0, 0, 1, 1]"], 0), ("box_iou", "[0, 0, 0, 0]", ["[1, 1, 1, 1]"], 0),
])  # fmt: skip
def test_scorer_gives_expected_score_for_example_answers(name, answer, accepted, score):
    assert SCORERS[name](answer, Reference(tuple(accepted))) == score


def test_answer_choices_are_read_from_lettered_lines_of_question():
    question = "Which animal?\nA. a dog\n(B) a cat \n C: none\nD) \nA mouse\n"
    assert choices_in(question) == {"A": "a dog", "B": "a cat", "C": "none"}
