"""Vocabulary padding: only Megatron checkpoints have it, and padding that is not zero is dropped only on request."""

from qwen3vl_bridge.checkpoint import CheckpointError, verify_checkpoint, verify_reformatted
from qwen3vl_bridge.checkpoint.commands import export_checkpoint, import_checkpoint, reformat_checkpoint
from qwen3vl_bridge.checkpoint.formats.megatron import run_config
from qwen3vl_bridge.cli.convert import main

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.support import EMBEDDING, assert_same, expect_error, hf_tensors, importing, model_with, stock_load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:This process .* is multi-threaded")
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


def padded(folder, imported, padding: torch.Tensor, of: tuple[str, ...] = VOCABULARY):
    stored = stock_load(imported / "iter_0000000").items()
    stored = {k: torch.cat([v, padding]) if k.endswith(of) else v for k, v in stored}
    dcp.save(stored, checkpoint_id=folder, no_dist=True)
    return folder


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None].expand(-1, 80).contiguous()


@pytest.mark.parametrize("name", [EMBEDDING, "lm_head.weight"])
def test_import_raises_if_hf_vocabulary_tensor_has_extra_rows(name, capsys, tmp_path, untied_folder, imported):
    def change(tensors):
        tensors[name] = torch.cat([tensors[name], torch.zeros(100, 80)])

    folder = model_with(tmp_path / "model", untied_folder, change)
    message = f"{name}: found [612, 80], expected [512, 80]"
    expect_error(capsys, importing(folder, tmp_path), message, options=["--verify"])
    with pytest.raises(CheckpointError) as error:
        verify_checkpoint(folder, imported)
    assert message in str(error.value)


@pytest.mark.parametrize("padding", [rows(0.0, 0.0, 0.0), rows(0.0, -0.0, 0.0)])
def test_export_drops_zero_vocab_padding_rows(padding, tmp_path, untied_folder, imported):
    run = padded(tmp_path / "run", imported, padding)
    report = export_checkpoint(run, tmp_path / "hf", hf_model=untied_folder, verify=True)
    assert len(report.notes) == 3 and "has 3 rows beyond the vocabulary; they are padding" in report.notes[0]
    assert verify_checkpoint(untied_folder, run).same
    assert hf_tensors(tmp_path / "hf")[EMBEDDING].shape == (512, 80)


def test_export_of_nonzero_vocab_padding_requires_drop_vocab_padding(capsys, tmp_path, untied_folder, imported):
    run = padded(tmp_path / "run", imported, rows(0.0, 1e-40, 0.0, 9.0), of=VOCABULARY[1:])
    parts = ("language_model.output_layer.weight has 4 rows beyond the vocabulary of 512", "2 are not zero",
             "the first is row 513", "--drop-vocab-padding", "vocab_size")  # fmt: skip
    target = tmp_path / "new" / "hf"
    arguments = ["--hf-model", str(untied_folder), "--megatron-path", str(run)]
    expect_error(capsys, ["export", *arguments, "--hf-path", str(target)], *parts)
    assert main(["verify", "--no-progress", *arguments]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts)
    options = ["--no-progress", "--drop-vocab-padding"]
    assert main(["export", *options, "--verify", *arguments, "--hf-path", str(target)]) == 0
    assert main(["verify", *options, *arguments]) == 0
    assert "2 of them not zero, dropped by --drop-vocab-padding" in capsys.readouterr().out
    assert_same(hf_tensors(target), hf_tensors(untied_folder))
    assert main(["verify", *options, "--megatron-path", str(run)]) == 2
    assert "--drop-vocab-padding: checksums cover all rows" in capsys.readouterr().err


@pytest.mark.parametrize("which", VOCABULARY)
def test_reformat_keeps_vocab_padding_rows(which, tmp_path, untied_folder, imported):
    short = padded(tmp_path / "short", imported, rows(1.0), of=(which,))
    with pytest.raises(CheckpointError, match=r"found \[512, 80\], expected \[513, 80\]"):
        reformat_checkpoint(short, tmp_path / "x", ckpt_format="torch_dist", hf_model=untied_folder)
    run = padded(tmp_path / "run", imported, rows(0.0, 1.0))
    reformat_checkpoint(run, tmp_path / "new", ckpt_format="torch_dist", hf_model=untied_folder, verify=True)
    assert verify_reformatted(run, tmp_path / "new", hf_model=untied_folder).same
    import_checkpoint(untied_folder, tmp_path / "less", ckpt_format="torch_dist")
    with pytest.raises(CheckpointError, match="1 are not zero, the first is row 513"):
        verify_reformatted(run, tmp_path / "less", hf_model=untied_folder)
    assert verify_reformatted(run, tmp_path / "less", hf_model=untied_folder, drop_vocab_padding=True).same
    different = verify_reformatted(tmp_path / "less", run, hf_model=untied_folder).differences
    assert len(different) == 2 and all(entry.elements == 80 for entry in different)


@given(st.integers(1, 3_000), st.integers(0, 3_000), st.integers(1, 500) | st.none())
def test_run_config_vocab_divisor_reproduces_padded_row_count(vocabulary, padding, divisor):
    rows = vocabulary + padding
    model = run_config({}, "x", "torch_dist", provider="", vocabulary=vocabulary, rows=rows, vocab_divisor=divisor)[
        "model"
    ]
    assert model["tensor_model_parallel_size"] == 1
    number = model["make_vocab_size_divisible_by"] if model.get("should_pad_vocab") else 1
    assert -(-vocabulary // number) * number == rows
