"""Batches of Megatron-Bridge's collators: equal to transformers, or a clear error; resumed runs with its datasets."""

import io
import json
import logging
import pickle
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from qwen3vl_bridge.training import megatron_batches
from qwen3vl_bridge.training.megatron_batches import from_collator
from qwen3vl_bridge.training.step import forward_step

import numpy as np
import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.data.batch_utils import split_batch_into_microbatches
from megatron.bridge.data.builders.direct_hf_sft import DirectHFSFTDatasetConfig
from megatron.bridge.data.builders.energon import EnergonDatasetConfig, QwenVLEnergonTaskEncoderConfig
from megatron.bridge.data.builders.mock_vlm_sft import MockVLMSFTDatasetConfig
from megatron.bridge.data.collators.sequence_padding import pad_or_truncate_sequence_batch
from megatron.bridge.data.sources.hf import HFDatasetSourceConfig
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.models.qwen_vl.data.energon import QwenVLTaskEncoder, QwenVLTaskSample
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from PIL import Image
from transformers import AutoProcessor

from tests.helpers.noise import check, limits
from tests.parity.conftest import make_pair
from tests.parity.test_padding import masks_that_arrive
from tests.training.running import losses, replicated, stored, train

SEQ_LENGTH = 512
ANSWERS = ("one", "This is the digit two, two.", "3", "I cannot tell; the writing is too faint.", "five", "6")


def mock(hf: Path, **settings):
    """Return a mock dataset of noise. An image has 196 tokens: Megatron-Bridge's collator enlarges small images."""
    given = dict(image_size=(32, 64), num_base_examples=6, num_workers=0) | settings
    return MockVLMSFTDatasetConfig(seq_length=SEQ_LENGTH, hf_processor_path=str(hf), **given)


def write_conversations(folder: Path, *, images: tuple[int, ...] = (1, 0, 2)) -> Path:
    rng, path = np.random.default_rng(0), folder / "conversations.jsonl"
    with path.open("w") as file:
        for number, answer in enumerate(ANSWERS):
            content = []
            for image in range(images[number % len(images)]):
                name = folder / f"{number}-{image}.png"
                Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(name)
                content.append({"type": "image", "image": str(name)})
            content.append({"type": "text", "text": "Which digit is this?"})
            answered = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
            file.write(json.dumps({"messages": [{"role": "user", "content": content}, answered]}) + "\n")
    return path


def direct(hf: Path, path: Path, **settings):
    load = {"data_files": str(path), "cache_dir": str(path.parent / "cache")}
    source = HFDatasetSourceConfig(path_or_dataset="json", load_kwargs=load)
    given = dict(validation_source=source, do_test=False, num_workers=0) | settings
    return DirectHFSFTDatasetConfig(seq_length=SEQ_LENGTH, source=source, hf_processor_path=str(hf), **given)


def batch_of(dataset, numbers=(0, 1)) -> dict:
    train, _, _ = get_dataset_provider(dataset)([8, 0, 0], dataset)
    return train.collate_fn([train[number] for number in numbers])


def write_webdataset(folder: Path) -> Path:
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        with tarfile.open(folder / f"{split}.tar", "w") as tar:
            for number, answer in enumerate(ANSWERS):
                image = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(image, "JPEG")
                asked = {"role": "user", "content": "<image>Which digit is this?"}
                turns = [asked, {"role": "assistant", "content": answer}]
                parts = {"json": json.dumps(turns).encode(), "jpgs": pickle.dumps([image.getvalue()])}
                for extension, contents in parts.items():
                    entry = tarfile.TarInfo(f"{split}{number}.{extension}")
                    entry.size = len(contents)
                    tar.addfile(entry, io.BytesIO(contents))
    splits = [(split, f"{split}.tar") for split in ("train", "val")]
    names = [name for _, name in splits]
    WebdatasetPreparator.prepare_dataset(folder, names, split_parts_patterns=splits, shuffle_seed=None, workers=1)
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.bridge.data.energon.task_encoder_utils\n__class__: ChatMLWebdataset\n"
        "field_map:\n  conversation: json\n  imgs: jpgs\n"
    )
    return folder


def energon(hf: Path, path: Path, **settings):
    return EnergonDatasetConfig(
        path=str(path), seq_length=SEQ_LENGTH, micro_batch_size=2,
        task_encoder=QwenVLEnergonTaskEncoderConfig(hf_processor_path=str(hf)), shuffle_buffer_size=1, num_workers=0,
        **settings,
    )  # fmt: skip


DEFERRED = dict(enable_in_batch_packing=True, defer_in_batch_packing_to_step=True)
PACKED = dict(enable_in_batch_packing=True, in_batch_packing_pad_to_multiple_of=8)
LAYOUTS = {"rows": {}, "packed": PACKED, "deferred": DEFERRED, "full rows": dict(pad_to_max_length=True)}


@pytest.fixture(scope="module", params=["dense", "moe"])
def pair(request):
    if request.param == "dense":
        return make_pair(request.getfixturevalue("untied_folder"), calculate_per_token_loss=True)
    # transformers' loss has no balancing term here.
    return make_pair(request.getfixturevalue("moe_folder"), moe_aux_loss_coeff=0.0, calculate_per_token_loss=True)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("conversations"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("texts"), images=(0,))


@pytest.fixture(scope="module")
def provider(untied_folder):
    return AutoBridge.from_hf_pretrained(str(untied_folder)).to_megatron_provider(load_weights=False)


@pytest.fixture(scope="module")
def rows(untied_folder, conversations):
    batch = batch_of(direct(untied_folder, conversations), (0, 1, 2))
    return lambda: dict(batch)


def step(pair, dataset, batch):
    cfg = SimpleNamespace(
        model=pair.megatron.config, dataset=dataset, train=SimpleNamespace(micro_batch_size=1),
        rerun_state_machine=SimpleNamespace(check_for_nan_in_loss=True, check_for_spiky_loss=False),
    )  # fmt: skip
    losses, count = forward_step(SimpleNamespace(cfg=cfg), iter([batch]), pair.megatron)
    total, tokens, _ = count(losses)
    total.backward()
    return total.item(), int(tokens)


def reference_loss(pair, batch):
    """Return transformers' loss and number of tokens; it shifts labels itself."""
    ids, real = batch["input_ids"], batch["attention_mask"]
    trained = torch.nn.functional.pad(batch["loss_mask"], (1, 0))[:, :-1].bool()
    visual = vars(batch["visual_inputs"]) if batch.get("visual_inputs") is not None else {}
    images = {name: value for name, value in visual.items() if value is not None}
    out = pair.reference(
        input_ids=ids, attention_mask=real, mm_token_type_ids=(ids == pair.config.image_token_id).int(),
        labels=ids.masked_fill(~trained, -100), **images,
    )  # fmt: skip
    return out.loss * trained.sum(), int(trained.sum())


def compare(pair, dataset, plain, numbers):
    """Compare a batch of `dataset` in the forward step with transformers on the same samples as padded rows."""
    rows = batch_of(plain, numbers)

    def theirs():
        pair.reference.zero_grad()
        total, tokens = reference_loss(pair, rows)
        total.backward()
        return total.item(), tokens, pair.reference_gradients()

    def errors(found, expected):
        gradients = pair.gradient_errors(found[2], expected[2])
        return {"loss": abs(found[0] / expected[0] - 1), "gradients": max(gradients.values())}

    expected = theirs()
    pair.megatron.zero_grad()
    found = *step(pair, dataset, batch_of(dataset, numbers)), pair.megatron_gradients()
    assert found[1] == expected[1] > 10
    check(errors(found, expected), limits(theirs, errors, pair.reference, expected=expected))


@pytest.mark.one_case_in(18)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("numbers", [(0, 1, 2), (1, 4)], ids=["images", "text"])
def test_megatron_bridge_batch_gives_transformers_loss_and_gradients(
    pair, untied_folder, conversations, numbers, layout
):
    plain, dataset = (direct(untied_folder, conversations, **given) for given in ({}, LAYOUTS[layout]))
    compare(pair, dataset, plain, numbers)


@pytest.mark.one_case_in(2)
def test_megatron_bridge_mock_batch_gives_transformers_loss_and_gradients(pair, untied_folder):
    dataset = mock(untied_folder)
    compare(pair, dataset, dataset, (0, 1))


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_bridge_text_batch_gives_transformers_loss_and_gradients(pair, untied_folder, texts, layout):
    """Text uses another collator, which returns tokens twice and more keys."""
    plain, dataset = (direct(untied_folder, texts, **given) for given in ({}, LAYOUTS[layout]))
    assert {"tokens", "metadata", "token_count"} <= batch_of(dataset).keys()
    compare(pair, dataset, plain, (0, 1, 2))


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("pair", ["moe"], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_mask_of_collator_batch_reaches_every_router(pair, untied_folder, conversations, layout):
    plain = batch_of(direct(untied_folder, conversations), (0, 1, 2))
    lengths = plain["attention_mask"].sum(-1).tolist()
    dataset = direct(untied_folder, conversations, **LAYOUTS[layout])
    batch = from_collator(batch_of(dataset, (0, 1, 2)), pair.provider, dataset)
    if "row" in layout:
        expected = torch.arange(batch.input_ids.shape[1])[:, None] >= torch.tensor(lengths)
    else:
        multiple = LAYOUTS[layout].get("in_batch_packing_pad_to_multiple_of", 1)
        expected = torch.cat([torch.arange(-(-n // multiple) * multiple) >= n for n in lengths])[:, None]
    assert all(torch.equal(mask, expected) for mask in masks_that_arrive(pair, inputs=batch.local()))


def test_padding_is_found_by_pad_token_id_if_batch_has_no_attention_mask(provider, rows, monkeypatch):
    batch, real = rows(), rows()["attention_mask"].bool()
    lengths = real.sum(-1).tolist()
    processors_own = int(batch["input_ids"][0, lengths[0]])
    batch["input_ids"][~real] = processors_own  # the collator pads rows with another token
    monkeypatch.setattr(provider, "pad_token_id", processors_own)
    batch["attention_mask"] = None
    assert list(from_collator(batch, provider).layout.lengths) == lengths


def test_from_collator_replaces_labels_of_minus_100_and_keeps_loss_mask(provider, rows):
    batch = from_collator(rows(), provider)
    assert (rows()["labels"] == -100).any() and batch.labels.min() == 0
    assert torch.equal(batch.loss_mask, rows()["loss_mask"])


def test_pixel_values_of_collator_batch_are_not_copied(provider, rows):
    """Pixels are most of a batch, and may be in pinned memory already."""
    batch = rows()
    pixels = batch["visual_inputs"].pixel_values
    assert from_collator(batch, provider).vision.pixel_values.data_ptr() == pixels.data_ptr()


def test_from_collator_keeps_sample_ids_of_energon_encoder_batch(provider, untied_folder, conversations):
    """Batches are dicts of the same collator with more keys."""
    processor = AutoProcessor.from_pretrained(untied_folder)
    encoder = QwenVLTaskEncoder(processor.tokenizer, processor, max_padding_length=512)
    sample = {
        "conversation": [{"role": "user", "content": "Which digit is this?"}, {"role": "assistant", "content": "3"}]
    }
    samples = [QwenVLTaskSample(__key__=f"sample {n}", __subflavors__={}, example=sample) for n in range(2)]
    batch = from_collator(encoder.encode_batch(encoder.batch(samples)), provider)
    assert batch.sample_ids == ("sample 0", "sample 1") and batch.vision is None
    assert batch.layout.lengths[0] == batch.layout.lengths[1] and batch.loss_mask.sum() > 4


def video():
    grid = torch.tensor([[[2, 4, 4]]])  # [B, N, 3] as from some processors
    return GenericVisualInputs(pixel_values_videos=torch.zeros(32, 1536), video_grid_thw=grid)


def test_from_collator_warns_once_per_kind_of_collator_problem(provider, rows, caplog):
    megatron_batches._warn.cache_clear()
    ids = torch.tensor([[5, *[provider.video_token_id] * 4, 6, *[provider.video_token_id] * 4, 7, 8]])
    batch = dict(input_ids=ids, labels=ids.roll(-1), loss_mask=torch.ones(1, 12), visual_inputs=video())
    with caplog.at_level(logging.WARNING, logger=megatron_batches.__name__):
        for _ in range(2):
            from_collator(packed(), provider)  # causes no warning
            assert from_collator(batch, provider).vision.lengths == (16, 16)
            from_collator(rows(), provider)
    kinds = {"videos", "rows", "images"}
    said = [next(word for word in re.split(r"\W+", record.message) if word in kinds) for record in caplog.records]
    assert said == ["videos", "rows", "images"]
    assert all("qwen3vl_bridge.Qwen3VLConversationProvider " in record.message for record in caplog.records)


def test_from_collator_raises_if_seq_length_cuts_image_tokens(provider, rows):
    batch = {name: value if name == "visual_inputs" else value[2:] for name, value in rows().items()}
    batch["visual_inputs"] = replace(batch["visual_inputs"])
    batch["loss_mask"][:, 0], batch["labels"][:, 0] = 1, batch["input_ids"][:, 1]  # otherwise these raise first
    pad_or_truncate_sequence_batch(batch, sequence_length=128)
    for name in ("pixel_values", "image_grid_thw"):  # keep those of the last row, which has two of three equal images
        values = getattr(batch["visual_inputs"], name)
        setattr(batch["visual_inputs"], name, values[len(values) // 3 :])
    with pytest.raises(ValueError, match=r"found \d+ image tokens in the batch, expected 392 for 2 images") as caught:
        from_collator(batch, provider, SimpleNamespace(dataloader_type="cyclic", seq_length=128))
    assert "cut rows at dataset.seq_length, even within images" in caught.value.__notes__[0]


def packed(**changes):
    ids = torch.tensor([[1, 2, 3, 0, 4, 5, 0, 0]])
    batch = dict(
        input_ids=ids, labels=torch.tensor([[2, 3, -100, -100, 5, -100, -100, -100]]),
        loss_mask=torch.tensor([[1.0, 1, 0, 0, 1, 0, 0, 0]]), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]),
        cu_seqlens_q=torch.tensor([0, 3, 5], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([0, 4, 8], dtype=torch.int32), max_seqlen_q=torch.tensor(4), total_tokens=8,
    )  # fmt: skip
    return {name: value for name, value in (batch | changes).items() if value is not ...}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_from_collator_keeps_lengths_and_padded_lengths_of_packed_batch(provider):
    layout = from_collator(packed(), provider).layout
    assert (layout.lengths, layout.padded_lengths) == ((3, 2), (4, 4))


@pytest.mark.parametrize(("changes", "message"), [
    (dict(labels=...), r"the batch does not have \['labels'\]; found"),
    (dict(loss_mask=None), r"the batch does not have \['loss_mask'\]"),
    (dict(cu_seqlens=int32(0, 8)), r"has the keys \['cu_seqlens'\], expected only"),
    (dict(tokens=torch.ones(1, 8).long()), "tokens that differ from input_ids"),
    (dict(labels=torch.zeros(1, 7).long()), r"labels has shape \[1, 7\], expected \[1, 8\]"),
    (dict(cu_seqlens_q=...), r"\['cu_seqlens_q_padded'\] without cu_seqlens_q"),
    (dict(cu_seqlens_q_padded=int32(0, 4, 7)), r"2 segments of 7 tokens in all, input_ids has shape \[1, 8\]"),
    (dict(cu_seqlens_q=int32(0, 5, 3)), r"cu_seqlens_q is \[0, 5, 3\], expected offsets that ascend from 0"),
    (dict(cu_seqlens_q_padded=int32(1, 4, 8)), "expected offsets that ascend from 0"),
    (dict(cu_seqlens_q=int32(0, 5, 6)), r"segments of \[5, 1\] tokens in padded lengths of \[4, 4\]"),
    (dict(cu_seqlens_kv=int32(0, 2, 5)), r"cu_seqlens_kv is \[0, 2, 5\], expected \[0, 3, 5\] as for queries"),
    (dict(loss_mask=torch.ones(1, 8)), r"entries in \[-100, 5\], expected"),
    (dict(loss_mask=torch.tensor([[1.0, 1, 0, 1, 1, 0, 0, 0]]), labels=torch.tensor([[2, 3, 9, 9, 5, 9, 9, 9]])),
     "loss_mask counts 1 tokens of padding"),
    (dict(labels=torch.tensor([[1, 2, 3, 0, 4, 5, 0, 0]])), r"labels has 1 at token 0 .* next token is 2"),
    (dict(position_ids=torch.arange(8)[None]), r"position_ids has 4 for token 0 of a segment"),
    (dict(position_ids=torch.arange(7)[None]), r"position_ids has shape \[1, 7\]"),
])  # fmt: skip
def test_from_collator_raises_if_batch_is_inconsistent(provider, changes, message):
    with pytest.raises(ValueError, match=message):
        from_collator(packed(**changes), provider)


def test_from_collator_raises_if_batch_is_not_a_dict(provider):
    with pytest.raises(TypeError, match="found a batch of type list"):
        from_collator([1], provider)


def test_from_collator_raises_if_microbatch_has_all_images_of_batch(provider, rows, untied_folder, conversations):
    """Megatron-Bridge's loop passes such batches with dataloader_type "batch"."""
    dataset = direct(untied_folder, conversations, dataloader_type="batch")
    for part in split_batch_into_microbatches(rows(), 3):
        with pytest.raises(ValueError, match="image") as caught:
            from_collator(part, provider, dataset)
        assert "passes all images to each" in caught.value.__notes__[0]


IN_BATCH = dict(enable_in_batch_packing=True)
# dataloader_type, and other settings of the dataset.
ORDERS = {
    "single": {}, "cyclic": dict(num_workers=1, **IN_BATCH),
    "batch": dict(defer_in_batch_packing_to_step=True, **IN_BATCH),
}  # fmt: skip
SHORT = dict(
    model__seq_length=SEQ_LENGTH, train__train_iters=3, train__micro_batch_size=2, train__global_batch_size=4,
    validation__eval_interval=2, validation__eval_iters=1, checkpoint__save_interval=3,
)  # fmt: skip


def config(inputs, save, dataset, **settings):
    cfg = replicated(inputs, save, **SHORT | settings)
    cfg.dataset = dataset
    return cfg


def steps(log: list[dict]) -> list[dict]:
    return [entry for entry in log if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [pytest.param("single", marks=pytest.mark.slow), pytest.param("cyclic", marks=pytest.mark.slow), "batch"]
)
def test_run_on_megatron_bridge_dataset_resumes_bit_exactly(inputs, conversations, texts, tmp_path, order):
    def make(save, order=order, **settings):
        path = texts if order == "batch" else conversations  # otherwise each microbatch gets the images of all
        dataset = direct(inputs.hf, path, dataloader_type=order, **ORDERS[order])
        return config(inputs, tmp_path / save, dataset, **settings)

    whole = train(make("whole"))
    halves = [*train(make("halves"), stop_after=1), *train(make("halves"))]
    assert losses(steps(halves)) == losses(steps(whole))
    assert len(steps(whole)) == 3 and whole[0]["trained_tokens"] > 20 and all(4 < e["loss"] < 8 for e in steps(whole))
    assert [entry["step"] for entry in whole if "valid_loss" in entry] == [2, 3]
    ours, expected = stored(tmp_path / "halves"), stored(tmp_path / "whole")
    assert ours.keys() == expected.keys() and all(torch.equal(ours[key], expected[key]) for key in expected)
    longer = dict(train__train_iters=4, scheduler__override_opt_param_scheduler=True)
    another = "batch" if order == "cyclic" else "cyclic"
    with pytest.raises(ValueError, match=f"to other data: .*found .*'{another}', expected '{order}'"):
        train(make("halves", another, **longer))
    if order == "single":  # in order, so a run can be extended
        assert [entry["step"] for entry in steps(train(make("halves", **longer)))] == [4]


def test_train_with_dataloader_type_batch_raises_if_data_has_images(inputs, conversations):
    with pytest.raises(ValueError, match="use 'single' or 'cyclic' for data with images"):
        train(config(inputs, None, direct(inputs.hf, conversations, dataloader_type="batch")))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_run_on_megatron_bridge_mock_dataset_trains_two_steps(inputs, packed):
    # Packed mock answers are longer, and do not fit together with an image.
    dataset = mock(inputs.hf, num_images=0 if packed else 1, enable_in_batch_packing=packed)
    dataset.seq_length = 1024
    log = train(config(inputs, None, dataset, model__seq_length=1024, train__train_iters=2, validation__eval_iters=0))
    assert len(log) == 2 and all(4 < entry["loss"] < 8 and entry["grad_norm"] > 0 for entry in log)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_run_on_energon_dataset_is_reproducible(inputs, tmp_path, packed):
    path = write_webdataset(tmp_path)

    def run():
        dataset = energon(inputs.hf, path, enable_in_batch_packing=packed)
        return train(config(inputs, None, dataset, train__train_iters=2, validation__eval_interval=1))

    log, again = run(), run()
    assert losses(log) == losses(again)
    assert len(steps(log)) == 2 and [entry["step"] for entry in log if "valid_loss" in entry] == [1, 2]
    assert all(4 < entry["loss"] < 8 and entry["trained_tokens"] > 10 for entry in steps(log))


@pytest.mark.slow
def test_resume_on_energon_dataset_raises_if_loader_state_is_missing(inputs, tmp_path):
    path = write_webdataset(tmp_path)

    def run(**settings):
        dataset = energon(inputs.hf, path)
        cfg = config(inputs, tmp_path / "run", dataset, train__train_iters=2, validation__eval_iters=0, **settings)
        return train(cfg, stop_after=1)

    assert len(run()) == 1
    with pytest.raises(ValueError, match=r"no state of its loader for iter_0000001.*Qwen3VLEnergonProvider; or set"):
        run()
    assert [entry["step"] for entry in run(checkpoint__finetune=True)] == [1]
