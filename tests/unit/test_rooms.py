"""The rooms of the package: imports go one way, the login node needs no torch, and ranks send each other no objects."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "slurmtrain"
# What answers at once, and a requeue within its grace time.
WITHOUT_TORCH = ("cli", "control", "sweep", "launch", "report", "supervise", "hangs")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """The modules of this package that these statements import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: not those of functions, nor those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from at_import(child)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else None


def assert_one_direction(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_rooms_import_in_one_direction() -> None:
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        room = room_of(module)
        if room is not None:
            others = {room_of(other) for other in imported(ast.walk(tree_of(module)))} - {room, None}
            graph.setdefault(room, set()).update(str(other) for other in others)
    assert_one_direction(graph)


def test_no_modules_import_each_other() -> None:
    graph = {module: imported(at_import(tree_of(module))) - {module} for module in MODULES}
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    for module, others in graph.items():
        graph[module] = {other for other in others if not (other in packages and module.startswith(f"{other}."))}
    assert_one_direction(graph)


def test_the_login_node_imports_no_torch() -> None:
    reached: dict[str, str] = {}
    left = [(module, module) for module in MODULES if room_of(module) in WITHOUT_TORCH]
    assert left
    while left:
        module, since = left.pop()
        if module in reached:
            continue
        reached[module] = since
        left += [(other, since) for other in imported(at_import(tree_of(module)))]
    heavy = [
        f"{module}, loaded by {since}"
        for module, since in reached.items()
        for node in at_import(tree_of(module))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch")
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "torch" for alias in node.names))
    ]
    assert heavy == []


# What ranks tell each other is JSON: what arrives is never executed, and says who may have sent it.
# What these pickle stays between a process and its own workers, or in files of one person's own sweep. The last reads
# files of other programs: by torch's unpickler of weights alone.
PICKLE = {
    "slurmtrain.data.loading.workers",
    "slurmtrain.control.mapping",
    "slurmtrain.rank.jobs.map_task",
    "slurmtrain.checkpoint.difference",
}
# Of torch.distributed: they pickle.
OF_OBJECTS = {f"{verb}_object" for verb in ("gather", "all_gather")}
OF_OBJECTS |= {f"{verb}_object_list" for verb in ("broadcast", "scatter", "send", "recv")}


def test_no_module_sends_objects_to_other_ranks() -> None:
    found, pickling = [], set()
    for name in MODULES:
        for node in ast.walk(tree_of(name)):
            words = [node.attr] if isinstance(node, ast.Attribute) else [node.id] if isinstance(node, ast.Name) else []
            words += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            found += [f"{name}: {word}" for word in words if word in OF_OBJECTS]
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {module.partition(".")[0] for module in modules} & {"pickle", "cloudpickle", "dill", "marshal"}:
                pickling.add(name)
    assert found == []
    assert pickling == PICKLE
