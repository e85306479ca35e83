"""Hugging Face folders of all families for runs."""

from pathlib import Path

import pytest

from tests.models.qwen3_5.tiny import make_checkpoint


@pytest.fixture(scope="session")
def folders(moe_folder, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Hugging Face folders of other models than the model of `inputs`."""
    own = {
        ("qwen3_5", kind): make_checkpoint(tmp_path_factory.mktemp(f"qwen3_5_{kind}"), moe=kind == "moe")
        for kind in ("dense", "moe")
    }
    return own | {("qwen3_vl", "moe"): moe_folder}


@pytest.fixture(scope="session")
def family_folders(untied_folder, folders) -> dict[str, Path]:
    """Hugging Face folders by kind of model: dense, with experts, and with linear attention."""
    return {"dense": untied_folder, "MoE": folders["qwen3_vl", "moe"], "Qwen3.5": folders["qwen3_5", "dense"]}
