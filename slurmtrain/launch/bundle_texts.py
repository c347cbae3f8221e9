"""What a person reads in a bundle: its README, and the packages that the run had."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from slurmtrain.launch.bundle_format import CONFIG, LOCK
from slurmtrain.runs.code_record import CodeRecord, words_for_changes
from slurmtrain.system.process_facts import ProcessFacts
from slurmtrain.system.records import printable
from slurmtrain.system.redaction import redacted

TORCH_INDEX = "https://download.pytorch.org/whl"


def lock_text(facts: ProcessFacts) -> str:
    """Return the packages as pip reads them. Those that an index has not are given by their URL, or as a comment."""
    python = facts.system.get("python", "an unknown version")
    lines = [f"# What the newest attempt ran with, on Python {python}: pip install -r {LOCK}"]
    local = {
        version.partition("+")[2] for name, version in facts.packages.items() if name == "torch" and "+" in version
    }
    lines += [
        f"--extra-index-url {TORCH_INDEX}/{build}" for build in sorted(local) if re.fullmatch("[a-z0-9.]+", build)
    ]
    for name, version in sorted(facts.packages.items()):
        origin = facts.origins.get(name)
        if not re.fullmatch(r"[a-z0-9-]+", name) or not re.fullmatch(r"[A-Za-z0-9.!+_-]+", version):
            continue  # a line of a record that somebody else may have written
        if origin is None:
            lines.append(f"{name}=={version}")
        elif re.fullmatch(r"(git\+)?(https|ssh)://\S+", origin):
            lines.append(f"{name} @ {origin}")
        else:
            lines.append(f"# {name}=={version}, installed from {' '.join(printable(origin).split())}")
    return "\n".join(lines) + "\n"


def readme_text(
    run: Mapping[str, Any], facts: ProcessFacts, record: CodeRecord, links_out: Mapping[str, str], config: Any
) -> str:
    """Return what the bundle is, how to run it, and what it needs at the other place.

    Args:
        run: the facts of the run in the bundle's list.
        links_out: links of the code that lead out of it, and their targets.
        config: the values of its config.
    """
    revision = "unknown"
    if record.revision:
        revision = f"git {record.revision}" + (f" ({record.branch})" if record.branch else "")
        revision += f", of {record.remote}" if record.remote else ""
        revision += ", with changes (changes.patch)" if record.dirty else words_for_changes(record.dirty)
    image = (run.get("image") or {}) if isinstance(run.get("image"), dict) else {}
    where = "code/" if run["workdir"] else "not in this bundle: the run ran in place"
    lines = [
        f"# {run['name']}, run {run['run']}",
        "",
        "A run of slurmtrain, packed to be run again elsewhere. Look at what is in it before you do: it is run as you.",
        "",
        f"First install slurmtrain {run.get('version', '')}, then:",
        "",
        f"    pip install -r {LOCK}            # the packages that it ran with",
        "    python -m slurmtrain submit --from BUNDLE               # on the same cluster, with the same config",
        "    python -m slurmtrain +cluster=NAME submit --from BUNDLE   # on another one; +cluster=local: on this machine",
        "    python -m slurmtrain +cluster=NAME train.steps=100 submit --from BUNDLE   # with other values",
        "",
        f"- code: {where}; {revision}",
        f"- config: {CONFIG}, with the hash {run.get('config_hash')}; typed as: {' '.join(run.get('overrides') or ()) or '-'}",
        f"- Python {facts.system.get('python', '?')} on {facts.system.get('os', '?')}, {facts.system.get('machine', '?')}",
    ]
    if facts.gpu:
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in sorted(facts.gpu.items())))
    if image:
        lines.append("- container: " + ", ".join(str(value) for _, value in sorted(image.items())))
    paths = sorted(set(_paths(config)))
    if paths:
        lines += ["", "Paths that the config names, which have to be there, or to be given anew:", ""]
        lines += [f"- {key}: {path}" for key, path in paths]
    if links_out:
        lines += ["", "Links of the code that lead elsewhere, which are not in this bundle:", ""]
        lines += [f"- {name} -> {target}" for name, target in sorted(links_out.items())]
    names = sorted(config.get("secrets") or ()) if isinstance(config, Mapping) else []
    if names:
        lines += ["", f"Secrets that the run needs, and that are not in this bundle: {', '.join(map(str, names))}"]
    text = "\n".join(printable(str(line)) for line in lines) + "\n"
    return str(redacted(text))


def _paths(values: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield key and value of the absolute paths in a config that a run elsewhere has to find."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _paths(value, f"{where}.{key}".lstrip("."))
    elif isinstance(values, list):
        for value in values:
            yield from _paths(value, where)
    elif isinstance(values, str) and values.startswith("/") and where != "job.runs_dir" and len(values) > 1:
        yield where, values
