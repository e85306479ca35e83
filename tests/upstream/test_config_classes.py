"""Names of Megatron-Bridge that upstream/config_classes.py reads."""

from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("config_classes")
PROVIDER = "megatron.bridge.models.distillation_provider"


def test_distillation_provider_sets_and_reads_private_super_class():
    CONTRACT.mentions(PROVIDER, "DistillationProvider.__post_init__", "self._super_class")
    CONTRACT.mentions(PROVIDER, "DistillationProvider.provide", "self._super_class")


def test_distillation_provider_sets_attributes_that_we_remove():
    CONTRACT.mentions(
        PROVIDER, "convert_to_distillation_provider", "teacher", "kd_config", "distill_submodule", "_pre_wrap_hooks"
    )
    CONTRACT.mentions(PROVIDER, "DistillationProvider", "self.full_model")


def test_remove_teacher_removes_only_distillation_attributes():
    from qwen3vl_bridge.upstream.config_classes import is_student, own_class, remove_teacher

    student = SimpleNamespace(_super_class=dict, teacher=1, kd_config=2, full_model=3, hidden_size=4)
    assert is_student(student) and own_class(student) is dict
    attributes = dict(vars(student))
    remove_teacher(attributes)
    assert attributes == {"hidden_size": 4}
    other = SimpleNamespace(_pre_wrap_hooks=[1])
    remove_teacher(vars(other))
    assert not is_student(other) and own_class(other) is SimpleNamespace and other._pre_wrap_hooks == [1]
