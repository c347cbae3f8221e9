"""Tab completion of the word at the cursor. Hydra completes overrides; verbs, their words, and runs are completed here.

The shell function that `slurmtrain -sc install=bash` prints calls `slurmtrain -sc query=bash` with the line in
COMP_LINE, and gives what that prints to `compgen -W`, which expands it: `$(...)` in it runs. Names of runs and of files may be
those of other users, so words that mean something to bash are not offered.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterable

from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.overrides import normalise

NEWEST = 30  # so many runs are offered: a person looks for one of the last days
PLAIN = re.compile(r"[\w.,:/@%+=\[\]-]+")  # words that bash takes as they are


def complete(hydra: Callable[[], object]) -> None:
    """Print the words that match the line in COMP_LINE.

    Args:
        hydra: prints the overrides that match.
    """
    words = os.environ.get("COMP_LINE", "").split(" ")
    last = words[-1]
    verb = next((word for word in words[1:-1] if word in VERBS), None)
    if verb is not None and not VERBS[verb].composes:
        _offer(word for word in _words_of(verb) if word.startswith(last))
        return
    if last.startswith("-"):
        options = (
            re.findall(r"--?[a-z][a-z-]*", VERBS[verb].usage)
            if verb
            else ["--help", "--version", "--config-dir", "--host", "--host-python"]
        )
        _offer(option for option in options if option.startswith(last))
        return
    if "=" not in last and not last.startswith("+") and verb is None:
        _offer(name for name, each in VERBS.items() if name.startswith(last) and not each.hidden)
    if "=" not in last and not last.startswith("+") and verb == "drill":  # of the verbs that compose, it takes a run
        _offer(name for name in ["last", *_newest(sweeps=False)] if name.startswith(last))
    # Hydra would take the verb for a broken override, and knows groups of the defaults list without a plus only.
    kept = [words[0], *(normalise(word) for word in words[1:-1] if word not in VERBS), normalise(last.lstrip("+"))]
    os.environ["COMP_LINE"] = " ".join(kept)
    found = io.StringIO()
    with contextlib.redirect_stdout(found), contextlib.suppress(SystemExit):
        hydra()
    plus = last[: len(last) - len(last.lstrip("+"))]
    _offer(f"{plus}{word}" for word in found.getvalue().split())


def _offer(words: Iterable[str]) -> None:
    """Print the words that bash may have, one on a line."""
    print("\n".join(word for word in words if PLAIN.fullmatch(word)))


def _words_of(verb: str) -> list[str]:
    """Return the words that may follow a verb that composes no config: its actions and options, from its usage, and runs."""
    usage = VERBS[verb].usage.removeprefix(verb)
    words = re.findall(r"(?<![\w=.-])[a-z]+(?![\w=.-])", usage) + re.findall(r"(?<!\w)--?[a-z][a-z-]*", usage)
    runs, sweeps = (re.search(rf"\b({names})\b", usage) is not None for names in ("RUN|A B", "SWEEP"))
    words += ["last"] if runs or sweeps else []
    words += [*(_newest(sweeps=False) if runs else ()), *(_newest(sweeps=True) if sweeps else ())]
    if verb == "help":
        from slurmtrain.cli.manual import topics

        words += topics()
    return words


def _newest(*, sweeps: bool) -> list[str]:
    """Return the names of the newest runs, or of the newest sweeps."""
    from slurmtrain.runs import lookup

    root = lookup.runs_root()
    if sweeps:
        from slurmtrain.sweep.folder import all_sweeps

        names = [sweep.id for sweep in all_sweeps(root)]
    else:
        names = [run.id for run in lookup.all_runs(root)]
    own = [name for name in names if name[0].isalnum()]  # `submit` makes no other, and a person may: --host=elsewhere
    return own[-NEWEST:]
