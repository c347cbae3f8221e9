"""What ranks tell each other is JSON: what arrives is never executed, and says who may have sent it."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slurmtrain
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.ranks import decode, encode
from tests.support.pickles import Evil

PACKAGE = Path(slurmtrain.__file__).parent
# What these pickle stays between a process and its own workers, or in files of one person's own sweep. The last two read
# files of other programs: by torch's unpickler of weights alone.
PICKLE = {
    "data/loading/workers.py",
    "control/mapping.py",
    "runtime/jobs/map_task.py",
    "weights/import_weights.py",
    "checkpoint/difference.py",
}

# Of torch.distributed: they pickle.
OF_OBJECTS = {f"{verb}_object" for verb in ("gather", "all_gather")}
OF_OBJECTS |= {f"{verb}_object_list" for verb in ("broadcast", "scatter", "send", "recv")}

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(plain, st.integers(0, 40))
def test_plain_values_arrive_as_they_were(value: Any, padding: int) -> None:
    assert decode(encode(value) + bytes(padding)) == value


def test_what_is_no_message_is_refused_and_executes_nothing(tmp_path: Path) -> None:
    message = encode([{"a": [1, b"12345678"]}, None])
    for data in (
        pickle.dumps(Evil(tmp_path / "canary")),
        message[:20],
        message.replace(b'"MTIzNDU2Nzg="', b'"MTIz*"'),
        message.replace(b'"MTIzNDU2Nzg="', b"[1]"),
        b"[" * 100_000,
        b"\xff",
    ):
        with pytest.raises(CheckpointError, match="is not the beginning of a message"):
            decode(data)
    assert list(tmp_path.iterdir()) == []


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
