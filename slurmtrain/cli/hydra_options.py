"""What is done for options of Hydra's: --cfg prints the composed config, -sc completes what a person types in bash.

Bash calls `slurmtrain -sc query=bash` with the line in COMP_LINE. Names of runs may be those of other users, so words that
mean something to bash are not offered.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from enum import StrEnum

from slurmtrain.cli.arguments import find_verb, visible_verbs
from slurmtrain.cli.verbs import NO_VERB, VERBS, WITH_VALUE, Argument
from slurmtrain.config.folders import config_groups, search_folders
from slurmtrain.system.paths import runs_root

NEWEST = 30  # so many runs are offered: a person looks for one of the last days
PLAIN = re.compile(r"[\w.,:/@%+=\[\]-]+")  # words that bash takes as they are
# For bash, a word begins after the last `=`; where nothing is offered, it completes the names of files.
INSTALL = r"""
_slurmtrain() {
  local line=${COMP_LINE:0:COMP_POINT}; local word=${line##* }
  mapfile -t COMPREPLY < <(COMP_LINE=$line "$1" -sc query=bash 2>/dev/null)
  if [[ $word == *=* ]]; then COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}"); fi
}
complete -o nospace -o default -F _slurmtrain slurmtrain
"""


def show_config(arguments: argparse.Namespace) -> int:
    """Print the composed config, and return the exit code.

    Raises:
        UsageError, ConfigError: as for `compose`.
    """
    import yaml

    from slurmtrain.config.compose import Composer
    from slurmtrain.config.frozen import to_values

    folders = search_folders(arguments.config_name, arguments.config_dir)
    config = Composer(folders, arguments.config_name).compose(arguments.overrides)
    print(yaml.safe_dump(to_values(config), sort_keys=False), end="")
    return 0


def complete(arguments: argparse.Namespace) -> int:
    """Print the words that match the line in COMP_LINE, or what makes bash ask for them; return the exit code."""
    if "install=bash" in arguments.overrides:
        print(INSTALL)
        return 0
    *before, last = os.environ.get("COMP_LINE", "").split(" ")
    name = find_verb(before)
    verb = VERBS[name] if name is not None else NO_VERB
    words = visible_verbs() if name is None else [*verb.actions, "--help"]
    for action in verb.actions:
        if action in before[before.index(name or "") + 1 :]:
            verb, words = verb.with_action(action), ["--help"]
    options = verb.options
    if before and before[-1] in options and before[-1] in WITH_VALUE:
        words = _values(options[before[-1]])
    else:
        words += [option for option, each in options.items() if each.settings["help"] != argparse.SUPPRESS]
        words += [word for each in verb.arguments if not each.names[0].startswith("-") for word in _values(each)]
        words += _overrides(last) if verb.composes else []
    for word in words:
        if word.startswith(last) and PLAIN.fullmatch(word):
            print(word)
    return 0


def _overrides(last: str) -> Iterable[str]:
    """Return overrides that may be meant by the beginning of one: of groups and fields; after the `=`, of their values."""
    from slurmtrain.config.fields import GROUP, plain, words_of
    from slurmtrain.config.overrides import all_keys, kind_of

    groups, begun = config_groups(search_folders()), last.lstrip("+")
    key, equals, _ = begun.partition("=")
    plus = last.removesuffix(begun)
    if not equals:
        fields = (each for each in all_keys() if not isinstance(kind_of(each), GROUP))
        return [f"{plus}{name}=" for name in (*groups, *fields)]
    kind = plain(kind_of(key))
    words = words_of(kind) if isinstance(kind, type) and issubclass(kind, StrEnum) else []
    return [f"{plus}{key}={value}" for value in groups.get(key, words)]


def _values(argument: Argument) -> list[str]:
    """Return the values that an argument may have, if they can be listed."""
    metavar = argument.settings.get("metavar") or ""
    words = list(argument.settings.get("choices") or ())
    if metavar == "TOPIC":
        from slurmtrain.cli.help import topics

        words += topics()
    if re.search("RUN|SWEEP", metavar):
        from slurmtrain.runs import lookup

        root = runs_root()
        found = [each.id for each in lookup.all_runs(root)] if "RUN" in metavar else []
        sweeps = [each.id for each in lookup.all_sweeps(root)] if "SWEEP" in metavar else []
        # `submit` makes no name that begins with a dash, and a person may: --state=failed
        words += ["last", *(name for name in [*found[-NEWEST:], *sweeps[-NEWEST:]] if name[0].isalnum())]
    return words
