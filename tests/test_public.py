"""The public names, the seam's shape, and the rules of the house."""

import ast
import inspect
import pkgutil
import statistics
import subprocess
import sys
from pathlib import Path

import multigate as mg

ROOT = Path(mg.__file__).parent


def signature(function):
    parameters = inspect.signature(function).parameters.values()
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]


def test_names():
    assert sorted(mg.__all__) == [
        "GPT",
        "GPTConfig",
        "MultiGateResidual",
        "Residual",
        "Stack",
        "Sublayer",
        "build_residual",
        "gate_bias_init",
        "ops",
        "preset",
        "register_residual",
        "residual_names",
    ]
    assert mg.ops.__all__ == ["depth_pool", "gate_pool"]
    assert mg.residual_names() == [
        *("prenorm", "highway", "denseformer", "hc", "mhc", "mhc-lite"),
        *("attnres-full", "attnres-block", "mgr-independent", "mgr-competitive"),
    ]


def test_signatures():
    assert signature(mg.MultiGateResidual) == [
        *("d_model", "n_stream", "gate_variant='competitive'", "init_bias=0", "eps=1e-06"),
    ]
    assert signature(mg.gate_bias_init) == [
        *("lerp_depth", "streams", "base_depth=21", "base_bias=-3.0"),
    ]
    assert signature(mg.ops.gate_pool) == [
        *("y", "streams", "w_gate", "w_pool", "bias", "variant='competitive'"),
        *("norm_weight=None", "eps=1e-06"),
    ]
    assert signature(mg.build_residual) == ["name", "dim", "depth", "streams=None", "options"]
    assert signature(mg.Stack)[:4] == [
        *("sublayers", "residual='mgr-competitive'", "dim=None", "streams=None"),
    ]


def modules():
    return [
        m.name
        for m in pkgutil.walk_packages([str(ROOT)], "multigate.")
        if m.name != "multigate.__main__"
    ]


def test_every_module_imports_without_the_optional_packages():
    blocked = ["triton", "transformers", "matplotlib", "tokenizers", "datasets", "wandb"]
    code = f"""
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
for name in {modules()!r}:
    importlib.import_module(name)
print("imported", len({modules()!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"imported {len(modules())}"


def sources():
    return {f: f.read_text() for f in ROOT.rglob("*.py")}


def test_files_are_small_rooms():
    lines = {f: text.count("\n") for f, text in sources().items()}
    assert statistics.median(lines.values()) <= 150
    for file, count in lines.items():
        assert count <= (600 if file.name == "triton.py" else 400), file
    assert lines[ROOT / "gpt.py"] < 250


def test_nothing_outside_residuals_branches_on_a_residuals_name():
    """No comparison with, and no match on, a registered name anywhere but in residuals/."""
    names = set(mg.residual_names())
    for file, text in sources().items():
        if "residuals" in file.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare | ast.MatchValue):
                constants = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                assert not constants & names, f"{file}:{node.lineno} branches on a residual"


def test_every_residual_states_its_equations():
    for name in mg.residual_names():
        residual = mg.build_residual(name, 8, 12)
        text = inspect.getdoc(type(residual))
        inherited = "".join(inspect.getdoc(c) or "" for c in type(residual).__mro__[1:3])
        assert " = " in text + inherited, f"{name} has no equation in its docstring"
