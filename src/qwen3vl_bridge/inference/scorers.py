"""Scores of answers: the metrics of public benchmarks, as lmms-eval and VLMEvalKit compute them.

`SCORERS` has a function for each name: (answer, Reference) -> score, where 1 is right and 0 is wrong. The tests compare
them with the scores that lmms-eval 75571cfe0 and VLMEvalKit e8e78f05f give to the same answers.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class Reference:
    """The accepted answers to a question, with which a scorer compares the model's answer.

    Attributes:
        answers: accepted answers. At least one.
        choices: text of each option of a multiple-choice question, by letter; empty for other questions.
    """

    answers: tuple[str, ...]
    choices: Mapping[str, str] = field(default_factory=dict)


def exact(answer: str, reference: Reference) -> float:
    """Return 1 if the answer equals an accepted answer, apart from surrounding white space; else 0."""
    return float(answer.strip() in [accepted.strip() for accepted in reference.answers])


def contains(answer: str, reference: Reference) -> float:
    """Return 1 if the answer contains an accepted answer; else 0."""
    return float(any(accepted.strip() in answer for accepted in reference.answers))


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized_match(answer: str, reference: Reference) -> float:
    """Return 1 if the answer equals an accepted answer after lowercasing and removing ASCII punctuation; else 0.

    This is `exact_match` of lmms-eval with `ignore_case` and `ignore_punctuation`, for example for AI2D.
    """
    first, *others = (text.lower().translate(_NO_PUNCTUATION) for text in (answer, *reference.answers))
    return float(first in others)


_ANLS_THRESHOLD = 0.5


def anls(answer: str, reference: Reference) -> float:
    """Return the average normalized Levenshtein similarity of one answer, for example for DocVQA and InfoVQA.

    It is 1 - distance / length for the most similar accepted answer, or 0 if that is below 0.5. The distance ignores
    case and the amount of white space. As in lmms-eval and VLMEvalKit, the length counts all characters of the longer
    text.

    Source: Biten et al., Scene Text Visual Question Answering (ICCV 2019), equation 1.
    """
    ratios = []
    for accepted in reference.answers:
        length = max(len(answer.upper()), len(accepted.upper()))
        distance = _levenshtein(*(" ".join(text.lower().split()) for text in (answer, accepted)))
        ratios.append(distance / length if length else 0.0)
    similarity = 1 - min(ratios)
    return similarity if similarity >= _ANLS_THRESHOLD else 0.0


def _levenshtein(first: str, second: str) -> int:
    """Return the smallest number of inserted, deleted and replaced characters that turn one text into the other."""
    row = list(range(len(second) + 1))
    for number, letter in enumerate(first, 1):
        diagonal, row[0] = row[0], number
        for column, other in enumerate(second, 1):
            replaced = diagonal + (letter != other)
            diagonal = row[column]
            row[column] = min(replaced, row[column] + 1, row[column - 1] + 1)
    return row[-1]


_RELATIVE_CHANGE = 0.05


def relaxed_accuracy(answer: str, reference: Reference) -> float:
    """Return 1 if the answer is a number within 5 % of an accepted number, or equals an accepted text; else 0.

    Texts are compared in lower case. "5%" is read as 0.05. An accepted answer of 0 is compared as text. This metric is
    for charts, for example ChartQA.

    Source: Methani et al., PlotQA (WACV 2020), section 5.2; Masry et al., ChartQA (2022), section 5.1.
    """
    return float(any(_is_close(answer, accepted) for accepted in reference.answers))


def _is_close(answer: str, accepted: str) -> bool:
    number, expected = _number(answer), _number(accepted)
    if number is None or not expected:
        return answer.lower() == accepted.lower()
    return abs(number - expected) / abs(expected) <= _RELATIVE_CHANGE


def _number(text: str) -> float | None:
    """Return the value of a text that is a number or a percentage (5% is 0.05); None for other texts."""
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


_NUMBER_WORDS = "zero one two three four five six seven eight nine ten"
_NUMBERS = {"none": "0"} | {word: str(number) for number, word in enumerate(_NUMBER_WORDS.split())}
_ARTICLES = {"a", "an", "the"}
_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_CONTRACTED = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't o'clock oughtn't
'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd somebodyd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's
they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's
where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
_CONTRACTIONS = {word.replace("'", ""): word for word in _CONTRACTED.split()}  # recognized without their apostrophe
_FULL_STOP = re.compile(r"\.(?!\d)")
_MOST_STOPS = 32  # removed in one text, by a flag that the reference implementation passes as a count
_MATCHES = 3  # people who must have given the same answer for a full score


def vqa_accuracy(answer: str, reference: Reference) -> float:
    """Return min(1, equal answers / 3), averaged over all subsets that leave one accepted answer out.

    `reference.answers` are the answers of ten people; with one answer alone the result is always 0. Articles,
    punctuation, number words and contractions are normalized. For TextVQA, VizWiz and others.

    Source: Antol et al., VQA (ICCV 2015), section 3; https://visualqa.org/evaluation.html.
    """
    given, *answers = map(_normalize_vqa, (answer, *reference.answers))
    scores = []
    for left_out in range(len(answers)):
        equal = sum(other == given for number, other in enumerate(answers) if number != left_out)
        scores.append(min(Fraction(1), Fraction(equal, _MATCHES)))
    return float(sum(scores) / len(scores))


def _normalize_vqa(text: str) -> str:
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = found = text.replace("\n", " ").replace("\t", " ").strip()
    for mark in _MARKS:
        stands_alone = f"{mark} " in found or f" {mark}" in found
        text = text.replace(mark, "" if stands_alone else " ")
    text = _FULL_STOP.sub("", text, count=_MOST_STOPS)
    words = (_NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_LAST_WORDS = 4  # among which a single letter must be


def multiple_choice(answer: str, reference: Reference) -> float:
    """Return 1 if the option that an answer chooses is the accepted letter.

    The option is found as by `can_infer` of VLMEvalKit: a single letter among the last four words; else the letter
    after "answer is"; else the only option whose text occurs in the answer. Nothing is guessed: an answer from which no
    option can be found is wrong.
    """
    return float(_chosen_option(answer, reference.choices) in reference.answers)


_SEPARATORS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_ANSWER_IS = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)


def _chosen_option(answer: str, choices: Mapping[str, str]) -> str | None:
    if any(refusal in answer for refusal in _REFUSALS):
        return None
    words = answer.translate(_SEPARATORS).split()
    letters = [letter for letter in choices if letter in words]
    if len(letters) == 1 and words.index(letters[0]) >= len(words) - _LAST_WORDS:
        return letters[0]
    if not letters and "Z" in words:
        return None
    if (said := _ANSWER_IS.search(answer)) and said[1].upper() in choices:
        return said[1].upper()
    if len(answer) > 2 * sum(map(len, choices.values())):
        return None
    named = [letter for letter, text in choices.items() if text.lower() in answer.lower()]
    return named[0] if len(named) == 1 else None


_NUMBER = r"-?\d+(?:\.\d+)?"
_BOX = re.compile(rf"\[\s*({_NUMBER}),\s*({_NUMBER}),\s*({_NUMBER}),\s*({_NUMBER})\s*\]")


def box_iou(answer: str, reference: Reference) -> float:
    """Return intersection over union of the first box [x1, y1, x2, y2] in an answer and the accepted box.

    It is 0 if the answer has no box. Both boxes must have the same scale. For RefCOCO and others.
    """
    given, expected = _box(answer), _box(reference.answers[0])
    if given is None or expected is None:
        return 0.0
    width, height = (max(0.0, min(given[i + 2], expected[i + 2]) - max(given[i], expected[i])) for i in (0, 1))
    intersection, areas = width * height, [(box[2] - box[0]) * (box[3] - box[1]) for box in (given, expected)]
    union = areas[0] + areas[1] - intersection
    return intersection / union if union else 0.0


def _box(text: str) -> list[float] | None:
    found = _BOX.search(text)
    return None if found is None else [float(number) for number in found.groups()]


def box_accuracy(answer: str, reference: Reference) -> float:
    """Return 1 if `box_iou` is at least 0.5."""
    return float(box_iou(answer, reference) >= 0.5)


Scorer = Callable[[str, Reference], float]
SCORERS: dict[str, Scorer] = {
    scorer.__name__: scorer
    for scorer in (
        *(exact, contains, normalized_match, anls, relaxed_accuracy, vqa_accuracy),
        *(multiple_choice, box_iou, box_accuracy),
    )
}

_OPTION = re.compile(r"^[ \t]*\(?([A-Z])[.):][ \t]*(\S.*?)[ \t]*$", re.MULTILINE)


def choices_in(question: str) -> dict[str, str]:
    """Return the options of a question by their letters, from lines such as "A. a dog" or "(B) a cat"."""
    return dict(_OPTION.findall(question))
