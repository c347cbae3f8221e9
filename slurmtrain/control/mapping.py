"""Call a function with many arguments as the tasks of one array job: `slurmtrain.map`, as submitit's map_array.

    results = slurmtrain.map(evaluate, paths, cluster="a100x4", max_parallel=8).results()

On disk it is a sweep like any other whose points are calls: `status`, `logs` and `sweep` take it, its runs are requeued
when they are preempted, and `open_map` finds it again from another process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import reprlib
import secrets as random_words
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from msgspec.structs import replace

from slurmtrain.choices import Backend
from slurmtrain.config import secrets
from slurmtrain.config.schema import Config
from slurmtrain.control import stop
from slurmtrain.control.runs import (
    Run,
    Status,
    config_of,
    folder_of,
    refuse_unfinished,
    runs_of,
    start_in_background,
    submitting,
)
from slurmtrain.control.submitting import client_of
from slurmtrain.errors import ClusterError, UnreadableRecordError, UsageError
from slurmtrain.launch.claims import holder_here
from slurmtrain.launch.named_paths import check_named_paths
from slurmtrain.rank.jobs.map_task import RESULT, arguments_file, function_file, python_version
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.report.status.waiting import RunFailedError, as_they_end
from slurmtrain.runs import lookup
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.sweep.folder import create_sweep
from slurmtrain.sweep.jobs import cancel, require_own, states_of, submit_arrays, trusted_client
from slurmtrain.sweep.plan import SweepPlan
from slurmtrain.system.files import folder_mode, replace_file, user_in_words
from slurmtrain.system.records import open_regular
from slurmtrain.system.redaction import redact

log = logging.getLogger(__name__)

PROGRAM = "slurmtrain.rank.jobs.map_task"
MAP_HINT = "slurmtrain.map(function, items)"


class RemoteTraceback(Exception):  # noqa: N818 (it is the cause of an error, and is never raised)
    """The traceback of an exception where it was raised, in the job, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class MapTask:
    """One call of a map.

    Attributes:
        index: the place of its arguments, from 0 on.
        run: the run that makes the call, for its logs and attempts.
    """

    def __init__(self, owner: MapRun, index: int, run_dir: RunDir):
        self._map, self.index, self._run_dir = owner, index, run_dir
        self.run = Run(run_dir.path)

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the call, and return what it returned.

        Raises:
            the exception that the function raised, with the traceback of the job as its cause
            RunFailedError: the call was killed, or its exception cannot be read here.
            RunStoppedError: it was cancelled.
            WaitTimeoutError: it has not ended by then, and goes on.
            UsageError: it belongs to another user, whose pickles could run anything.
        """
        ((_, now),) = self._map._ended([self], timeout_s)
        return self._result_of(now)

    def _result_of(self, now: RunState) -> Any:
        left, run = _read_result(self._run_dir), self._run_dir
        if "error" not in left:
            refuse_unfinished(run, now)
            if "value" not in left:
                raise RunFailedError(f"run {run.id} has finished, but its result is gone", hint=str(run.path))
            return _unpickled(left["value"], f"the result of item {self.index}")
        error: object = None
        with contextlib.suppress(UsageError):
            error = _unpickled(left["error"], "the exception") if left["error"] is not None else None
        if not isinstance(error, BaseException):
            error = RunFailedError(f"item {self.index} raised {left['said']}", hint=f"logs {run.id}")
        raise error from RemoteTraceback(str(left["traceback"]))

    def __repr__(self) -> str:
        return f"<MapTask {self.index}, run {self.run.id}>"


class MapRun(Sequence[MapTask]):
    """The calls of one map, seen through the folder of its sweep.

    It is a sequence of `MapTask`, in the order of the arguments.

    Attributes:
        path: the folder, for `open_map`.
    """

    def __init__(self, path: Path | str):
        self._sweep = Sweep(Path(path))
        self.path = self._sweep.path
        runs = [self._sweep.run_dir(point.run_id) for point in self._sweep.points()]
        self._tasks = [MapTask(self, index, run_dir) for index, run_dir in enumerate(runs)]

    @property
    def id(self) -> str:
        """The name that `sweep status`, `sweep cancel` and `sweep retry` take."""
        return self._sweep.id

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for all calls, and return their results in the order of the arguments.

        Raises:
            as `MapTask.result`, as soon as one call is known to have failed; the others go on
        """
        found = {task.index: task._result_of(now) for task, now in self._ended(self, timeout_s)}
        return [found[index] for index in range(len(self))]

    def as_completed(self, timeout_s: float | None = None) -> Iterator[MapTask]:
        """Yield each call when it has ended, in whatever way; its `result` then returns or raises at once.

        Raises:
            WaitTimeoutError: not all have ended by then; they go on.
        """
        for task, _ in self._ended(self, timeout_s):
            yield task

    def states(self) -> list[Status]:
        """Return the state of every call now, in the order of the arguments; one squeue call for all."""
        now = states_of(self._sweep)
        return [Status.of(now[task.run.id]) for task in self._tasks]

    def cancel(self) -> None:
        """End all calls that have not ended.

        Raises:
            UsageError: they belong to somebody else.
            ClusterError: SLURM refuses or does not answer.
        """
        require_own(self._sweep)
        if self._sweep.info()["backend"] != Backend.LOCAL:
            cancel(self._sweep, trusted_client(self._sweep))
            return
        self._sweep.cancelled_file.touch()
        pid = holder_here(self.path)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)  # it passes it on, and starts no others
        for task in self._tasks:
            with contextlib.suppress(ClusterError):  # it has not begun, and never will
                stop.cancel(task._run_dir)

    @overload
    def __getitem__(self, index: int) -> MapTask: ...
    @overload
    def __getitem__(self, index: slice) -> list[MapTask]: ...
    def __getitem__(self, index: int | slice) -> MapTask | list[MapTask]:
        return self._tasks[index]

    def __len__(self) -> int:
        return len(self._tasks)

    def _ended(self, tasks: Sequence[MapTask], timeout_s: float | None) -> Iterator[tuple[MapTask, RunState]]:
        """Yield calls as they end."""
        by_run = {task._run_dir: task for task in tasks}
        for run_dir, now in as_they_end(by_run, timeout_s=timeout_s, is_to_come=self._is_to_come):
            yield by_run[run_dir], now

    def _is_to_come(self, now: RunState) -> bool:
        """Return whether a run that nobody has is one that its launcher on this machine will still start."""
        waits = now.status == RunStatus.PREPARED and self._sweep.info()["backend"] == Backend.LOCAL
        return waits and not self._sweep.cancelled_file.exists() and holder_here(self.path) is not None

    def __repr__(self) -> str:
        return f"<MapRun {self.id} of {len(self)} calls>"


def map(
    function: Callable[..., Any],
    *iterables: Iterable[Any],
    cluster: str | None = None,
    overrides: Sequence[str] = (),
    max_parallel: int | None = None,
    name: str = "map",
    project: str | os.PathLike[str] = ".",
    config_dir: str | os.PathLike[str] | None = None,
) -> MapRun:
    """Call a function with the items of the iterables, each call a task of one array job, and return at once.

    A call that is preempted is requeued, and begins anew in a later attempt. One that is killed is started again as
    often as `requeue` of the config says; one that raises has failed.

    Args:
        function: what to call; functions of notebooks, lambdas and closures are sent along, those of modules by name.
        iterables: as for Python's own `map`, but all of the same length.
        cluster: a config of the group `cluster`, such as "a100x4"; None: as `overrides` say, else this machine.
        overrides: as on the command line. A call has one rank on one node unless they say otherwise.
        max_parallel: number of calls at the same time; None: as many as there is room for, or one on this machine.
        name: job.name.
        project, config_dir: as for `submit`.

    Raises:
        UsageError: the function cannot be called, it or an item cannot be pickled, or there are no items.
        ConfigError, ClusterError: as for `submit`.
    """
    cwd, calls = folder_of(project), _calls_of(function, iterables)
    if isinstance(overrides, str):
        raise UsageError(f"overrides={overrides!r} is a string; expected a list", hint=f"[{overrides!r}]")
    first = [] if cluster is None else [f"cluster={cluster}"]
    words = [*first, "cluster.nodes=1", "cluster.tasks_per_node=1", *overrides]
    return map_calls(
        function,
        calls,
        words,
        cwd,
        name=name,
        varied=lambda number: {"item": _shown(calls[number])},
        max_parallel=max_parallel,
        config_dir=config_dir,
    )


def map_calls(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    overrides: Sequence[str],
    cwd: Path,
    *,
    name: str,
    varied: Callable[[int], dict[str, str]],
    max_parallel: int | None,
    config_dir: str | os.PathLike[str] | None,
) -> MapRun:
    """Submit the calls of a map; the arguments and errors are those of `map`.

    Args:
        calls: the arguments of each call.
        cwd: the folder to which paths are relative.
        varied: returns what tables show of a call, by its number.
    """
    if max_parallel is not None and max_parallel < 1:
        raise UsageError(f"max_parallel={max_parallel}: expected a number of calls, at least 1")
    with submitting:
        words = [f"job.name={name}", f"job.finished_when={RESULT}", *overrides]
        config, _, _ = config_of(words, cwd, command=["python", "-m", PROGRAM], config_dir=config_dir)
        its = config.cluster
        of_ranks = "python" if its.container.kind or its.venv or its.conda_env else sys.executable
        command = shlex.join([its.python or of_ranks, "-m", PROGRAM])  # known when all else is composed
        config = replace(config, job=replace(config.job, command=command))
        pickled, arguments = _pickled_calls(function, calls, cwd, config)
        for warning in check_named_paths(config, cwd):
            log.warning(warning)
        client = client_of(config) if config.cluster.backend != Backend.LOCAL else None
        plan = SweepPlan(config, search=random_words.token_hex(16))
        plan.add_copies(config, len(calls))
        sweep = create_sweep(plan, varied, overrides, cwd, parallelism=max_parallel)
        sweep.tasks.mkdir(mode=folder_mode(sweep.path))
        for number, each in enumerate(arguments):
            replace_file(arguments_file(sweep, number), each, durable=False)
        replace_file(function_file(sweep), pickled)  # the last: without it the sweep is none of map's
        found = MapRun(sweep.path)
        if client is not None:
            submission = submit_arrays(sweep, client)
            if submission.limit is not None:
                left = (
                    f"{submission.waiting} of {len(calls)} calls exceed the limit on jobs ({submission.limit.message})"
                )
                log.warning("%s; `sweep retry %s` submits them when there is room", left, sweep.id)
            return found
    start_in_background(["sweep", "retry", str(sweep.path)], sweep.path, lambda: holder_here(sweep.path) is not None)
    return found


def open_map(path: str | os.PathLike[str], *, project: str | os.PathLike[str] = ".") -> MapRun:
    """Return a map that exists, for instance after the notebook that made it was killed.

    Args:
        path: its path, its name or a part of it, or "last".
        project: the folder from which it was submitted.

    Raises:
        UsageError: there is none, or it is a sweep of another kind.
    """
    inside = folder_of(project) / os.fspath(path)
    sweep = lookup.find_sweep(str(inside) if lookup.is_sweep(inside) else os.fspath(path), runs_of(project))
    if not function_file(sweep).exists():
        raise UsageError(
            f"{sweep.path} was not created by slurmtrain.map: it has no {function_file(sweep).name}",
            hint="open_run(RUN)",
        )
    return MapRun(sweep.path)


def _calls_of(function: object, iterables: Sequence[Iterable[Any]]) -> list[tuple[Any, ...]]:
    if not callable(function):
        raise UsageError(f"slurmtrain.map was given {_shown((function,))}, which is not callable", hint=MAP_HINT)
    lists = [list(each) for each in iterables]
    if len({len(each) for each in lists}) > 1:
        raise UsageError(f"the iterables have {', '.join(str(len(each)) for each in lists)} items", hint=MAP_HINT)
    calls = list(zip(*lists, strict=True))
    if not calls:
        raise UsageError("there are no items", hint=MAP_HINT)
    return calls


def _shown(call: tuple[Any, ...]) -> str:
    """Return the arguments of a call in one short line, for tables."""
    return " ".join(redact(reprlib.repr(call[0] if len(call) == 1 else call)).split())


def _pickled_calls(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], cwd: Path, config: Config
) -> tuple[bytes, list[bytes]]:
    """Return the contents of the files of the function and of the arguments of each call.

    Raises:
        UsageError: something cannot be pickled.
        ConfigError: it holds the value of a secret.
    """
    import cloudpickle

    values, pickled = secrets.read(config.secrets), list[bytes]()
    for what, value in [("the function", function), *((f"item {number}", call) for number, call in enumerate(calls))]:
        try:
            pickled.append(cloudpickle.dumps(value))
        except Exception as problem:
            raise UsageError(
                f"{what} cannot be pickled: {type(problem).__name__}: {problem}",
                hint="jobs get it as a pickle: create locks, open files and connections inside the function",
            ) from None
        secrets.refuse_pickled(values, pickled[-1], what)
    path = [str(cwd), *(os.path.abspath(each) for each in sys.path)]
    shared = {"path": list(dict.fromkeys(path)), "function": pickled[0], "python": python_version()}
    return pickle.dumps(shared), pickled[1:]


def _read_result(run_dir: RunDir) -> dict[str, Any]:
    """Return what a call has left; nothing if it has left nothing.

    Raises:
        UsageError: it belongs to another user: reading a pickle runs whatever is in it.
        UnreadableRecordError: it cannot be read.
    """
    path = run_dir.path / RESULT
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            owner = os.fstat(file.fileno()).st_uid  # of what is read, whoever renames folders meanwhile
            if owner != os.geteuid():
                raise UsageError(
                    f"{path} belongs to {user_in_words(owner)}: a result is a pickle, which could execute any code as you",
                    hint="`status` and `logs` show the run; its owner can write the result in another format",
                )
            left = pickle.loads(file.read())
    except FileNotFoundError:
        return {}
    except (pickle.UnpicklingError, EOFError) as error:
        raise UnreadableRecordError(f"{path} is damaged: {error}") from None
    return left if isinstance(left, dict) else {}


def _unpickled(pickled: bytes, what: str) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as problem:
        raise UsageError(
            f"{what} cannot be read here: {type(problem).__name__}: {problem}",
            hint="can this process import the modules of its class?",
        ) from None
