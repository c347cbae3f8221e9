"""What ranks tell each other is JSON: what arrives is never executed, and says who may have sent it."""

from __future__ import annotations

import ast
from pathlib import Path

import slurmtrain

PACKAGE = Path(slurmtrain.__file__).parent
# What these pickle stays between a process and its own workers, or in files of one person's own sweep. The last reads
# files of other programs: by torch's unpickler of weights alone.
PICKLE = {
    "data/loading/workers.py",
    "control/mapping.py",
    "runtime/jobs/map_task.py",
    "checkpoint/difference.py",
}

# Of torch.distributed: they pickle.
OF_OBJECTS = {f"{verb}_object" for verb in ("gather", "all_gather")}
OF_OBJECTS |= {f"{verb}_object_list" for verb in ("broadcast", "scatter", "send", "recv")}


def test_no_module_sends_objects_to_other_ranks() -> None:
    found, pickling = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            words = [node.attr] if isinstance(node, ast.Attribute) else [node.id] if isinstance(node, ast.Name) else []
            words += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            found += [f"{name}: {word}" for word in words if word in OF_OBJECTS]
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {module.partition(".")[0] for module in modules} & {"pickle", "cloudpickle", "dill", "marshal"}:
                pickling.add(name)
    assert found == []
    assert pickling == PICKLE
