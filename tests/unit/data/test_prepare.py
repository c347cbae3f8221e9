"""`prepare`: what comes out is what was put in, whoever did the work, however often it was killed; what is wrong is said."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from slurmtrain.cli import main
from slurmtrain.config.schema import PrepareConfig
from slurmtrain.data.format.manifest import Manifest, read_manifest
from slurmtrain.data.format.reading import DataError
from slurmtrain.data.format.tokenizers import TokenizerChoice, load_tokenizer
from slurmtrain.data.prepare import inputs
from slurmtrain.data.prepare.conversation import BadRecord
from slurmtrain.data.prepare.finish import finish
from slurmtrain.data.prepare.inputs import InputPiece, find_sources
from slurmtrain.data.prepare.unit import prepare_unit
from slurmtrain.data.prepare.unit_plan import PreparePlan, agree_on, file_errors_reported, make_plan
from slurmtrain.data.prepare.worker_pool import work
from slurmtrain.errors import ConfigError
from slurmtrain.system import signals
from slurmtrain.system.process import lives
from tests.support.children import children
from tests.support.gloo import wait_until
from tests.support.raw_text import (
    content,
    documents_of,
    halves,
    hanging_disk,
    json_lines,
    texts,
    write_all_formats,
    write_tokenizer,
)


def prepare(
    inputs: Path | Sequence[Path], output: Path, *, parts: int = 1, processes: int = 0, **settings: Any
) -> Manifest | None:
    """All parts, one after another; with `processes` by worker processes, else, which is faster, by this process."""
    manifest = None
    for part in range(parts):
        plan = plan_of(inputs, output, **settings)
        units = plan.units[part::parts]
        if processes:
            assert work(plan, units, processes, lambda: False, lambda tally: None)
        else:
            do_units(plan, part, parts)
        manifest = finish(plan, settings.get("max_bad_share", 0.0))
    return manifest


def plan_of(inputs: Path | Sequence[Path], output: Path, **settings: Any) -> PreparePlan:
    paths = [str(path) for path in ([inputs] if isinstance(inputs, Path) else inputs)]
    plan = make_plan(PrepareConfig(inputs=paths, output=str(output), **settings))
    agree_on(plan)
    return plan


def do_units(plan: PreparePlan, part: int = 0, parts: int = 1) -> None:
    tokenizer, _ = load_tokenizer(plan.tokenizer)
    for unit in plan.units[part::parts]:
        prepare_unit(plan, unit, tokenizer)


def records_of(path: Path) -> list[tuple[int, Any]]:
    """The records of a file, read as one piece, each with its number."""
    (source,) = find_sources([str(path)], "auto", path.parent / "out")
    return list(inputs.records_of(InputPiece(source, 0, source.size), "text"))


# What comes out.


@pytest.mark.parametrize("unit_mb", [1.0, 0.004, 0.0005])
def test_every_document_of_every_format_is_there_once_and_in_order(unit_mb: float, tmp_path: Path) -> None:
    documents = write_all_formats(tmp_path / "raw")
    manifest = prepare(tmp_path / "raw", tmp_path / "out", unit_mb=unit_mb)
    assert manifest is not None and manifest == read_manifest(tmp_path / "out")
    expected = [[*text.encode(), 0] for text in documents]
    assert list(documents_of(tmp_path / "out")) == expected
    assert manifest.records == len(documents)
    found = (path for name in ("raw", "out") for path in (tmp_path / name).rglob("*") if path.is_file())
    assert len({path.stat().st_mode for path in found}) == 1  # whoever may read the inputs may read what came of them
    assert len(manifest.splits["train"].shards) > {1.0: 0, 0.004: 7, 0.0005: 40}[unit_mb]


def test_a_line_that_begins_where_a_unit_does_is_there_once(tmp_path: Path) -> None:
    documents = [f"{number:07d}" for number in range(100)]
    (tmp_path / "raw.jsonl").write_bytes(b"".join(b'{"text": "%b"}\n' % text.encode() for text in documents))
    plan = plan_of(tmp_path / "raw.jsonl", tmp_path / "out", unit_mb=0.0001)
    assert sum(piece.start % 20 == 0 for unit in plan.units for piece in unit.pieces) > 10  # a line has 20 bytes
    do_units(plan)
    finish(plan, 0.0)
    assert list(documents_of(tmp_path / "out")) == [[*text.encode(), 0] for text in documents]


def test_documents_are_what_the_tokenizer_makes_of_them_between_bos_and_eos(tmp_path: Path) -> None:
    documents = texts(50, seed=1)
    (tmp_path / "raw.jsonl").write_bytes(json_lines(documents))
    file = write_tokenizer(tmp_path / "t.json")
    prepare(tmp_path / "raw.jsonl", tmp_path / "out", tokenizer=str(file), unit_mb=0.002, bos="1")
    manifest = read_manifest(tmp_path / "out")
    facts = manifest.tokenizer
    assert facts.kind == "tokenizers" and facts.file is not None and manifest.tokenizer.dtype == "uint16"
    assert (tmp_path / "out" / facts.file).read_bytes() == file.read_bytes()
    tokenizer, _ = load_tokenizer(TokenizerChoice(str(file), eos="0"))
    expected = [[facts.bos, *ids.tolist(), facts.eos] for ids in tokenizer.encode_batch(documents)]
    assert list(documents_of(tmp_path / "out")) == expected


def test_held_out_are_a_share_of_the_documents_and_duplicates_together(tmp_path: Path) -> None:
    distinct = [f"document {number}" for number in range(2000)]
    (tmp_path / "raw.jsonl").write_bytes(json_lines([*distinct, *distinct]))
    prepare(tmp_path / "raw.jsonl", tmp_path / "out", valid_fraction=0.1, unit_mb=0.02)
    found = {
        split: [bytes(ids[:-1]).decode() for ids in documents_of(tmp_path / "out", split)]
        for split in ("train", "valid")
    }
    assert sorted(found["train"] + found["valid"]) == sorted([*distinct, *distinct])
    assert not set(found["train"]) & set(found["valid"])
    assert 300 < len(found["valid"]) < 500  # of 4,000; five standard deviations


# Whoever does it, and however often it is stopped.


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of every format, and a tokenizer beside them."""
    folder = tmp_path_factory.mktemp("inputs")
    write_all_formats(folder / "raw")
    write_tokenizer(folder / "tokenizer.json")
    return folder / "raw"


@pytest.fixture(scope="module")
def settings(raw: Path) -> dict[str, Any]:
    return {"tokenizer": str(raw.parent / "tokenizer.json"), "unit_mb": 0.001, "valid_fraction": 0.2}


@pytest.fixture(scope="module")
def undisturbed(raw: Path, settings: dict[str, Any]) -> dict[str, bytes]:
    prepare(raw, raw.parent / "undisturbed", **settings)
    return content(raw.parent / "undisturbed")


@pytest.mark.parametrize(("processes", "parts"), [(2, 1), (3, 3)])
def test_processes_and_parts_do_not_show(
    processes: int, parts: int, raw: Path, settings: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    # From a copy elsewhere: the data set does not tell where its inputs were.
    shutil.copytree(raw.parent, tmp_path / "copy", ignore=shutil.ignore_patterns("undisturbed"))
    here = {**settings, "tokenizer": str(tmp_path / "copy/tokenizer.json")}
    prepare(tmp_path / "copy/raw", tmp_path / "out", processes=processes, parts=parts, **here)
    assert content(tmp_path / "out") == undisturbed


@contextmanager
def started(
    raw: Path, output: Path, settings: dict[str, Any], *, hangs_after: int = 1 << 30
) -> Iterator[subprocess.Popen[str]]:
    """The command, as a person gives it, on a disk that hangs when so many units are done."""
    words = [f"prepare.{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "slurmtrain", "prepare", f"prepare.inputs=[{raw}]", f"prepare.output={output}"]
    process = subprocess.Popen(
        [*command, *words, "prepare.workers=2"],
        env={**os.environ, **hanging_disk(output.with_suffix(".disk"), output, hangs_after)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pool_of(pid: int) -> list[int]:
    """Its processes; the tracker of multiprocessing's resources, which leaves by itself, aside."""
    found = []
    for child in children(pid):
        with suppress(OSError):  # it has just ended
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def count_of(output: Path) -> int:
    return sum(path.name.isdecimal() for path in output.iterdir()) if output.is_dir() else 0


def test_killed_at_random_moments_and_resumed_it_is_the_undisturbed_one(
    raw: Path, settings: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    moments, output, kills = random.Random(7), tmp_path / "out", 0
    total = len(plan_of(raw, tmp_path / "other", **settings).units)
    while kills < 3:
        target = count_of(output) + moments.randint(1, total // 6)
        with started(raw, output, settings, hangs_after=target + 3) as process:
            wait_until(lambda target=target: count_of(output) >= target, "so many units done")  # type: ignore[misc]
            wait_until(lambda process=process: len(pool_of(process.pid)) == 2, "two processes")  # type: ignore[misc]
            pool = pool_of(process.pid)
            process.kill()
            wait_until(lambda pool=pool: not any(map(lives, pool)), "the end of the pool")  # type: ignore[misc]
        assert not (output / "manifest.json").exists()
        kills += 1
    done = {path: path.stat().st_mtime_ns for path in output.glob("*/unit.json")}
    assert 0 < len(done) < total
    with started(raw, output, settings) as process:
        said, _ = process.communicate(timeout=180)
        assert process.returncode == 0, said
    assert content(output) == undisturbed
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())  # nothing that was whole was done again
    assert not (output / ".prepare/begun").exists()


@pytest.mark.parametrize(
    ("killed", "code", "told"),
    [(False, 75, "the same command continues from there"), (True, 1, "error: a process was killed, or has crashed")],
)
def test_ctrl_c_or_a_kill_leaves_whole_units_and_no_process_and_says_how_to_go_on(
    killed: bool, code: int, told: str, raw: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    with started(raw, tmp_path / "out", settings, hangs_after=3) as process:
        wait_until(lambda: count_of(tmp_path / "out") > 0, "a unit done")
        pool = pool_of(process.pid)
        for pid in pool[:1] if killed else (*pool, process.pid):  # as a terminal does
            os.kill(pid, signal.SIGKILL if killed else signal.SIGINT)
        said, _ = process.communicate(timeout=180)
    assert process.returncode == code and told in said, said
    assert "Traceback" not in said and not any(map(lives, pool))
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_full_disk_is_told_and_with_more_room_the_same_command_goes_on(
    raw: Path, settings: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    plan = plan_of(raw, tmp_path / "out", **settings)
    tokenizer, _ = load_tokenizer(plan.tokenizer)
    prepare_unit(plan, plan.units[0], tokenizer)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        told = pytest.raises(DataError, match=f"there is no space left for {tmp_path}/out")
        with told, file_errors_reported(plan.output):
            prepare_unit(plan, plan.units[1], tokenizer)
    assert count_of(tmp_path / "out") == 1
    prepare(raw, tmp_path / "out", **settings)
    assert content(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("equal", [False, True])
def test_of_two_that_begin_in_one_output_at_once_only_those_with_equal_settings_go_on(
    equal: bool, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("one")

    def refusal(unit_mb: float) -> str:
        try:
            plan_of(tmp_path / "a.txt", output, unit_mb=unit_mb)
        except ConfigError as error:
            return error.message.partition(f"{output} was started with other settings: ")[2][:15]
        return ""

    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            output = tmp_path / str(number)
            refusals = sorted(pool.map(refusal, (1.0, 1.0 if equal else 2.0)))
            assert refusals == ["", "" if equal else "prepare.unit_mb"]
            assert [path.name for path in output.iterdir()] == [".prepare"]


# What is wrong.

BAD = {
    2: ('{"text": 5}', "'text' is no string, but int"),
    5: ('{"text": null}', "'text' is no string, but null"),
    9: ('{"body": "x"}', "no field 'text'"),
    11: ('["text"]', "no JSON object, but list"),
    14: ('{"text": "x"', "no JSON (Expecting ',' delimiter at character 14)"),
    17: ('{"text": "\\ud800"}', "invalid Unicode (half of a surrogate pair)"),
    18: ('{"text": "caf\udce9"}', "invalid UTF-8 (invalid continuation byte)"),
    19: ("[" * 2000, "no JSON (maximum recursion depth exceeded"),
}


def test_bad_records_are_listed_with_their_lines_and_fail_the_job_past_the_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw, output = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    (raw / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(["after a byte order mark"]))
    # Lines 1 to 40: bad ones, a blank one (3), one without text (4); the others say their number.
    lines = [json.dumps({"text": f"line {number}"}) for number in range(1, 41)]
    for number, line in {3: "", 4: '{"text": ""}', **{number: line for number, (line, _) in BAD.items()}}.items():
        lines[number - 1] = line
    (raw / "b.jsonl").write_bytes("\n".join([*lines, ""]).encode(errors="surrogateescape"))
    plan = plan_of(raw, output, unit_mb=0.0001)
    assert len(plan.units) > 20  # most lines stand in a unit that began in the middle of the file
    do_units(plan)
    with pytest.raises(ConfigError) as refused:
        finish(plan, 0.0)
    assert refused.value.message.startswith(
        f"{len(BAD)} of 40 records are bad (0.2 of all), and prepare.max_bad_share is 0.0"
    )
    found = [json.loads(line) for line in (output / "bad.jsonl").read_text().splitlines()]
    assert [(each["source"], each["record"]) for each in found] == [("b.jsonl", number) for number in BAD]
    for each, (_, reason) in zip(found, BAD.values(), strict=True):
        assert each["reason"].startswith(reason)
    assert caplog.messages[0] == "bad: b.jsonl:2: 'text' is no string, but int" and len(caplog.messages) == len(BAD)
    assert not (output / "manifest.json").exists()

    when = {path: path.stat().st_mtime_ns for path in output.rglob("*.tokens")}
    assert work(plan, plan.units, 1, lambda: False, lambda tally: None)
    manifest = finish(plan, 0.2)
    assert manifest is not None and {path: path.stat().st_mtime_ns for path in when} == when
    assert (manifest.records, manifest.empty, manifest.bad) == (40, 1, len(BAD))
    kept = [bytes(ids[:-1]).decode() for ids in documents_of(output)]
    good = [f"line {number}" for number in range(1, 41) if number not in {3, 4, *BAD}]
    assert kept == ["after a byte order mark", *good]


@pytest.mark.parametrize(("packing", "damage"), [("gz", "torn"), ("zst", "flipped")])
def test_a_packed_file_that_is_torn_or_damaged_is_a_bad_record_where_it_ends(
    packing: str, damage: str, tmp_path: Path
) -> None:
    pack = gzip.compress if packing == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    documents = texts(200, seed=3) * 200  # of which what is read together with the damage is lost: a megabyte
    first, second = (json_lines(each) for each in halves(documents))
    data = bytearray(pack(first) + pack(second))
    if damage == "torn":
        del data[-7:]
    else:
        data[-5] ^= 0xFF  # of the checksum
    path = tmp_path / f"a.jsonl.{packing}"
    path.write_bytes(data)
    *good, (number, last) = records_of(path)
    reason = "file is damaged: " + ("Truncated compressed stream" if damage == "torn" else "")
    assert isinstance(last, BadRecord) and reason in last.reason
    assert number == len(good) + 1 > len(documents) / 2
    assert [record for _, record in good] == documents[: len(good)]


def test_rows_of_tables_are_text_however_they_are_stored_and_bad_ones_are_counted_by_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pyarrow.table({"text": pyarrow.array(["one", None, "two", "one"]).dictionary_encode()})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    plan = plan_of(tmp_path / "a.parquet", tmp_path / "out")
    do_units(plan)
    finish(plan, 0.5)
    assert caplog.messages == ["bad: a.parquet:2: 'text' is no string, but null"]
    assert [bytes(ids[:-1]) for ids in documents_of(tmp_path / "out")] == [b"one", b"two", b"one"]


NO_UTF8 = pyarrow.array([b"caf\xe9"], pyarrow.binary()).view("string")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda raw: raw.joinpath("a.parquet").write_bytes(b"PAR1 nothing"), "cannot be read as Parquet"),
        (lambda raw: pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), raw / "a.parquet"), "has no column 'text'"),
        (lambda raw: pyarrow.parquet.write_table(pyarrow.table({"text": NO_UTF8}), raw / "a.parquet"), "as Parquet: 'utf-8'"),
        (lambda raw: raw.joinpath("a.arrow").write_bytes(b"x"), "its suffix is '.arrow'"),
        (lambda raw: raw.joinpath("a.bin").write_bytes(b"x"), "it is not known what is in"),
        (lambda raw: raw.joinpath("a.jsonl").write_bytes(b"\n"), "the inputs contain no document"),
        (lambda raw: None, "there is no file in"),
        (lambda raw: raw.rmdir(), "prepare.inputs: there is no"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_read_are_told_in_a_sentence(
    make: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    make(raw)
    with pytest.raises(ConfigError) as refused:
        prepare(raw, tmp_path / "out")
    assert said in refused.value.message and "\n" not in refused.value.message
    assert not (tmp_path / "out/manifest.json").exists()


def test_an_input_that_vanishes_may_come_back_but_one_that_changes_may_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(texts(20, seed=1)))
    when = path.stat().st_mtime_ns
    plan = plan_of(path, tmp_path / "out")
    path.rename(tmp_path / "away")
    with pytest.raises(DataError, match="No such file") as vanished:
        work(plan, plan.units, 1, lambda: False, lambda tally: None)
    assert vanished.value.exit_code == 1
    (tmp_path / "away").rename(path)
    path.write_bytes(json_lines(texts(20, seed=1)))
    with pytest.raises(ConfigError, match="was changed while it was being prepared"):
        do_units(plan)
    with pytest.raises(ConfigError, match=r"was started with other settings: the last change of a.jsonl was"):
        plan_of(path, tmp_path / "out")
    os.utime(path, ns=(when, when))
    do_units(plan_of(path, tmp_path / "out"))


def test_another_data_set_in_the_same_output_is_refused_by_what_differs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    prepare(tmp_path / "a.txt", tmp_path / "out", eos="none")
    for settings, differs in (
        ({"eos": "1"}, "tokenizer.eos was None, now 1"),
        ({"eos": "none", "unit_mb": 2.0}, "prepare.unit_mb was 128.0, now 2.0"),
        ({"eos": "none", "text_field": "x"}, "prepare.text_field was text, now x"),
    ):
        with pytest.raises(ConfigError, match=f"was started with other settings: {differs}"):
            plan_of(tmp_path / "a.txt", tmp_path / "out", **settings)
    shutil.rmtree(tmp_path / "out/.prepare")
    with pytest.raises(ConfigError, match="holds a data set that was not prepared there"):
        plan_of(tmp_path / "a.txt", tmp_path / "out", eos="none")
    prepare(tmp_path / "a.txt", tmp_path / "other", eos="none")
    with pytest.raises(ConfigError, match=r"the input b.txt was missing, now 3 bytes of text"):
        plan_of([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "other", eos="none")


# The verb.


def test_ranks_that_srun_or_torchrun_starts_share_the_work(
    typed: Callable[..., Any], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "a.jsonl").write_bytes(json_lines(texts(30, seed=1)))
    words = ["prepare.inputs=[a.jsonl]", "prepare.output=out", "prepare.unit_mb=0.001", "prepare.workers=1"]
    world = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    said = []
    for rank in ("1", "0"):
        for name, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        code, text = typed(*words)
        assert code == 0
        said.append(text)
    assert "this part is done, 3 of 7 units in all" in said[0]
    assert f"prepared {project}/out (train: 30 documents" in said[1]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, project: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the verb in this process, whose signal handlers stay as they are: its exit code and what it said."""
    monkeypatch.setattr(signals, "install_signal_handlers", signals.StopFlag)

    def run(*words: str) -> tuple[int, str]:
        code = main(["prepare", *words])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def test_the_verb_prepares_verifies_and_finds_every_damage(typed: Callable[..., Any], project: Path) -> None:
    (project / "raw").mkdir()
    (project / "raw/a.jsonl").write_bytes(json_lines(texts(30, seed=1)))
    words = ["prepare.inputs=[raw/*.jsonl]", "prepare.output=out"]
    code, said = typed(*words)
    assert code == 0 and f"prepared {project}/out (train: 30 documents" in said
    code, said = typed("verify", "out")
    assert code == 0 and read_manifest(project / "out").fingerprint in said
    tokens, ends = (project / f"out/00000/train.{kind}" for kind in ("tokens", "ends"))
    damage = bytearray(tokens.read_bytes())
    damage[0] ^= 1
    tokens.write_bytes(damage)
    ends.write_bytes(ends.read_bytes()[:-8])
    code, said = typed("verify", "out")
    assert code == 1
    assert [line.partition("train.")[2] for line in said.splitlines()[:2]] == [
        "tokens differs from its digest: it is damaged",
        "ends differs from its digest: it is damaged",
    ]
    ends.unlink()
    assert "train.ends cannot be read: No such file or directory" in typed("verify", "out")[1]
    shutil.rmtree(tokens.parent)
    assert typed(*words)[0] == 0 and typed("verify", "out")[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["prepare.output=out"], 78, "prepare.inputs is not set"),
        (["prepare.inputs=[a.txt]"], 78, "prepare.output is not set"),
        (["prepare.inputs=[*.json]", "prepare.output=out"], 78, "nothing matches '{here}/*.json'"),
        (["prepare.inputs=[a.txt]", "prepare.output=file/out"], 78, "prepare.output={here}/file/out cannot be used: Not a"),
        (["prepare.inputs=[../project]", "prepare.output=out"], 78, "prepare.output={here}/out lies in the input {here}"),
        (["verify", "nowhere"], 78, "nowhere has no manifest.json"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_sentence(
    words: list[str], code: int, said: str, project: Path, typed: Callable[..., Any]
) -> None:
    for name in ("a.txt", "file"):
        (project / name).write_text("text")
    found = typed(*words)
    assert found[0] == code and said.format(here=project) in found[1]
