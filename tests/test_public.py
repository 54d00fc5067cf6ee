"""The public names, the seam's shape, and the rules of the house."""

import ast
import inspect
import pkgutil
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import torch

import multigate as mg
from multigate.ops.backend import at_trace_time

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
        "generate",
        "ops",
        "preset",
        "register_residual",
        "residual_names",
    ]
    assert mg.ops.__all__ == ["depth_pool", "gate_pool"]
    # The ten of the paper and its field come first; a file that is added comes after them.
    assert mg.residual_names()[:10] == [
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
        *("norm_weight=None", "eps=1e-06", "backend='auto'"),
    ]
    assert signature(mg.ops.depth_pool) == [
        *("sources", "query", "scale=1.0", "norm_weight=None", "eps=1e-06", "backend='auto'"),
    ]
    assert signature(mg.build_residual) == ["name", "dim", "depth", "streams=None", "options"]
    assert signature(mg.Stack)[:4] == [
        *("sublayers", "residual='mgr-competitive'", "dim=None", "streams=None"),
    ]


OF_TRANSFORMERS = {"multigate.hf.config", "multigate.hf.model"}
"""They define classes of Transformers; `multigate.hf` imports them where there is that package."""


def modules():
    """All but the command line, the Triton kernels, which an operation imports when it runs, and
    what is a class of Transformers."""
    left_out = OF_TRANSFORMERS | {"multigate.__main__"}
    return [
        m.name
        for m in pkgutil.walk_packages([str(ROOT)], "multigate.")
        if m.name not in left_out and not m.name.split(".")[-1].startswith("triton")
    ]


def test_every_module_imports_without_the_optional_packages():
    blocked = ["triton", "transformers", "matplotlib", "tokenizers", "datasets", "wandb", "plotly"]
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


def test_importing_multigate_does_not_import_the_compiler():
    """It takes longer than torch itself, and most users of the command line never need it."""
    heavy = ("torch._dynamo", "sympy", "triton", "transformers", "matplotlib")
    code = f"import multigate, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_asked_at_trace_time_has_torchs_own_mark():
    def theirs():
        return 1

    def ours():
        return 1

    torch.compiler.assume_constant_result(theirs)
    assert vars(at_trace_time(ours)) == vars(theirs) != {}


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


EQUATIONS = {
    "prenorm": ["x <- x + y"],
    "highway": ["x <- (1 - g) x + g y", "g = sigmoid("],
    "denseformer": ["Y_i = sum over j"],
    "hc": ["pre  = s_a tanh(", "X_k <- post_k y_l + sum_j mix[j, k] X_j"],
    "mhc": ["u_a  = scale_a", "X_k <- post_k y_l"],
    "mhc-lite": ["mix = sum_k softmax(u_mix)_k P_k", "X_k <- post_k y_l"],
    "attnres-full": ["alpha = softmax_i( (gain * query) . rms(v_i) )"],
    "attnres-block": ["h = sum_i alpha_i v_i", "round(k depth / streams)"],
    "mgr-independent": ["beta_i = sigmoid( w1 . rms(s_i) / sqrt(D) + b_i )", "s_i <- s_i + beta_i"],
    "mgr-competitive": ["beta_i = e^{z_i} / (e^{b_0} + sum_j e^{z_j})", "alpha = softmax_i("],
}


def test_every_residual_states_its_equations():
    """In its own docstring or in that of the class in residuals/ it is made from."""
    for name, lines in EQUATIONS.items():
        classes = type(mg.build_residual(name, 8, 12)).__mro__
        ours = [c for c in classes if c.__module__.startswith("multigate.residuals.")]
        text = "\n".join(inspect.getdoc(c) for c in ours)
        for line in lines:
            assert line in text, f"{name} does not say {line!r}"


def test_one_version_everywhere():
    root = ROOT.parent.parent
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"] == (
        mg.__version__
    )
    assert f"version: {mg.__version__}" in (root / "CITATION.cff").read_text()
