"""Settings that would be ignored are refused: each of them, and only while nothing reads them."""

import copy
import re
from functools import reduce
from pathlib import Path

import qwen3vl_bridge
from qwen3vl_bridge import registry
from qwen3vl_bridge.models.refusals import PARTS, UNREAD
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.training import run_refusals
from qwen3vl_bridge.training.process_groups import shutdown

import megatron.bridge
import pytest
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import InProcessRestartConfig, StragglerDetectionConfig
from qwen3vl_recipes import qwen3_vl_2b_sft_config
from qwen3vl_recipes.dry_run import finalised

MODELS = [("qwen3_vl", "8B"), ("qwen3_vl", "30B-A3B"), ("qwen3_5", "9B"), ("qwen3_5", "35B-A3B")]
# Other models' recipes and layers, and code of Megatron-LM's loop.
OTHERS = re.compile(r"(recipes|perf_recipes|diffusion|models/(?!conversion)[^/]+|training/mlm_compat)/")


def changed(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return {str: "other", list: ["other"]}.get(type(value), 1)


@pytest.mark.parametrize(("family", "size"), MODELS)
def test_what_nothing_reads_keeps_its_default(family, size):
    config = registry.presets_of(family).hf_config(size)
    plain = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    of_family = [name for name, row in plain.fixed.items() if row.why == UNREAD["flash_decode"].why]
    assert set(UNREAD) <= set(of_family)
    for name in of_family:
        provider = copy.copy(plain)
        setattr(provider, name, changed(getattr(plain, name)))
        with pytest.raises(ValueError, match=f"^{name} is .*, expected .*: nothing reads it for this model"):
            provider.finalize()
        setattr(provider, name, None)
        check([plain.fixed[name]], provider)
    plain.finalize()
    plain.finalize()  # as completed by the first


@pytest.mark.parametrize("name", PARTS)
def test_what_belongs_to_something_that_is_off_keeps_its_default(name):
    config = registry.presets_of("qwen3_vl").hf_config("2B")
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    setattr(provider, name, changed(getattr(provider, name)))
    switch = PARTS[name].when.names
    with pytest.raises(ValueError, match=f"^{name} is .* with {switch} .*, expected .*: it would be ignored"):
        provider.finalize()
    setattr(provider, switch, "transformer_engine" if switch == "cuda_graph_impl" else True)
    check([PARTS[name]], provider)


@pytest.fixture(scope="module")
def run():
    """A run's configuration, completed, with sections that recipes leave out."""
    shutdown()
    cfg = qwen3_vl_2b_sft_config()
    cfg.straggler, cfg.inprocess_restart = StragglerDetectionConfig(), InProcessRestartConfig()
    return finalised(cfg, 8)


@pytest.mark.parametrize("row", run_refusals.IGNORED, ids=lambda row: row.name)
def test_what_a_run_does_not_read_keeps_its_default(run, row):
    section, name = row.name.split(".")
    owner = getattr(run, section)
    before = getattr(owner, name)
    setattr(owner, name, changed(before))
    try:
        with pytest.raises(
            ValueError, match=rf"^{section}\.{name} is .*, expected .*: (the training loop does|it would)"
        ):
            check(run_refusals.AFTER_VALIDATE, run)
    finally:
        setattr(owner, name, before)
    check(run_refusals.AFTER_VALIDATE, run)


@pytest.mark.parametrize("switch", run_refusals.PARTS)
def test_what_is_on_has_its_settings(run, switch):
    """Not refused by the rows of that switch."""
    cfg = copy.deepcopy(run)
    section, name = switch.split(".")
    setattr(getattr(cfg, section), name, True)
    rows = [row for row in run_refusals.IGNORED if row.when.names == switch]
    assert rows
    for row in rows:
        owner, field = getattr(cfg, section), row.name.split(".")[1]
        setattr(owner, field, changed(reduce(getattr, row.name.split("."), cfg)))
    check(rows, cfg)


def test_the_training_loop_does_not_read_them():
    """In the installed releases: a field that a newer one reads is to be taken off the table."""
    names = "|".join(name for _, names in run_refusals.UNREAD.values() for name in names.split())
    read = re.compile(rf"(?<!optim_config)(?<!self)(?<!model)\.({names})\b")  # other sections have some of them too
    found = {}
    for package in (megatron.bridge.__path__[0], Path(qwen3vl_bridge.__file__).parent):
        for file in Path(package).rglob("*.py"):
            place = file.relative_to(package).as_posix()
            code = re.sub(r"#.*", "", file.read_text())
            if not OTHERS.match(place) and (fields := set(read.findall(code))):
                found[place] = fields
    assert found == {}
