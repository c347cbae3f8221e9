"""A checkpoint made by somebody who wants harm, with digests that fit: nothing runs, nothing is written elsewhere, memory stays
bounded, and a person reads one sentence.

Everything runs in a fork with little memory and little time, so that what goes wrong goes wrong there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.difference import differences
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.cli import main
from slurmtrain.errors import SlurmtrainError
from tests.support.checkpoint_files import record_of
from tests.support.pickles import Evil

MEMORY_BYTES = 1_500_000_000  # beyond what this process has already
TIME_S = 10
RANK = "rank00000.safetensors"
DEEP = "[" * 100_000
HUGE = 1 << 62
WEIGHT, MOMENT = "model.weight", "optimizer.state.model.weight.exp_avg"


class Forged:
    """A checkpoint taken apart. `write` puts it together again, with digests that fit what is there then."""

    def __init__(self, path: Path):
        self.path = path
        self.manifest: Any = json.loads((path / "manifest.json").read_text())
        content = (path / RANK).read_bytes()
        length = int.from_bytes(content[:8], "little")
        self.header: Any = json.loads(content[8 : 8 + length])
        self.body = content[8 + length :]
        self.beginning: bytes | None = None  # of the file, in place of the header
        self.text: bytes | None = None
        self.changes: Callable[[Any], None] = lambda manifest: None

    @property
    def evil(self) -> bytes:
        return pickle.dumps(Evil(self.path.parent.parent / "canary"))

    def change_own_state(self, text: bytes) -> None:
        begin, end = self.header["own/"]["data_offsets"]
        self.body = self.body[:begin] + text.ljust(end - begin)[: end - begin]

    def rename(self, name: str, called: str) -> None:
        """Give an entry of the header another name, in its place."""
        self.header = {called if key == name else key: value for key, value in self.header.items()}

    def write(self) -> None:
        beginning = self.beginning
        if beginning is None:
            text = json.dumps(self.header).encode()
            beginning = len(text).to_bytes(8, "little") + text
        (self.path / RANK).write_bytes(beginning + self.body)
        record = record_of(self.path / RANK)
        self.manifest["files"] = {RANK: {"size": record.size, "digests": record.digests}}
        self.manifest["headers"] = {RANK: hashlib.sha256(beginning).hexdigest()}
        self.changes(self.manifest)
        manifest = self.text if self.text is not None else json.dumps(self.manifest).encode()
        (self.path / "manifest.json").write_bytes(manifest)
        (self.path / "COMPLETE").write_text(hashlib.sha256(manifest).hexdigest() + "\n")


Attack = Callable[[Forged], None]
ATTACKS: dict[str, Attack] = {}


def each(name: str, values: Iterable[Any], act: Callable[[Forged, Any], Any]) -> None:
    """An attack for each value: `name` has a place for it, or for the label that is given with each in a mapping."""
    labelled = values.items() if isinstance(values, Mapping) else [(value, value) for value in values]
    ATTACKS.update({name.format(label): partial(_act, act, value) for label, value in labelled})


def _act(act: Callable[[Forged, Any], Any], value: Any, forged: Forged) -> None:
    act(forged, value)


def change(act: Callable[[Any, Any], Any]) -> Callable[[Forged, Any], None]:
    """An act that changes the manifest which is written."""
    return lambda forged, value: setattr(forged, "changes", lambda manifest: act(manifest, value))


def put(where: Callable[[Forged], Any], *path: str) -> Callable[[Forged, Any], None]:
    """An act that puts the value at a path of what `where` gives."""

    def act(forged: Forged, value: Any) -> None:
        inside = where(forged)
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value

    return act


def header(forged: Forged) -> Any:
    return forged.header


def tensors(forged: Forged) -> Any:
    return forged.manifest["tensors"]


# Code where data belongs.

OWN_STATE = {"own/00000/random": {"python": "x", "torch": {"__tensor__": "nowhere"}}}
ATTACKS |= {
    "a pickle as the shard": lambda forged: forged.__dict__.update(beginning=forged.evil, body=b""),
    "a pickle as the header": lambda forged: forged.__dict__.update(
        beginning=len(forged.evil).to_bytes(8, "little") + forged.evil
    ),
    "a pickle as the rank's own state": lambda forged: forged.change_own_state(forged.evil),
    "nonsense as the rank's own state": lambda forged: forged.change_own_state(json.dumps(OWN_STATE).encode()),
    "a pickle as manifest.json": lambda forged: forged.__dict__.update(text=forged.evil),
}

# Names that lead elsewhere.

NAMES = {
    "a relative path": "../../secret",
    "an absolute path": "/proc/self/environ",
    "a null byte": "a\0b",
    "nothing": "",
}


def in_place_of_the_shard(manifest: Any, name: str) -> None:
    for key in ("files", "headers"):
        manifest[key] = {name: manifest[key][RANK]}


each("{} in the manifest in place of the shard", NAMES, change(in_place_of_the_shard))
each("{} in the header", NAMES, lambda forged, name: forged.rename(WEIGHT, name))

# Absurd headers.

HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "a length beyond the end": lambda text: HUGE.to_bytes(8, "little") + text,
    "a deep one": lambda text: len(DEEP).to_bytes(8, "little") + DEEP.encode(),
    "a list": lambda text: (2).to_bytes(8, "little") + b"[]",
    "four bytes": lambda text: b"abcd",
}
RANGES: list[Any] = [[-1, 5], [0, HUGE], [HUGE, HUGE], [0.5, 1], ["0", "1"], None]
BOXES = ["[4:12, 0:8]", "[-8:0, 0:8]", "[8:0, 8:0]", "[0:64]", "[", f"[0:8, 0:{'9' * 19}]", f"[0:8, 0:{'9' * 5000}]"]
OTHERS: list[Any] = [[], None, "x", {}]
each(
    "a header: {}",
    HEADERS,
    lambda forged, change: setattr(forged, "beginning", change(json.dumps(forged.header).encode())),
)
for key in (MOMENT, "own/"):
    each(f"{key} at {{}}", RANGES, put(header, key, "data_offsets"))
    each(f"an entry {{}} as {key}", OTHERS, put(header, key))
each("a box {:.40}", BOXES, lambda forged, box: forged.rename(WEIGHT, WEIGHT + box))

# Absurd tensors, values in manifest.json, and state.

SHAPES: list[Any] = [[1 << 40], [HUGE, HUGE], [-8, -8], [8.0, 8.0], [8] * 500, [HUGE // 2, HUGE // 2, 0]]
DTYPES: list[Any] = ["load", "quint8", "float64", 5]
each("a shape {:.40}", {str(shape): shape for shape in SHAPES}, put(tensors, WEIGHT, "shape"))
each("a dtype {}", DTYPES, put(tensors, WEIGHT, "dtype"))
each("a tensor {}", OTHERS, put(tensors, WEIGHT))
each(
    "a tensor named as the rank's own state: {}",
    [[0], [3]],
    lambda forged, shape: tensors(forged).update({"own/00000/": {"shape": shape, "dtype": "uint8"}}),
)
each(
    "manifest.json in {}",
    ["utf-16", "utf-32"],
    lambda forged, encoding: setattr(forged, "text", json.dumps(forged.manifest).encode(encoding)),
)

VALUES: dict[str, list[Any]] = {
    "format": ["2", None],
    "run_id": [5],
    "step": ["1000", -1, float("inf"), 10**30],
    "incarnation_label": [5, "\x1b[31mred\x1b[0m\x07", "x" * 100_000],
    "world_size": [-1, 2, 1 << 62],
    "files": [None, {}, {RANK: 5}, {RANK: {"size": 1}}],
    "headers": [{}, {RANK: 5}, {RANK: ""}],
    "state": [None, "x"],
    "metrics": [5, {"valid_loss": {"a": 1}}, {"valid_loss": "\x1b[31m"}],
    "created": ["now", float("nan")],
}
for key, values in VALUES.items():
    each(
        f"{key} is {{:.40}}",
        {repr(value): {key: value} for value in values},
        change(lambda manifest, new: manifest.update(new)),
    )
each("a shard of {} bytes", [-1, 10**30], change(lambda manifest, size: manifest["files"][RANK].update(size=size)))
each("manifest.json: {:.20}", [DEEP, "[]", ""], lambda forged, text: setattr(forged, "text", text.encode()))

BOTH = ["model.weight", "model.bias"]
GROUPS: list[Any] = [5, [], [{"params": 5}], [{"params": []}]]
GROUPS += [[{"params": BOTH, "lr": rate}] for rate in ({"__tensor__": ["x"]}, {"__dict__": [[[1], 2]]})]
each(
    "the optimiser's groups are {:.100}",
    {str(groups): groups for groups in GROUPS},
    put(lambda forged: forged.manifest["state"], "optimizer"),
)
each(
    "the optimiser's state of a parameter is {}",
    [5, {"__tuple__": []}],
    put(lambda forged: forged.manifest["state"]["optimizer"]["state"], WEIGHT),
)

# Files that are none.


def only(act: Callable[[Path], None]) -> Attack:
    """Written, and then changed by `act`."""

    def attack(forged: Forged) -> None:
        forged.write()
        act(forged.path)
        forged.write = lambda: None  # type: ignore[method-assign]

    return attack


def as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


ATTACKS |= {
    "a shard that is a pipe": only(lambda path: as_a_pipe(path / RANK)),
    "a manifest that is a pipe": only(lambda path: as_a_pipe(path / "manifest.json")),
    "an endless manifest": only(lambda path: os.truncate(path / "manifest.json", 1 << 36)),
}


# What a person does with it.


def objects() -> dict[str, Any]:
    model = torch.nn.Linear(8, 8)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def restore(directory: Path, **options: Any) -> None:
    path = options.pop("path", None)
    checkpointer = Checkpointer(directory, **options)
    try:
        checkpointer.restore(path=path, **objects())
    finally:
        checkpointer.close()


def compare(directory: Path, path: Path) -> None:
    differences(path, directory.parent / "sound")


def verb(*words: str) -> Callable[[Path, Path], None]:
    def run(directory: Path, path: Path) -> None:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = main(["checkpoints", str(directory), *words])
        said = out.getvalue() + err.getvalue()
        assert code in (0, 1, 2, 78), code
        assert "Traceback" not in said
        assert said.encode()  # it can be printed
        assert all(letter.isprintable() or letter == "\n" for letter in said), repr(said)

    return run


ACTIONS: dict[str, Callable[[Path, Path], None]] = {
    "list": verb("list"),
    "verify": verb("verify"),
    "prune": verb("prune", "--keep-last", "2"),
    "export": verb("export", "out.safetensors"),
    "differences": compare,
    "restore by path": lambda directory, path: restore(directory, path=path),
    "restore": lambda directory, path: restore(directory),
}


def outcomes(acts: Mapping[str, Callable[[], None]]) -> dict[str, str]:
    """Run in a fork with little memory and time. For each "", one sentence, or what went wrong, marked by "HARM"."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        torch.set_num_threads(1)  # those of the parent are not there
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for name, act in acts.items():
            signal.alarm(TIME_S)
            text = ""
            try:
                act()
            except SlurmtrainError as error:
                text = str(error)
            except BaseException:
                text = "HARM " + traceback.format_exc()[-3000:]
            os.write(writer, (json.dumps([name, text]) + "\n").encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found = dict(json.loads(line) for line in pipe)
    _, status = os.waitpid(pid, 0)
    return {name: found.get(name, f"HARM: it ended with {status}") for name in [*acts][: len(found) + 1]}


def harm(found: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {text}" for name, text in found.items() if "HARM" in text)


def everything(path: Path) -> dict[str, Callable[[], None]]:
    return {name: partial(act, path.parent, path) for name, act in ACTIONS.items()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one checkpoint of a model and an optimiser that has stepped."""
    directory = tmp_path_factory.mktemp("sound")
    what = objects()
    what["model"](torch.ones(8)).sum().backward()
    what["optimizer"].step()
    checkpointer = Checkpointer(directory)
    checkpointer.save(1000, metrics={"valid_loss": 2.0}, **what)
    checkpointer.close()
    return directory


def copy(sound: Path, tmp_path: Path) -> Path:
    """The checkpoint in a directory of its own, with a secret two floors up."""
    (tmp_path / "secret").write_bytes((sound / "checkpoint_0001000" / RANK).read_bytes())
    (tmp_path / "sound").symlink_to(sound / "checkpoint_0001000")
    path = tmp_path / "checkpoints" / "checkpoint_0001000"
    path.mkdir(parents=True)
    for file in (sound / "checkpoint_0001000").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def test_a_moment_that_is_missing_is_not_begun_anew(sound: Path, tmp_path: Path) -> None:
    forged = Forged(copy(sound, tmp_path))
    forged.manifest["state"]["optimizer"]["state"][WEIGHT]["exp_avg"] = {"__tensor__": "nowhere"}
    forged.write()
    with pytest.raises(CheckpointError, match="the state of optimizer in the checkpoint cannot be read: 'nowhere'"):
        restore(forged.path.parent)


@pytest.mark.parametrize("name", list(ATTACKS))
def test_it_stays_harmless(name: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = copy(sound, tmp_path)
    forged = Forged(path)
    ATTACKS[name](forged)
    forged.write()
    before = {file.name for file in tmp_path.iterdir()}
    found = outcomes(everything(path))
    written = {file.name for file in tmp_path.iterdir()} - before
    assert written <= {"out.safetensors"}, "something was run, or written elsewhere"
    assert not harm(found)
    for text in found.values():
        assert "\n" not in text.partition("\n  hint: ")[0], "more than one sentence"


def test_the_unchanged_one_passes_all_of_it(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = copy(sound, tmp_path)
    Forged(path).write()
    assert outcomes(everything(path)) == dict.fromkeys(ACTIONS, "")


@pytest.mark.parametrize("name", ["../../secret", "{}/secret"])
def test_a_file_outside_is_not_read_as_weights(name: str, sound: Path, tmp_path: Path) -> None:
    path = copy(sound, tmp_path)
    forged = Forged(path)
    outside = name.format(tmp_path)
    forged.changes = lambda manifest: in_place_of_the_shard(manifest, outside)
    forged.write()
    (path / RANK).rename(tmp_path / "secret")
    found = outcomes({"restore": lambda: restore(path.parent, path=path)})
    assert found["restore"] and not harm(found)


@pytest.mark.parametrize("folder", [".incarnations", ".readers"])
@pytest.mark.parametrize("name", ["²", "9" * 200, "x\x1b"])
def test_junk_beside_the_checkpoints_is_no_harm(
    folder: str, name: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = copy(sound, tmp_path)
    (path.parent / folder).mkdir()
    (path.parent / folder / name).write_bytes(b"\xff\xfe")
    assert not harm(outcomes(everything(path)))


UNRESTORABLE: dict[str, Attack] = {
    "a header that does not parse": lambda forged: setattr(forged, "beginning", b"not a header"),
    "a box with fewer elements": lambda forged: forged.rename(WEIGHT, f"{WEIGHT}[0:7, 0:8]"),
    "a tensor too many": lambda forged: forged.manifest["tensors"].update(more={"shape": [3], "dtype": "float32"}),
    "a rank without a file": lambda forged: setattr(forged, "changes", lambda manifest: manifest.update(world_size=2)),
    "a list as the rank's own state": lambda forged: forged.change_own_state(b"[]"),
    "a manifest of other tensors": lambda forged: forged.manifest["tensors"].pop("model.bias"),
}


@pytest.mark.parametrize("name", UNRESTORABLE)
def test_what_cannot_be_restored_is_set_aside_before_a_tensor_is_touched(
    name: str, sound: Path, tmp_path: Path
) -> None:
    """Though every digest fits."""
    forged = Forged(copy(sound, tmp_path))
    UNRESTORABLE[name](forged)
    forged.write()
    what = objects()
    before = what["model"].weight.clone()
    with pytest.raises(SlurmtrainError, match=r"every checkpoint in .* is damaged"):
        Checkpointer(forged.path.parent).restore(**what)
    assert torch.equal(what["model"].weight, before) and not what["optimizer"].state
