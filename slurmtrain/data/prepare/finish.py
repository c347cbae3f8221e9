"""The end of `prepare`: write bad.jsonl and the manifest from the records of all units.

Any process writes the same bytes.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence

from slurmtrain.data.format.manifest import Manifest, Split, replace_file
from slurmtrain.data.format.tokenizers import load_tokenizer
from slurmtrain.data.prepare.chat_template import TEMPLATE_FILE, files_beside
from slurmtrain.data.prepare.unit import SPLITS, UnitRecord, read_record
from slurmtrain.data.prepare.unit_plan import PreparePlan, file_errors_reported
from slurmtrain.data.prepare.units_done import units_done
from slurmtrain.errors import ConfigError
from slurmtrain.system.files import refresh

log = logging.getLogger(__name__)

SHOWN = 20  # bad records that are told; all are in the file
BAD_FILE = "bad.jsonl"


def finish(plan: PreparePlan, max_bad_share: float) -> Manifest | None:
    """Write the manifest if all units are done, and return it; return None when some are not done.

    Raises:
        ConfigError: there are more bad records than allowed, or no documents.
        DataError: the disk is full.
    """
    with file_errors_reported(plan.output):
        refresh(plan.output)  # if tasks on two nodes end at once, the later one has to see the other's last unit
        if not {unit.name for unit in plan.units} <= units_done(plan.output):
            return None
        records = [read_record(plan, unit) for unit in plan.units]
        _report_bad(plan, records, max_bad_share)
        splits = {}
        for split in SPLITS:
            if shards := tuple(record.shards[split] for record in records if split in record.shards):
                splits[split] = Split(shards)
        if "train" not in splits:
            raise ConfigError(
                "the inputs contain no document" + (" for training" if splits else ""),
                hint="are they empty, or is prepare.valid_fraction too high?",
            )
        facts, chat = plan.facts, plan.chat
        if facts.file is not None:
            _, content = load_tokenizer(plan.tokenizer)
            for name, beside in {facts.file: content, **files_beside(plan.tokenizer)}.items():
                replace_file(plan.output / name, beside)
        if chat is not None:
            replace_file(plan.output / TEMPLATE_FILE, chat.source.encode())
        pieces = [piece for record in records for piece in record.pieces]
        read, empty = sum(piece.records for piece in pieces), sum(piece.empty for piece in pieces)
        bad = sum(len(piece.bad) for piece in pieces)
        manifest = Manifest(facts, splits, chat.facts if chat else None, read, empty, bad)
        manifest.write(plan.output)
        shutil.rmtree(plan.work_folder / "begun", ignore_errors=True)  # left by processes that were killed
        return manifest


def _report_bad(plan: PreparePlan, records: Sequence[UnitRecord], max_bad_share: float) -> None:
    """Write bad.jsonl, report the first bad records, and raise ConfigError when there are too many."""
    found = list(_bad(plan, records))
    bad, where = len(found), plan.output / BAD_FILE
    if not bad:
        return
    read = sum(piece.records for record in records for piece in record.pieces)
    lines = (dict(zip(("source", "record", "reason"), each, strict=True)) for each in found)
    replace_file(where, (json.dumps(line).encode() + b"\n" for line in lines))
    for source, number, reason in found[:SHOWN]:
        log.info("bad: %s:%d: %s", source, number, reason)
    if bad > SHOWN:
        log.info("bad: %d more in %s", bad - SHOWN, where)
    if bad > max_bad_share * read:
        raise ConfigError(
            f"{bad} of {read} records are bad ({bad / read:.2g} of all), and prepare.max_bad_share is "
            f"{max_bad_share}; all are in {where}",
            hint="with a higher prepare.max_bad_share, the same command skips them without repeating its work",
        )


def _bad(plan: PreparePlan, records: Sequence[UnitRecord]) -> Iterator[tuple[str, int, str]]:
    """Yield (input, number of the line or row from 1 on, reason) of each bad record, in order.

    A unit that began within a file counted its records from its own beginning; here they are counted from the file's.
    """
    before: dict[str, int] = {}
    for unit, record in zip(plan.units, records, strict=True):
        for piece, found in zip(unit.pieces, record.pieces, strict=True):
            name = piece.source.name
            for number, reason in found.bad:
                yield name, before.get(name, 0) + number, reason
            before[name] = before.get(name, 0) + found.lines
