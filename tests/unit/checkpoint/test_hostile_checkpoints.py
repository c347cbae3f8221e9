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
import random
import resource
import signal
import struct
import traceback
import zlib
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.index_file import find_disagreement
from slurmtrain.checkpoint.format.manifest import read_manifest
from slurmtrain.checkpoint.restore.reader import load
from slurmtrain.cli import main
from slurmtrain.errors import SlurmtrainError
from tests.support.pickles import Evil

MEMORY_BYTES = 1_500_000_000  # beyond what this process has already
TIME_S = 10
RANK = "rank00000.safetensors"
DEEP = "[" * 100_000
HUGE = 1 << 62


class Forged:
    """A checkpoint taken apart. `write` puts it together again, with digests that fit what is there then."""

    def __init__(self, path: Path):
        self.path = path
        self.manifest: Any = json.loads((path / "manifest.json").read_text())
        data = (path / "index.bin").read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        self.header: Any = json.loads(data[8 : 8 + length])
        self.tables = {
            name: data[8 + length + position : 8 + length + position + size]
            for name, (position, size, _) in self.header["files"].items()
        }
        self.segments: Any = None
        self.index: bytes | None = None
        self.text: bytes | None = None
        self.names: dict[str, str] = {}  # of files in the index: another name
        self.more_files: dict[str, Any] = {}
        self.changes: Callable[[Any], None] = lambda manifest: None

    @property
    def evil(self) -> bytes:
        return pickle.dumps(Evil(self.path.parent.parent / "canary"))

    def numbers(self) -> Any:
        """The table of rank 0: schema, data_start, pieces, dimensions, own_bytes, tensors, boxes."""
        return np.frombuffer(zlib.decompress(self.tables[RANK]), dtype="<i8").copy()

    def set_numbers(self, numbers: Any) -> None:
        self.tables[RANK] = zlib.compress(np.asarray(numbers, dtype="<i8").tobytes())

    def set_number(self, place: int, value: int) -> None:
        numbers = self.numbers()
        numbers[place] = value
        self.set_numbers(numbers)

    def fact(self, name: str) -> Any:
        (found,) = [entry for entry in self.header["catalogues"][0] if entry[0] == name]
        return found

    def change(self, name: str, change: Callable[[bytearray], None]) -> None:
        content = bytearray((self.path / name).read_bytes())
        change(content)
        (self.path / name).write_bytes(content)

    def write(self) -> None:
        body, segments, records = b"", {}, {}
        for name, table in self.tables.items():
            called = self.names.get(name, name)
            record, digests = self._digest(self.path / called)
            segments[called] = [len(body), len(table), len(digests)]
            records[called] = record
            body += table + digests
        self.header["files"] = self.segments if self.segments is not None else segments
        text = self.header if isinstance(self.header, str) else json.dumps(self.header)
        index = self.index if self.index is not None else struct.pack("<Q", len(text)) + text.encode() + body
        (self.path / "index.bin").write_bytes(index)
        record, _ = self._digest(self.path / "index.bin")
        own = {name: value for name, value in records.items() if name in self.tables}
        self.manifest["files"] = {**own, "index.bin": record, **self.more_files}
        self.changes(self.manifest)
        manifest = self.text if self.text is not None else json.dumps(self.manifest).encode()
        (self.path / "manifest.json").write_bytes(manifest)
        (self.path / "COMPLETE").write_text(hashlib.sha256(manifest).hexdigest() + "\n")

    @staticmethod
    def _digest(path: Path) -> tuple[dict[str, Any], bytes]:
        with blocks.threads() as pool:
            record, digests = blocks.digest_file(path, pool)
        return {"size": record.size, "sha256": record.sha256}, digests


Attack = Callable[[Forged], None]
ATTACKS: dict[str, Attack] = {}
value: Any
values: Any


def attack(name: str) -> Callable[[Attack], Attack]:
    def add(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return add


# Code where data belongs.


@attack("a pickle as the shard")
def _(forged: Forged) -> None:
    forged.change(RANK, lambda content: content.__setitem__(slice(0, len(content)), forged.evil.ljust(len(content))))


@attack("a pickle as the safetensors header")
def _(forged: Forged) -> None:
    forged.change(RANK, lambda content: content.__setitem__(slice(8, 8 + len(forged.evil)), forged.evil))


@attack("a pickle as the rank's own state")
def _(forged: Forged) -> None:
    own = int(forged.numbers()[4])
    forged.change(RANK, lambda content: content.__setitem__(slice(-own, None), forged.evil.ljust(own)[:own]))


@attack("nonsense as the rank's own state")
def _(forged: Forged) -> None:
    own = int(forged.numbers()[4])
    text = json.dumps({"own/random": {"python": "x", "torch": {"__tensor__": "nowhere"}}}).encode()
    forged.change(RANK, lambda content: content.__setitem__(slice(-own, None), text.ljust(own)))


@attack("a pickle as index.bin")
def _(forged: Forged) -> None:
    forged.index = forged.evil


@attack("a pickle as the header of index.bin")
def _(forged: Forged) -> None:
    forged.index = struct.pack("<Q", len(forged.evil)) + forged.evil


@attack("a pickle as a table")
def _(forged: Forged) -> None:
    forged.tables[RANK] = forged.evil


@attack("a pickle in a table")
def _(forged: Forged) -> None:
    forged.tables[RANK] = zlib.compress(forged.evil)


@attack("a pickle as manifest.json")
def _(forged: Forged) -> None:
    forged.text = forged.evil


# Names that lead elsewhere.

for label, name in {
    "a relative path": "../../secret",
    "an absolute path": "/proc/self/environ",
    "a null byte": "a\0b",
    "a lone surrogate": "\ud800",
    "nothing": "",
    "a dot": ".",
    "an endless name": "x" * 5000,
}.items():

    @attack(f"{label} in manifest.json")
    def _(forged: Forged, name: str = name) -> None:
        forged.more_files[name] = {"size": 6, "sha256": "00"}

    if name not in ("\ud800",):

        @attack(f"{label} in index.bin")
        def _(forged: Forged, name: str = name) -> None:
            forged.write()  # where the tables lie
            forged.segments = {name: forged.header["files"][RANK]}


@attack("a secret called a shard by both")
def _(forged: Forged) -> None:
    forged.names[RANK] = "../../secret"


# Absurd numbers in index.bin.

for place, label in enumerate(["schema", "data_start", "pieces", "dimensions", "own_bytes", "tensor"]):
    for value in (-1, HUGE, 7):

        @attack(f"{label} {value}")
        def _(forged: Forged, place: int = place, value: int = value) -> None:
            forged.set_number(place, value)


for value in (-1, 0, -HUGE, HUGE, 1 << 32):

    @attack(f"a box of {value}")
    def _(forged: Forged, value: int = value) -> None:
        numbers = forged.numbers()
        numbers[-2:] = value
        forged.set_numbers(numbers)


@attack("an empty table")
def _(forged: Forged) -> None:
    forged.set_numbers([])


@attack("a table of four numbers and a half")
def _(forged: Forged) -> None:
    forged.tables[RANK] = zlib.compress(bytes(36))


@attack("a bomb as a table")
def _(forged: Forged) -> None:
    packer = zlib.compressobj(9)
    zeros = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    forged.tables[RANK] = zeros + zeros[2:] * 300  # five gigabytes; a full flush makes the blocks independent


@attack("a table of tiny pieces")
def _(forged: Forged) -> None:
    numbers = forged.numbers()
    count, dimensions = 2_000_000, int(numbers[3])
    boxes = np.zeros((count, 2, dimensions), dtype=np.int64)
    forged.set_numbers(np.concatenate([[0, 4096, count, dimensions, 0], np.zeros(count), boxes.reshape(-1)]))


for value in ([-1, 5, 5], [0, -1, 32], [HUGE, HUGE, HUGE], [0.5, 1, 1], ["0", "1", "2"], [0], [[0], 1, 2], None, 1, {}):

    @attack(f"a segment {value}")
    def _(forged: Forged, value: Any = value) -> None:
        forged.segments = {RANK: value}


for value in ([], "x", None, 5, [[]], {RANK: [0, 10, 32]}):

    @attack(f"files {value!r} in index.bin")
    def _(forged: Forged, value: Any = value) -> None:
        forged.segments = value


for label, change in {
    "a length beyond the end": lambda data: struct.pack("<Q", HUGE) + data[8:],
    "a deep header": lambda data: struct.pack("<Q", len(DEEP)) + DEEP.encode(),
    "a header of a list": lambda data: struct.pack("<Q", 2) + b"[]",
    "four bytes": lambda data: b"abcd",
    "nothing": lambda data: b"",
}.items():

    @attack(f"index.bin: {label}")
    def _(forged: Forged, change: Callable[[bytes], bytes] = change) -> None:
        forged.index = change((forged.path / "index.bin").read_bytes())


# Absurd tensors.

WEIGHT, MOMENT = "model.weight", "optimizer.state.model.weight.exp_avg"
for name in (WEIGHT, MOMENT):
    for shape in ([1 << 40], [HUGE, HUGE], [-1], [-8, -8], [0], [8.0, 8.0], "88", None, [8] * 500):

        @attack(f"{name} of shape {str(shape)[:40]}")
        def _(forged: Forged, name: str = name, shape: Any = shape) -> None:
            forged.fact(name)[1] = shape

    for dtype in ("load", "__class__", "complex32", "quint8", "float64", "", 5, None):

        @attack(f"{name} of dtype {dtype!r}")
        def _(forged: Forged, name: str = name, dtype: Any = dtype) -> None:
            forged.fact(name)[2] = dtype

    for itemsize in (0, -4, HUGE, 4.0, None):

        @attack(f"{name} of itemsize {itemsize!r}")
        def _(forged: Forged, name: str = name, itemsize: Any = itemsize) -> None:
            forged.fact(name)[3] = itemsize


for value in ([], None, 5, "x", [[]], [[[]]], [[["a"]]], [[[["a"], [1], "float32", 4, 0]]]):

    @attack(f"catalogues {value}")
    def _(forged: Forged, value: Any = value) -> None:
        forged.header["catalogues"] = value


@attack("a name of a list")
def _(forged: Forged) -> None:
    forged.fact(WEIGHT)[0] = ["model.weight"]


@attack("a tensor twice")
def _(forged: Forged) -> None:
    forged.header["catalogues"][0].append(forged.fact(WEIGHT))


# Absurd values in manifest.json.

for key, values in {
    "format": [1, "2", None, [2]],
    "run_id": [5, None, {"a": 1}],
    "step": ["1000", -1, 1.5, float("inf"), None, True, 10**30],
    "incarnation": ["x", None, -1],
    "incarnation_label": [5, None, "\x1b[31mred\x1b[0m\x07", "x" * 100_000],
    "world_size": ["many", None, -1, 0, 1 << 62],
    "torch_version": [5, None, {"a": 1}],
    "files": [None, [], {}, "x", {RANK: 5}, {RANK: {"size": 1}}, {RANK: {"size": 1, "sha256": "", "more": 1}}],
    "tensors": [None, [], 5, "x"],
    "state": [None, [], 5, "x", {}],
    "config": [None, [5], "x"],
    "metrics": [None, [], 5, {"valid_loss": {"a": 1}}, {"valid_loss": "\x1b[31m"}],
    "created": [None, "now", float("nan")],
    "more": [1],
}.items():
    for value in values:

        @attack(f"{key} is {str(value)[:40]!r}")
        def _(forged: Forged, key: str = key, value: Any = value) -> None:
            forged.changes = lambda manifest: manifest.update({key: value})


for name in (RANK, "index.bin"):
    for size in (-1, 1.5, None, 10**30):

        @attack(f"{name} has {size!r} bytes")
        def _(forged: Forged, name: str = name, size: Any = size) -> None:
            forged.changes = lambda manifest: manifest["files"][name].update(size=size)

    for digest in (5, ""):

        @attack(f"{name} has digest {digest!r}")
        def _(forged: Forged, name: str = name, digest: Any = digest) -> None:
            forged.changes = lambda manifest: manifest["files"][name].update(sha256=digest)


for label, text in {
    "deep": DEEP.encode(),
    "deep state": b'{"format": 2, "state": ' + DEEP.encode(),
    "a list": b"[]",
    "not text": b"\xff\xfe\x00",
    "nothing": b"",
}.items():

    @attack(f"manifest.json: {label}")
    def _(forged: Forged, text: bytes = text) -> None:
        forged.text = text


# Absurd state.

for value in (
    None,
    5,
    "x",
    [],
    [5],
    [{}],
    [{"params": 5}],
    [{"params": []}],
    [{"params": ["model.weight", "model.bias"], "lr": {"__tensor__": "nowhere"}}],
    [{"params": ["model.weight", "model.bias"], "lr": {"__tensor__": ["x"]}}],
    [{"params": ["model.weight", "model.bias"], "lr": {"__dict__": [[[1], 2]]}}],
    [{"params": ["model.weight", "model.bias"], "lr": {"__dict__": 5}}],
    [{"params": ["model.weight", "model.bias"], "lr": {"__tuple__": 5}}],
):

    @attack(f"the optimiser's groups are {str(value)[:100]}")
    def _(forged: Forged, value: Any = value) -> None:
        forged.manifest["state"]["optimizer"] = value


# Files that are none.


@attack("a shard that is a pipe")
def _(forged: Forged) -> None:
    forged.write()
    (forged.path / RANK).unlink()
    os.mkfifo(forged.path / RANK)
    forged.write = lambda: None  # type: ignore[method-assign]


@attack("a manifest that is a pipe")
def _(forged: Forged) -> None:
    (forged.path / "manifest.json").unlink()
    os.mkfifo(forged.path / "manifest.json")
    forged.write = lambda: None  # type: ignore[method-assign]


@attack("a shard that is a folder")
def _(forged: Forged) -> None:
    forged.changes = lambda manifest: manifest["files"][RANK].update(size=(forged.path / RANK).stat().st_size)
    forged.write()
    (forged.path / RANK).unlink()
    (forged.path / RANK).mkdir()
    forged.write = lambda: None  # type: ignore[method-assign]


@attack("an endless manifest")
def _(forged: Forged) -> None:
    os.truncate(forged.path / "manifest.json", 1 << 36)
    forged.write = lambda: None  # type: ignore[method-assign]


@attack("an endless COMPLETE")
def _(forged: Forged) -> None:
    os.truncate(forged.path / "COMPLETE", 1 << 36)
    forged.write = lambda: None  # type: ignore[method-assign]


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
    "export": verb("export", "out.safetensors", "--force"),
    "export to torch": verb("export", "out.pt", "--force"),
    "restore by path": lambda directory, path: restore(directory, path=path),
    "restore unverified": lambda directory, path: restore(directory, path=path, verify="off"),
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
    path = tmp_path / "checkpoints" / "checkpoint_0001000"
    path.mkdir(parents=True)
    for file in (sound / "checkpoint_0001000").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


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
    assert written <= {"out.safetensors", "out.pt"}, "something was run, or written elsewhere"
    assert not harm(found)
    for text in found.values():
        assert "\n" not in text.partition("\n  hint: ")[0], "more than one sentence"


def test_the_unchanged_one_passes_all_of_it(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = copy(sound, tmp_path)
    Forged(path).write()
    assert outcomes(everything(path)) == dict.fromkeys(ACTIONS, "")


@pytest.mark.parametrize("mode", ["full", "sampled", "off"])
@pytest.mark.parametrize("name", ["../../secret", "{}/secret"])
def test_a_file_outside_is_not_read_as_weights(mode: str, name: str, sound: Path, tmp_path: Path) -> None:
    path = copy(sound, tmp_path)
    forged = Forged(path)
    forged.write()
    forged.segments = {name.format(tmp_path): forged.header["files"][RANK]}
    forged.write()
    found = outcomes({"restore": lambda: restore(path.parent, path=path, verify=mode)})
    assert found["restore"] and not harm(found)


@pytest.mark.parametrize("folder", [".incarnations", ".readers"])
@pytest.mark.parametrize("name", ["²", "9" * 200, "-1", "x\x1b", "checkpoint_0001000.host.99999999999999999999.ab"])
def test_junk_beside_the_checkpoints_is_no_harm(
    folder: str, name: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = copy(sound, tmp_path)
    (path.parent / folder).mkdir()
    (path.parent / folder / name).write_bytes(b"\xff\xfe")
    assert not harm(outcomes(everything(path)))


def swap_tensors(forged: Forged) -> None:
    """The moments of the optimiser, which have one shape and type, under each other's names."""
    entries = forged.header["catalogues"][0]
    one, two = (forged.fact(f"optimizer.state.model.weight.{name}") for name in ("exp_avg", "exp_avg_sq"))
    first, second = entries.index(one), entries.index(two)
    entries[first], entries[second] = two, one


def shrink_a_box(forged: Forged) -> None:
    numbers = forged.numbers()
    pieces, dimensions = numbers[2], numbers[3]
    sizes = numbers[5 + pieces :].reshape(pieces, 2, dimensions)[:, 1]
    sizes[int(sizes.prod(axis=1).argmax())][0] -= 1
    forged.set_numbers(numbers)


UNRESTORABLE: dict[str, Attack] = {
    "an index that does not parse": lambda forged: setattr(forged, "index", b"not an index"),
    "boxes that do not tile": shrink_a_box,
    "a tensor too many": lambda forged: forged.header["catalogues"][0].append(["model.more", [3], "float32", 4, 0]),
    "tensors under other names": swap_tensors,
    "an element type that is none": lambda forged: forged.fact("model.weight").__setitem__(2, "float33"),
    "a manifest of other tensors": lambda forged: forged.manifest["tensors"].pop("model.bias"),
}


@pytest.mark.parametrize("name", UNRESTORABLE)
def test_what_cannot_be_restored_is_not_called_sound(
    name: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though every digest fits."""
    forged = Forged(copy(sound, tmp_path))
    UNRESTORABLE[name](forged)
    forged.write()
    assert main(["checkpoints", str(forged.path.parent), "verify"]) == 1
    assert "DAMAGED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["an index that does not parse", "boxes that do not tile", "a manifest of other tensors"]
)
def test_a_restore_sets_aside_what_is_not_whole(name: str, sound: Path, tmp_path: Path) -> None:
    forged = Forged(copy(sound, tmp_path))
    UNRESTORABLE[name](forged)
    forged.write()
    with pytest.raises(SlurmtrainError, match=r"every checkpoint in .* is damaged"):
        restore(forged.path.parent)


def test_what_is_called_sound_is_restored_to_the_same_tensors(sound: Path, tmp_path: Path) -> None:
    """Any number and any text of the index is changed, with digests that fit."""
    expected = load(sound / "checkpoint_0001000")
    path = copy(sound, tmp_path)
    choice = random.Random(5)
    whole = Forged(path)
    called_sound = 0
    for _ in range(150):
        forged = Forged(path)
        forged.manifest, forged.header, forged.tables = deepcopy((whole.manifest, whole.header, whole.tables))
        if choice.random() < 0.6:
            numbers = forged.numbers()
            place = choice.randrange(len(numbers))
            forged.set_number(
                place, choice.choice([0, 1, -1, HUGE, *(int(numbers[place]) + add for add in (1, -1, 8))])
            )
        else:
            entry = choice.choice(forged.header["catalogues"][0])
            place = choice.randrange(len(entry))
            entry[place] = choice.choice(
                [entry[place], "x", 0, 1, [8], [4, 2], "float16", "int32", choice.choice(entry)]
            )
        forged.write()
        try:
            manifest = read_manifest(path)
        except SlurmtrainError:
            continue
        if find_disagreement(path, manifest):
            continue
        called_sound += 1
        found = load(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert called_sound < 75
