"""Try the loggers of one's own on the login node: can they be imported, and do they take the arguments of the config?

A process of the job's Python imports them, so that what they import stays out of `submit`. What only the login node lacks
(a driver, another package) proves nothing, and is left to the job.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from slurmtrain.choices import JobKind
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.launch.program_check import with_absolute_pythonpath

ASK_S = 60
# Takes {name: [target, argument, ...]} on stdin, and prints {name: what is wrong}.
QUESTION = """
import importlib, inspect, json, sys
def wrong(target, names):
    parts = target.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if count > 1 and error.name == module:
                continue  # a class in a module, say
            if error.name is not None and (module + ".").startswith(error.name + "."):
                return "there is no module " + error.name
            return None
        except BaseException:
            return None
        for part in parts[count:]:
            if not hasattr(found, part):
                return module + " has no " + ".".join(parts[count:])
            found = getattr(found, part)
        try:
            signature = inspect.signature(found)
        except (TypeError, ValueError):
            return None
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            return str(error)
        return None
    return "that is no name of a class in a module"
print(json.dumps({name: wrong(target, names) for name, (target, *names) in json.load(sys.stdin).items()}))
"""


def check_loggers(config: Config, cwd: Path) -> None:
    """Check that `observe.loggers` can be built where the job's Python and code are seen from here.

    Args:
        cwd: the folder of the code of which the job gets a snapshot.

    Raises:
        ConfigError: one has no such class, or the class does not take such arguments.
    """
    cluster, loggers = config.cluster, config.observe.loggers
    if config.job.kind != JobKind.TRAIN or not loggers or cluster.container.kind or cluster.modules or cluster.setup:
        return
    asked = {
        name: [values["_target_"], *(key for key in values if not (key.startswith("_") and key.endswith("_")))]
        for name, values in loggers.items()
        if "_args_" not in values and not values.get("_partial_")
    }
    environment = with_absolute_pythonpath(cwd)
    environment["PYTHONPATH"] = ":".join(filter(None, (str(cwd), environment["PYTHONPATH"])))
    try:
        done = subprocess.run(
            [interpreter_of(cluster) or sys.executable, "-c", QUESTION],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=True,
            cwd=cwd,
            env=environment,
        )
        # Their own code may have printed before.
        found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return
    for name, wrong in found.items():
        if wrong is not None:
            raise ConfigError(
                f"observe.loggers.{name}._target_={loggers[name]['_target_']}: {wrong}",
                hint="write the class as my_package.my_module.MyLogger, with its arguments next to it",
            )
