"""The class of a provider that Megatron-Bridge has made a student of a distillation.

Read: `DistillationProvider._super_class`. `convert_to_distillation_provider` gives a provider another class, which
hides the original fields and forwards attributes to a teacher. Only `_super_class` still refers to the original class.
Delete this module when the original class has a public name, or when copies of a student have no teacher.
"""

from __future__ import annotations

from typing import Any


def is_student(settings: Any) -> bool:
    """Return True if Megatron-Bridge has made a provider the student of a distillation."""
    return hasattr(settings, "_super_class")


def own_class(settings: Any) -> type:
    """Return the class of a provider. For a distillation student, return its class before it got a teacher."""
    return getattr(settings, "_super_class", type(settings))


def remove_teacher(attributes: dict[str, Any]) -> None:
    """Remove the teacher, in place, from the attributes (`vars(provider)`) of a distillation student.

    Attributes of other providers are not changed.
    """
    if "_super_class" in attributes:
        for name in ("_super_class", "teacher", "kd_config", "distill_submodule", "full_model", "_pre_wrap_hooks"):
            attributes.pop(name, None)
