"""The source files that a model needs where multigate is not installed, as Transformers wants them.

Transformers copies a model's code file by file, follows `from .name import ...` and knows no
folders. So every module that is needed becomes one file beside the weights, with its imports
rewritten. Nothing is written twice: what travels is the code that is running, less the kernels.
"""

import ast
from functools import cache
from pathlib import Path
from typing import TypeGuard

import multigate
from multigate.residuals import Residual

ROOT = Path(multigate.__file__).parent
CONFIG, MODEL = "configuration_multigate", "modeling_multigate"
NAMES = {"multigate.hf.config": CONFIG, "multigate.hf.model": MODEL}
STAND_INS = {
    "multigate.ops.gate_pool": "multigate.hf.portable_ops",
    "multigate.ops.depth_pool": "multigate.hf.portable_ops",
    "multigate.ops.sinkhorn": "multigate.ops.sinkhorn.reference",
    "multigate.residuals.memory": "multigate.hf.portable_memory",
}
"""Modules that choose among kernels, and what takes their place."""
MARK = "# Written by `multigate export`"
AUTO_MAP = {
    "AutoConfig": f"{CONFIG}.MultigateConfig",
    "AutoModelForCausalLM": f"{MODEL}.MultigateForCausalLM",
}
Origin = tuple[str, str | None]
"""A module and a name in it, or the module itself."""


def bundle(residual: Residual) -> dict[str, str]:
    """The files by name, for a model with this residual."""
    kind = type(residual)
    if not kind.__module__.startswith("multigate."):
        raise ValueError(
            f"the residual {residual.name!r} is defined in {kind.__module__}, outside of "
            "multigate, and its code cannot be exported: put its file into multigate/residuals."
        )
    files, waiting = dict[str, str](), list(NAMES)
    while waiting:
        module = waiting.pop()
        if file_name(module) in files:
            continue
        # Importing the file of a residual is what makes it known.
        more = [(kind.__module__, kind.__name__)] if NAMES.get(module) == MODEL else []
        text, needed = rewritten(module, more)
        files[file_name(module)] = text
        waiting += needed
    return dict(sorted(files.items()))


def file_name(module: str) -> str:
    parts = module.removeprefix("multigate.").removeprefix("hf.").split(".")
    return NAMES.get(module, "_".join(parts)) + ".py"


def rewritten(module: str, more: list[tuple[str, str]]) -> tuple[str, list[str]]:
    """The source of a module whose imports are of files beside it, and the modules they are of.

    `more` is imported as well.
    """
    source = source_file(module)
    lines = source.read_text(encoding="utf-8").splitlines()
    imports = filter(is_ours, ast.walk(tree(source)))
    needed = list[str]()
    # From the end on, so that the lines before keep their numbers.
    for node in sorted(imports, key=lambda node: -node.lineno):
        found = [(defined(base(node, module), a.name), a.asname or a.name) for a in node.names]
        if node.col_offset == 0:
            found, more = [*found, *((origin, origin[1]) for origin in more)], []
        lines[node.lineno - 1 : node.end_lineno] = import_lines(found, " " * node.col_offset)
        needed += [owner for (owner, _), _ in found]
    at = source.relative_to(ROOT.parent).as_posix()
    head = f"{MARK} from {at} of multigate {multigate.__version__}.\n"
    return head + "# SPDX-License-Identifier: Apache-2.0\n" + "\n".join(lines) + "\n", needed


def import_lines(found: list[tuple[Origin, str]], indent: str) -> list[str]:
    """Import statements for what is defined in modules, each under the name it is known by."""
    names = dict[str, list[str]]()
    for (module, name), known_as in found:
        flat = file_name(module).removesuffix(".py")
        start, real = (f"from .{flat} import ", name) if name else ("from . import ", flat)
        renamed = "" if known_as == real else f" as {known_as}"
        names.setdefault(indent + start, []).append(f"{real}{renamed}")
    return [start + ", ".join(sorted(found)) for start, found in names.items()]


def defined(module: str, name: str) -> Origin:
    """Where `name` of `module` is really made: a package only passes on, or is one of modules."""
    source = source_file(module)
    if source.name == "__init__.py":
        for node in tree(source).body:
            # From the package itself come its modules.
            if is_ours(node) and base(node, module) != module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return defined(base(node, module), alias.name)
        if source_file(f"{module}.{name}").exists():
            return f"{module}.{name}", None
    return STAND_INS.get(module, module), name


def base(node: ast.ImportFrom, module: str) -> str:
    """The module that an import statement of `module` names, from the root on."""
    if node.level == 0:
        return str(node.module)
    parts = module.split(".")
    if source_file(module).name == "__init__.py":
        parts = [*parts, "__init__"]
    return ".".join([*parts[: -node.level], *([node.module] if node.module else [])])


def is_ours(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    """Whether it imports from this package; `import multigate...` is left to be an error."""
    if isinstance(node, ast.Import):
        assert not any(alias.name.split(".")[0] == "multigate" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (
        node.level > 0 or str(node.module).split(".")[0] == "multigate"
    )


def source_file(module: str) -> Path:
    path = ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_name(path.name + ".py")


@cache
def tree(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))
