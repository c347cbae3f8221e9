"""What ranks tell each other is JSON and bytes: what arrives is never executed, and says who may have sent it."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slurmtrain
from slurmtrain.checkpoint.messages import FAILURES, decode, decode_failure, encode, encode_failure
from slurmtrain.errors import CheckpointError
from tests.support.pickles import Evil

PACKAGE = Path(slurmtrain.__file__).parent
# What these pickle stays between a process and its own workers, or in files of one person's own sweep. The last three read
# files of other programs: by an unpickler that knows the classes of their metadata alone, or torch's of weights alone.
PICKLE = {
    "data/loading/shared_memory.py",
    "data/loading/workers.py",
    "sweep/hydra_launcher.py",
    "runtime/jobs/hydra_task.py",
    "control/mapping.py",
    "runtime/jobs/map_task.py",
    "checkpoint/dcp.py",
    "models/import_weights.py",
    "checkpoint/program_tensors.py",
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
    assert decode(memoryview(encode(value) + bytes(padding))) == value


def hostile(canary: Path) -> Iterator[bytes]:
    message = encode([{"a": [1, b"12345678"]}, None])
    yield pickle.dumps(Evil(canary))
    yield message[:20]
    yield message.replace(b"[0,8]", b"[0,9]")
    yield message.replace(b"[0,8]", b"[-1,8]")
    yield message.replace(b"[0,8]", b'"0,8"')
    yield message[:4] + (1 << 62).to_bytes(8, "little") + message[12:]
    deep = b"[" * 100_000
    yield message[:4] + len(deep).to_bytes(8, "little") + deep


def test_what_is_no_message_is_refused_and_executes_nothing(tmp_path: Path) -> None:
    for data in hostile(tmp_path / "canary"):
        with pytest.raises(CheckpointError, match="is not the beginning of a message"):
            decode(memoryview(data))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", FAILURES.values())
def test_an_error_is_named_by_a_word_and_arrives_as_it_was(kind: type[CheckpointError]) -> None:
    found = decode_failure(decode(memoryview(encode(encode_failure(kind("it failed", hint="look"))))))
    assert (type(found), found.message, found.hint) == (kind, "it failed", "look")


@pytest.mark.parametrize("told", [["os.system", "x", None], [["x"], "x", None], "x", [1, 2], ["lost", 3, None], {}])
def test_a_failure_that_is_told_wrongly_is_a_failure_all_the_same(told: Any) -> None:
    assert type(decode_failure(told)) is CheckpointError


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
