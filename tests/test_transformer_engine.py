"""What megatron-core, Megatron-Bridge and this package import of Transformer Engine exists, or is missed with a guard.

Transformer Engine is not installed here. `NAMES` are imported without a guard, and defined by the release of the pins,
2.16.1, and by the newest of 2026-11-26, 2.20.2. A new import or another release is compared with that release's wheel,
whose sources the last test reads without importing them: `pip install --no-deps --target FOLDER
transformer-engine==2.20.2`, then this file with FOLDER last in `PYTHONPATH`.
"""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

NAMES = {
    "transformer_engine": "",
    "transformer_engine.common.recipe": "DelayedScaling Float8BlockScaling Float8CurrentScaling Format "
    "MXFP8BlockScaling NVFP4BlockScaling",
    "transformer_engine.pytorch": "TransformerLayer UserBufferQuantizationMode fp8_autocast fp8_model_init",
    "transformer_engine.pytorch.attention.dot_product_attention": "backends context_parallel",
    "transformer_engine.pytorch.cpp_extensions": "gemm",
    "transformer_engine.pytorch.distributed": "checkpoint get_all_rng_states",
    "transformer_engine.pytorch.float8_tensor": "Float8Tensor",
    "transformer_engine.pytorch.fp8": "FP8GlobalStateManager fp8_autocast",
    "transformer_engine.pytorch.module._common": "", "transformer_engine.pytorch.module.layernorm": "",
    "transformer_engine.pytorch.module.layernorm_linear": "", "transformer_engine.pytorch.module.linear": "",
    "transformer_engine.pytorch.router": "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss "
    "fused_topk_with_score_function",
    "transformer_engine.pytorch.tensor": "QuantizedTensor",
    "transformer_engine.pytorch.tensor.float8_tensor": "Float8Tensor",
    "transformer_engine.pytorch.tensor.utils": "cast_master_weights_to_fp8 replace_raw_data",
}  # fmt: skip
# In neither: megatron-core imports it for releases before 2.0 alone.
GUARDED_BY_VERSION = {("fp8_utils.py", "transformer_engine.pytorch.cpp_extensions", "cast_to_fp8")}
CATCHES = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException", ""}


def bare_imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of imports of Transformer Engine outside a `try` that catches their failure; name "" for none."""
    if isinstance(node, ast.Try):
        kinds = [kind for handler in node.handlers for kind in getattr(handler.type, "elts", [handler.type])]
        caught = {ast.unparse(kind) if kind else "" for kind in kinds}
        inside = node.handlers + node.orelse + node.finalbody + ([] if caught & CATCHES else node.body)
        for child in inside:
            yield from bare_imports(child)
        return
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "transformer_engine")
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformer_engine":
        yield from ((str(node.module), alias.name) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from bare_imports(child)


@pytest.mark.parametrize("package", ["megatron.core", "megatron.bridge", "qwen3vl_bridge"])
def test_transformer_engine_imports_exist_or_are_guarded(package):
    spec = importlib.util.find_spec(package)
    assert spec and spec.origin
    missing, files = [], list(Path(spec.origin).parent.rglob("*.py"))
    for path in files:
        text = path.read_text()
        for module, name in bare_imports(ast.parse(text)) if "transformer_engine" in text else ():
            known = module in NAMES and (not name or name in NAMES[module].split())
            if not known and (path.name, module, name) not in GUARDED_BY_VERSION:
                missing.append((str(path), module, name))
    assert len(files) > 100 and not missing


@pytest.mark.parametrize("guard", ["(ImportError, OSError)", "Exception", "", "OSError"])
def test_bare_imports_skips_imports_whose_import_error_is_caught(guard):
    text = f"try:\n    from transformer_engine.a import b\nexcept {guard}:\n    import transformer_engine.c"
    bare = [("transformer_engine.a", "b")] if guard == "OSError" else []
    assert [*bare_imports(ast.parse(text))] == [("transformer_engine.c", ""), *bare]


def defined(root: Path, module: str) -> set[str] | None:
    """Names that a module below `root` binds as it is imported, and its submodules; None if it does not exist."""
    path = root.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    names = {child.stem for child in path.iterdir()} if path.is_dir() else set()
    package = module if path.is_dir() else module.rpartition(".")[0]
    left = list[ast.AST](ast.parse(file.read_text()).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names |= (defined(root, source) if source.startswith(f"{root.name}.") else None) or set()
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        left += ast.iter_child_nodes(node)
    return names


def test_transformer_engine_names_match_installed_release():
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        pytest.skip("Transformer Engine is not installed")
    root = Path(spec.origin).parent
    found = {module: defined(root, module) for module in NAMES}
    assert None not in found.values()
    there = {(module, name) for module, names in found.items() for name in names or ()}
    assert {(module, name) for module, names in NAMES.items() for name in names.split()} <= there
    assert not {(module, name) for _, module, name in GUARDED_BY_VERSION} & there
