"""Looks for the shim's seams in the source of a vLLM wheel, without importing it.

    python source_seams.py WHEEL_OR_FOLDER...

For releases that cannot be installed beside the others. Prints what each lacks;
exit status 1 if one lacks anything.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

TABLE = Path(__file__).parents[2] / "vllm_integration/rankbook_vllm/_vllm/seams.py"


def table():
    """The shim's table, without the shim: its package imports vLLM."""
    spec = importlib.util.spec_from_file_location("seams", TABLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reader(where: Path) -> Callable[[str], str]:
    """Reads files of a wheel, or of a folder that one was unpacked to."""
    if where.is_dir():
        return lambda name: (where / name).read_text()
    wheel = zipfile.ZipFile(where)
    return lambda name: wheel.read(name).decode()


def lacking(read: Callable[[str], str]) -> list[str]:
    """What the source lacks, in the words that the shim itself would use."""
    seams = table()
    folder = seams.NIXL.replace(".", "/")
    names = {*seams.FUNCTIONS, *(module for module, _ in seams.METHODS)}
    trees = {name: ast.parse(read(f"{folder}/{name}.py")) for name in names}
    found = []
    for module, functions in seams.FUNCTIONS.items():
        known = {
            alias.asname or alias.name
            for node in ast.walk(trees[module])
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        } | {node.name for node in trees[module].body if isinstance(node, ast.FunctionDef)}
        found += [f"{module}.{name}" for name in functions if name not in known]

    def methods_of(module: str, owner: str) -> dict[str, ast.FunctionDef]:
        for node in trees[module].body:
            if isinstance(node, ast.ClassDef) and node.name == owner:
                return {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        return {}

    for (module, owner), methods in seams.METHODS.items():
        known_methods = methods_of(module, owner)
        for name, parameters in methods.items():
            if name not in known_methods:
                found.append(f"{owner}.{name}")
                continue
            taken = {argument.arg for argument in known_methods[name].args.args}
            found += [f"{owner}.{name}({one})" for one in parameters if one not in taken]
    for (module, owner), attributes in seams.ATTRIBUTES.items():
        init = methods_of(module, owner).get("__init__")
        set_here = (
            {node.attr for node in ast.walk(init) if isinstance(node, ast.Attribute)}
            if init
            else set()
        )
        found += [f"{owner}.{name}" for name in attributes if name not in set_here]
    return found


if __name__ == "__main__":
    results = {name: lacking(reader(Path(name))) for name in sys.argv[1:]}
    for name, missing in results.items():
        print(f"{Path(name).name}: {', '.join(missing) or 'has every seam'}")  # noqa: T201
    sys.exit(any(results.values()))
