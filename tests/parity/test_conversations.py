"""From a file of conversations to gradients, against transformers reading the same files."""

from qwen3vl_bridge.data import Collator, Encoder, load_processor, open_source, pad_token_id, read_vision_settings

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers.video_utils import load_video

from tests.data.conftest import picture, write
from tests.data.test_videos import clip
from tests.helpers.noise import check, limits
from tests.parity.conftest import Pair, Results
from tests.parity.test_parity import run_megatron

# (pictures, videos) of each conversation's question.
CONTENTS = [(1, 0), (0, 1), (2, 1), (0, 0)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Write conversations of every content with answers of different lengths."""
    folder, records = tmp_path_factory.mktemp("conversations"), []
    for number, (pictures, videos) in enumerate(CONTENTS):
        parts = []
        for i in range(pictures):
            picture(folder / f"{number}-{i}.png", 64 + 32 * i, 96, seed=number)
            parts.append({"type": "image", "image": f"{number}-{i}.png"})
        for i in range(videos):
            clip(folder / f"{number}-{i}.mp4", 17 + 8 * number, rate=8, size=(64, 96))
            parts.append({"type": "video", "video": f"{number}-{i}.mp4"})
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "Which digit is this?"}]}
        records.append({"messages": [question, {"role": "assistant", "content": "Seven. " * (number + 1)}]})
    return write(folder / "train.jsonl", records)


def reference_inputs(processor, conversation) -> dict[str, torch.Tensor]:
    """Return a conversation as transformers alone reads it."""
    text = processor.apply_chat_template([dict(message) for message in conversation.messages], tokenize=False)
    # As transformers 4.57 did: 5.12 leaves this start and end around the frames.
    text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    rule = processor.video_processor.sample_frames
    films = [
        load_video(str(path), backend="pyav", sample_indices_fn=lambda metadata, **_: rule(metadata, fps=2))
        for path in conversation.videos
    ]
    return processor(
        text=[text], images=[Image.open(path) for path in conversation.images] or None,
        videos=[frames for frames, _ in films] or None, video_metadata=[metadata for _, metadata in films] or None,
        do_sample_frames=False, return_tensors="pt",
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_loss_and_gradients_of_conversation_file_match_transformers(pair: Pair, path, packed):
    folder = pair.reference.config._name_or_path
    processor, source = load_processor(folder), open_source(path)
    encoder, pad = Encoder(processor), pad_token_id(processor.tokenizer)
    collator = Collator(read_vision_settings(folder, processor), pad, seq_length=1024)
    batch = (collator.collate_packed if packed else collator.collate_padded)(
        [encoder(source[i]) for i in range(len(source))]
    )
    found = run_megatron(pair, batch)
    asked, answers = [], []
    for number in range(len(source)):
        asked.append(reference_inputs(processor, source[number]))
        answer = processor.tokenizer("Seven. " * (number + 1) + "<|im_end|>")["input_ids"]
        ids = asked[-1]["input_ids"][0]
        end = len(ids) - len(processor.tokenizer("\n")["input_ids"])
        assert ids[end - len(answer) : end].tolist() == answer
        answers.append((slice(end - len(answer) - 1, end - 1), torch.tensor(answer)))

    def reference() -> Results:
        pair.reference.zero_grad()
        logits = [pair.reference(**one).logits[0] for one in asked]
        pairs = zip(logits, answers, strict=True)
        loss = sum(F.cross_entropy(one[trained], answer, reduction="sum") for one, (trained, answer) in pairs)
        loss.backward()
        return Results([one.detach() for one in logits], loss.item(), pair.reference_gradients())

    expected = reference()
    check(pair.errors(found, expected), limits(reference, pair.errors, pair.reference, expected=expected))
