"""Private names of other packages that occur in stored files.

No module of `upstream/` borrows these names: nothing of other packages is called by them. They are part of the formats
of checkpoints, so they stay in the modules that read these (`checkpoint/formats`, `weights/rows.py`), and old files
keep them when a package renames one. This test notices the renaming: files of the new release then need the new name as
well.
"""

import io
import pathlib
import pickle
import sys
import zipfile

import pytest
import torch

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("stored_names")


def test_private_torch_names_in_checkpoint_metadata_still_exist():
    from qwen3vl_bridge.checkpoint.formats.dcp import METADATA_GLOBALS

    for module, name in (
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
    ):
        CONTRACT.find(module, name)
        assert (module, name) in METADATA_GLOBALS


def test_torch_save_still_writes_rebuild_tensor_v2():
    CONTRACT.find("torch._utils", "_rebuild_tensor_v2")
    file = io.BytesIO()
    torch.save(torch.zeros(1), file)
    with zipfile.ZipFile(file) as archive:
        pickled = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    if b"ctorch._utils\n_rebuild_tensor_v2\n" not in pickled:
        CONTRACT.fail("torch", f"torch.save does not write torch._utils._rebuild_tensor_v2, but {pickled!r}")


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="only Python 3.13 stores paths as pathlib._local")
def test_python_3_13_has_pathlib_local_module():
    CONTRACT.find("pathlib._local", "PosixPath")


def test_pickled_path_is_loaded_as_string():
    from qwen3vl_bridge.checkpoint.formats.dcp import METADATA_GLOBALS
    from qwen3vl_bridge.core.files import load_pickle

    path = pathlib.PurePosixPath("folder/file")
    assert load_pickle(pickle.dumps(path, protocol=2), "a path", METADATA_GLOBALS) == "folder/file"


def test_modelopt_distillation_model_has_private_teacher_and_losses():
    """Parameters of a student that are stored with its own: the losses' and, unless it is hidden, its teacher's."""
    CONTRACT.mentions(
        "modelopt.torch.distill.distillation_model", "DistillationModel", "self._teacher_model", "self._loss_modules"
    )
