"""`runs bundle` and `submit --from`: a tar file with the config, the code and the revision of a run, to run it again elsewhere.

A bundle holds what the run's snapshot holds, and is not searched for secrets. Its code runs as whoever submits it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.config.compose import compose
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.overrides import normalise
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config, JobConfig
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.launch.changes import changed
from slurmtrain.launch.snapshot import CodeSource, source_of_run
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.software import CodeRecord, newest_environment
from slurmtrain.system import records
from slurmtrain.system.files import give_name, temporary_beside
from slurmtrain.system.records import printable
from slurmtrain.system.redaction import redacted

log = logging.getLogger(__name__)

MANIFEST, CONFIG, PACKAGES = "bundle.json", "config.yaml", "requirements.txt"
PICKLED = re.compile(r"slurmtrain\.runtime\.jobs\.(map_task|hydra_task)\b")  # programs of job.command


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
    source = source_of_run(run_dir)
    record = source.record or CodeRecord()
    if source.root is None:
        log.warning("run %s ran in place, in %s: its code is not in the bundle", run_dir.id, source.workdir)
    manifest: dict[str, Any] = {
        **{name: info[name] for name in ("name", "user", "created", "config_hash", "version", "image") if name in info},
        "run": run_dir.id,
        "overrides": list(info.get("overrides") or ()),
        "workdir": None if source.root is None else source.workdir,
        "import_roots": list(source.roots),
        "git": record.git,
    }
    recorded = newest_environment(run_dir)
    packages = recorded[1].packages if recorded is not None else {}
    texts = {
        MANIFEST: (json.dumps(redacted(manifest), indent=1) + "\n").encode(),
        CONFIG: records.read_bytes(run_dir.config_file),
        PACKAGES: "".join(f"{name}=={packages[name]}\n" for name in sorted(packages)).encode(),
    }
    temporary = temporary_beside(target)

    def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        return entry.replace(uid=0, gid=0, uname="", gname="", deep=False)

    try:
        with tarfile.open(temporary, "x" if target.suffix == ".tar" else "x:gz") as tar:
            for name, content in texts.items():
                entry = tarfile.TarInfo(f"{run_dir.id}/{name}")
                entry.size, entry.mtime = len(content), int(info["created"])
                tar.addfile(entry, io.BytesIO(content))
            for name in sorted({**record.files, **record.links}) if source.root is not None else ():
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


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been unpacked.

    Attributes:
        manifest: what its bundle.json says.
        folder: where it is unpacked.
        facts: what run.json says of the bundle that a run was made from.
    """

    manifest: Mapping[str, Any]
    folder: Path
    facts: Mapping[str, Any]

    @property
    def workdir(self) -> Path | None:
        """The folder in which the program runs, as unpacked; None for a run that ran in place."""
        return None if self.manifest["workdir"] is None else self.folder / self.manifest["workdir"]

    @property
    def code(self) -> CodeSource | None:
        """What the new run's snapshot is made of; None for a run that ran in place."""
        if self.manifest["workdir"] is None:
            return None
        git = self.manifest["git"]
        record = CodeRecord(**git, diff="" if git["dirty"] is False else None)
        roots = tuple(self.manifest["import_roots"])
        return CodeSource(self.folder / "code", self.manifest["workdir"], roots=roots, record=record, bundle=self.facts)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Bundle]:
    """Unpack a bundle into a folder that is removed after the block.

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
            folder = next(Path(name).iterdir(), Path(name))
            manifest = json.loads((folder / MANIFEST).read_text())
            if manifest["workdir"] is not None:
                workdir = (folder / manifest["workdir"]).resolve()
                if not workdir.is_relative_to(folder.resolve()):
                    raise ValueError(f"{manifest['workdir']} is not a folder of it")
                workdir.mkdir(parents=True, exist_ok=True)
            CodeRecord(**manifest["git"])  # it has these fields
            facts = {"file": str(path), "sha256": digest, "run": manifest["run"]}
        except (OSError, tarfile.TarError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is incomplete, or not a bundle: {printable(str(error))[:200]}",
                hint="copy it again, and compare its sha256 with the one that `runs bundle` printed",
            ) from None
        yield Bundle(manifest, folder, facts)


def config_of(
    bundle: Bundle, overrides: Sequence[str], cwd: Path, *, config_dir: str | None = None
) -> tuple[Config, ParallelDims]:
    """Return the config of a bundle with overrides, after all checks of its fields.

    With `+cluster=NAME` all of the group `cluster` is that of the other cluster. The folder of runs is this shell's.

    Raises:
        UsageError: an override that cannot be read, or chooses another group.
        ConfigError: a value that cannot work.
    """
    config = load_frozen(bundle.folder / CONFIG, with_secrets=False)
    config = dataclasses.replace(config, job=dataclasses.replace(config.job, runs_dir=JobConfig().runs_dir))
    chosen = [word for word in overrides if re.match(r"\+{0,2}cluster=", word)]
    others = [word for word in overrides if word not in chosen]
    if chosen:
        of_cluster = [word for word in others if re.match(r"[+~]{0,2}cluster\.", word)]
        others = [word for word in others if word not in of_cluster]
        composed = compose([*map(normalise, chosen), *of_cluster], config_dir=config_dir)
        config = dataclasses.replace(config, cluster=composed.cluster)
    return changed(config, others, cwd, fixed=())
