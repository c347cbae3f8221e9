"""`runs bundle` and `submit --from`: a tar file with the config, the code and the records of a run, to run it again elsewhere.

Unpacked, it is like a run directory. It holds what the run's snapshot holds, and is not searched for secrets. Its code
runs as whoever submits it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.overrides import normalise
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config, JobConfig
from slurmtrain.errors import ConfigError, UnreadableRecordError, UsageError
from slurmtrain.launch.changes import changed
from slurmtrain.launch.code_source import CodeSource
from slurmtrain.launch.snapshot import source_of_run
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.software import CodeRecord, newest_environment
from slurmtrain.system import records
from slurmtrain.system.files import give_name, temporary_beside
from slurmtrain.system.records import printable
from slurmtrain.system.redaction import redacted

log = logging.getLogger(__name__)

PICKLED = re.compile(r"slurmtrain\.runtime\.jobs\.map_task\b")  # in job.command
OF_ONE_PLACE = (
    "made_at",
    "copied_from",
    "submitted_with",
    "chain",
    "changes",
)  # fields of run.json that say nothing elsewhere


def write_bundle(run_dir: RunDir, target: Path) -> str:
    """Write the bundle of a run and return its sha256. There is a whole file in the end, or none.

    Args:
        target: a file that does not exist; one whose name ends in .tar is not compressed.

    Raises:
        UnreadableRecordError: the run's records cannot be used.
        UsageError: what the run calls lies elsewhere.
        ConfigError: the file exists, or cannot be written.
    """
    info, config = run_dir.info(whole=True), load_frozen(run_dir.config_file, with_secrets=False)
    if PICKLED.search(str(config.job.command)):
        raise UsageError(
            f"run {run_dir.id} calls a pickled function of slurmtrain.map or a Hydra program, which a bundle cannot contain",
            hint="run the program again at the other place; bundles are for runs of `submit`",
        )
    source, recorded = source_of_run(run_dir), newest_environment(run_dir)
    packages = recorded[1].packages if recorded is not None else {}
    kept = {name: value for name, value in info.items() if name not in OF_ONE_PLACE} | {"job_ids": []}
    texts = {
        run_dir.info_file.name: json.dumps(redacted(kept), indent=1).encode() + b"\n",
        run_dir.config_file.name: records.read_bytes(run_dir.config_file),
        "requirements.txt": "".join(f"{name}=={packages[name]}\n" for name in sorted(packages)).encode(),
    }
    record = CodeRecord()
    if source.root is None:
        log.warning("run %s ran in place, in %s: its code is not in the bundle", run_dir.id, source.workdir)
    elif source.record is not None:
        record = source.record
        texts[run_dir.code_record_file.name] = records.read_bytes(run_dir.code_record_file)
    temporary = temporary_beside(target)

    def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        return entry.replace(uid=0, gid=0, uname="", gname="", deep=False)

    try:
        with tarfile.open(temporary, "x" if target.suffix == ".tar" else "x:gz") as tar:
            for name, content in texts.items():
                entry = tarfile.TarInfo(f"{run_dir.id}/{name}")
                entry.size, entry.mtime = len(content), int(info["created"])
                tar.addfile(entry, io.BytesIO(content))
            for name in sorted({**record.files, **record.links}):
                path = run_dir.code / name
                if not path.resolve().is_relative_to(run_dir.code.resolve()):
                    log.warning("code/%s leads out of the code, so it is not in the bundle", printable(name))
                elif path.exists():
                    tar.add(path, f"{run_dir.id}/code/{name}", recursive=False, filter=without_owner)
        with temporary.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        give_name(temporary, target)
        return digest
    except FileExistsError:
        raise ConfigError(f"{target} already exists", hint="choose another file, or remove it") from None
    except OSError as error:
        raise ConfigError(
            f"cannot write {target}: {error.strerror}", hint="name a file in a folder that you may write to"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[RunDir, CodeSource | None]]:
    """Unpack a bundle into a folder that is removed after the block; yield it, and what a new run's snapshot is made of.

    There is no code in the bundle of a run that ran in place.

    Raises:
        UsageError: there is no such file.
        ConfigError: it is torn, is no bundle, or would write outside of the folder.
    """
    if not path.is_file():
        raise UsageError(f"{path} cannot be read: there is no such file", hint="`runs bundle RUN` makes one")
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bundle-") as name:
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            with tarfile.open(path) as tar:
                tar.extractall(name, filter="data")
            run_dir = RunDir(next(Path(name).iterdir(), Path(name)))
            source, info = source_of_run(run_dir), run_dir.info(whole=True)
            record = source.record or CodeRecord()
            inside = [source.workdir, *(f"code/{each}" for each in (*record.files, *record.links))]
            outside = [each for each in inside if os.path.normpath(each).startswith(("..", "/"))]
            if source.root is not None and outside:
                raise ValueError(f"{outside[0]} is not in it")
        except (OSError, tarfile.TarError, EOFError, zlib.error, ValueError, UnreadableRecordError) as error:
            raise ConfigError(
                f"{path} is incomplete, or not a bundle: {printable(str(error))[:200]}",
                hint="copy it again, and compare its sha256 with the one that `runs bundle` printed",
            ) from None
        if source.root is None:
            yield run_dir, None
        else:
            run_dir.workdir.mkdir(parents=True, exist_ok=True)
            facts = {"file": str(path), "sha256": digest, "run": info.get("id")}
            yield run_dir, dataclasses.replace(source, bundle=facts)


def config_of(
    bundle: RunDir, overrides: Sequence[str], cwd: Path, *, config_dir: str | None = None
) -> tuple[Config, ParallelDims]:
    """Return the config of a bundle with overrides, after all checks of its fields.

    With `+cluster=NAME` all of the group `cluster` is that of the other cluster. The folder of runs is this shell's.

    Raises:
        UsageError: an override that cannot be read, or chooses another group.
        ConfigError: a value that cannot work.
    """
    config = load_frozen(bundle.config_file, with_secrets=False)
    config = dataclasses.replace(config, job=dataclasses.replace(config.job, runs_dir=JobConfig().runs_dir))
    chosen = [word for word in overrides if re.match(r"\+{0,2}cluster=", word)]
    others = [word for word in overrides if word not in chosen]
    if chosen:
        from slurmtrain.config.compose import compose

        of_cluster = [word for word in others if re.match(r"[+~]{0,2}cluster\.", word)]
        others = [word for word in others if word not in of_cluster]
        composed = compose([*map(normalise, chosen), *of_cluster], config_dir=config_dir)
        config = dataclasses.replace(config, cluster=composed.cluster)
    return changed(config, others, cwd, fixed=())
