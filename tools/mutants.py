"""Plant one mistake at a time in a copy of the sources, and see whether a test finds it.

    python tools/mutants.py                         every mutant of tools/mutants.toml
    python tools/mutants.py --only "avx2*" gather   those with such ids
    python tools/mutants.py --suite python --all    a survivor is tried against the whole suite
    python tools/mutants.py --list                  what there is, and whether its text is found
    python tools/mutants.py --json after.json --against before.json   fails if fewer are killed

Each mutant names the tests that ought to fail. They run on the unchanged sources too, where they
have to pass. Sources are copied to `--work`, one copy for each mutant, and the tree itself is left
alone; git and a network are not needed, nor that the package is installed. A mutant of the C++
sources is compiled into the objects that read it, or into those it names alone.

Exits with 0 if all mutants are killed, 1 if some survive, 2 if some could not be tried.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mutant_build import Build, BuildError

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "mutants.toml"
SUITES = ("native", "python")
KILLED, SURVIVED, BROKEN, ERROR = "killed", "survived", "does not build", "not tried"

# Not copied: environments, what was built, caches.
_LEFT_OUT = (".git", ".venv*", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")
_LIBRARY = "jaxfp8/_lib/libjaxfp8_cpu.so"
_OPTIONS = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
_NO_TESTS = (4, 5)  # of pytest: no such file or option; none was collected
# An editable install finds the package in its own checkout, before PYTHONPATH.
_SHIM = """import sys
sys.meta_path[:] = [
    f for f in sys.meta_path if "jaxfp8" not in getattr(f, "known_source_files", ())
]
"""
# The first test that failed, as pytest and as the C++ programs say it.
_FAILURE = re.compile(r"^(?:FAILED|ERROR):? (.+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake: `find` in `file`, which occurs there once, becomes `put`.

    Attributes:
      id: names it, from one state of the sources to the next.
      breaks: what is wrong then.
      file: from the root of the repository.
      find, put: whole lines or parts of them.
      tests: commands, some of which ought to fail.
      only: C++ sources (without ".cc") that alone see the change; () means all.
    """

    id: str
    breaks: str
    file: str
    find: str
    put: str
    tests: tuple[str, ...]
    only: tuple[str, ...] = ()

    @property
    def suite(self) -> str:
        """The part of the suite that ought to find it."""
        return "native" if self.file.startswith("ffi/") else "python"

    def applied(self, root: Path) -> str:
        """The text of the file with the mistake in it."""
        path = root / self.file
        count = path.read_text().count(self.find) if path.exists() else 0
        if count != 1:
            raise ValueError(f"mutant `{self.id}`: its text occurs {count} times in {self.file}")
        return path.read_text().replace(self.find, self.put)


@dataclasses.dataclass(frozen=True)
class Table:
    """The mutants, and the commands of each whole suite."""

    mutants: tuple[Mutant, ...]
    suites: dict[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a mutant: `by` is what failed, or why it could not be tried."""

    mutant: Mutant
    verdict: str
    by: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Ran:
    """A command: whether it passed, failed, or ran no test; what failed; how long it took."""

    status: str
    detail: str
    seconds: float


def read_table(path: Path = TABLE) -> Table:
    """The mutants of a table; a test that `commands` has under a name is replaced by those."""
    text = tomllib.loads(path.read_text())
    commands = text.get("commands", {})

    def full(tests: Sequence[str]) -> tuple[str, ...]:
        return tuple(c for test in tests for c in commands.get(test, [test]))

    mutants = tuple(
        Mutant(**{**row, "tests": full(row["tests"]), "only": tuple(row.get("only", ()))})
        for row in text["mutant"]
    )
    return Table(mutants, {name: full(text["suites"][name]) for name in SUITES})


class Processes:
    """Commands in process groups of their own, which all end when this program is interrupted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self.stopped = False

    def run(
        self,
        command: str,
        folder: Path,
        environment: dict[str, str] | None = None,
        limit: float | None = None,
    ) -> tuple[int | None, str]:
        """The status (None past the time limit) and output of a shell command."""
        with self._lock:
            if self.stopped:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            _end(process)
            return None, process.communicate()[0]
        finally:
            with self._lock:
                self._running.discard(process)

    def build(self, command: str, folder: Path) -> tuple[int, str]:
        """The same without a limit."""
        status, output = self.run(command, folder)
        return status or 0, output

    def stop(self) -> None:
        """Ends all that runs, and starts nothing more."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Bench:
    """Where mutants are tried: the unchanged copy, its programs, and a copy for each mutant."""

    def __init__(self, work: Path, python: str, jobs: int) -> None:
        self.work, self.python, self.jobs = work, python, jobs
        self.base = work / "base"
        self.processes = Processes()
        self._pool = concurrent.futures.ThreadPoolExecutor(jobs)
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._known: dict[str, Any] = {}

    def prepare(self) -> None:
        """Copies the sources and builds the library; what an earlier run built is used again."""
        old = self.work / "old"
        shutil.rmtree(old, ignore_errors=True)
        if self.base.exists():
            self.base.rename(old)
        _copy(ROOT, self.base, _keeping_time_of(old, self.base))
        if (old / "build").exists():
            (old / "build").rename(self.base / "build")
        shutil.rmtree(old, ignore_errors=True)
        paths = self.work / "path"
        paths.mkdir(exist_ok=True)
        (paths / "sitecustomize.py").write_text(_SHIM)
        library = self.base / _LIBRARY
        library.parent.mkdir(exist_ok=True)
        shutil.copy2(self._library().make(self.jobs), library)

    def try_all(
        self, mutants: Sequence[Mutant], extra: dict[str, tuple[str, ...]]
    ) -> Iterator[Any]:
        """The outcome of each mutant, as they become known; `extra` runs on what survives."""
        # The others run on what survives the first, if anything does.
        for command in dict.fromkeys(mutant.tests[0] for mutant in mutants):
            self._pool.submit(self._unchanged, command)
        # Those that are compiled take longest.
        ordered = sorted(mutants, key=lambda m: m.suite != "native")
        tried = [self._pool.submit(self._try, m, extra.get(m.suite, ())) for m in ordered]
        for future in concurrent.futures.as_completed(tried):
            yield future.result()

    def close(self) -> None:
        """Ends what runs and removes the copies of mutants."""
        self.processes.stop()
        self._pool.shutdown(cancel_futures=True)
        for folder in self.work.glob("m-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _try(self, mutant: Mutant, extra: Sequence[str]) -> Outcome:
        start, copy = time.monotonic(), self.work / f"m-{mutant.id}"
        try:
            verdict, by = self._verdict(mutant, copy, extra)
        except BuildError as error:
            verdict, by = BROKEN, _first_error(str(error))
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        return Outcome(mutant, verdict, by, time.monotonic() - start)

    def _verdict(self, mutant: Mutant, copy: Path, extra: Sequence[str]) -> tuple[str, str]:
        shutil.rmtree(copy, ignore_errors=True)
        _copy(self.base, copy)
        text = mutant.applied(copy)
        (copy / mutant.file).write_text(text)
        if mutant.file.endswith(".py"):
            try:
                compile(text, mutant.file, "exec")
            except SyntaxError as error:
                raise BuildError(str(error)) from error
        for command in (*mutant.tests, *extra):
            unchanged = self._unchanged(command)
            if unchanged.status != "passes":
                return ERROR, f"`{command}` {unchanged.status} without it: {unchanged.detail}"
            ran = self._run(command, copy, mutant, 60 + 5 * unchanged.seconds)
            if ran.status != "passes":
                return KILLED, ran.detail
        return SURVIVED, ""

    def _unchanged(self, command: str) -> Ran:
        """The command on the unchanged sources, run once."""

        def run() -> Ran:
            try:
                return self._run(command, self.base)
            except BuildError as error:
                return Ran("does not build", _first_error(str(error)), 0)

        ran: Ran = self._do_once(f"unchanged: {command}", run)
        return ran

    def _run(
        self, command: str, copy: Path, mutant: Mutant | None = None, limit: float | None = None
    ) -> Ran:
        """Runs a command on a copy: "pytest ..." or "check PROGRAM ...", of ffi/tests/cpu."""
        runner, *words = shlex.split(command)
        if runner == "pytest":
            if mutant is not None and mutant.suite == "native":
                self._put_library(copy, mutant)
            program = [self.python, "-m", "pytest", *_OPTIONS, *words]
        elif runner == "check":
            program = [*_plainly(), str(self._program(words[0], copy, mutant)), *words[1:]]
        else:
            raise ValueError(f"`{command}` begins with neither pytest nor check")
        paths = os.pathsep.join([str(self.work / "path"), str(copy)])
        environment = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        start = time.monotonic()
        status, output = self.processes.run(shlex.join(program), copy, environment, limit)
        seconds = time.monotonic() - start
        if status == 0:
            return Ran("passes", "", seconds)
        if runner == "pytest" and status in _NO_TESTS:
            return Ran("runs no test", output.strip()[-300:], seconds)
        return Ran("fails", _what_failed(status, output), seconds)

    def _library(self) -> Build:
        """The library of the unchanged sources."""
        include = subprocess.run(
            [self.python, "-c", "import jaxlib, os; print(os.path.dirname(jaxlib.__file__))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        settings = [f"-DJAXFP8_FFI_INCLUDE={include}/include"]
        return Build(self.base, "ffi", "jaxfp8_cpu", settings, self.processes.build)

    def _put_library(self, copy: Path, mutant: Mutant) -> None:
        """Builds the library with the mutant in it, the first time that it is asked for."""
        if not (copy / "build" / "jaxfp8_cpu").exists():
            library = self._library().changed(copy, mutant.file, mutant.only)
            shutil.copy2(library, copy / _LIBRARY)

    def _program(self, name: str, copy: Path, mutant: Mutant | None) -> Path:
        """A program of ffi/tests/cpu: of the unchanged sources, or with a mutant in it."""
        build = Build(self.base, "ffi/tests/cpu", name, [], self.processes.build)
        unchanged: Path = self._do_once(f"build {name}", lambda: build.make(self.jobs))
        return unchanged if mutant is None else build.changed(copy, mutant.file, mutant.only)

    def _do_once(self, key: str, work: Callable[[], Any]) -> Any:
        """The result of what several mutants need; whoever asks first does it."""
        with self._lock:
            own = self._locks.setdefault(key, threading.Lock())
        with own:
            if key not in self._known:
                self._known[key] = work()
        return self._known[key]


def _copy(source: Path, target: Path, copy_file: Callable[[str, str], Any] = shutil.copy2) -> None:
    left_out = shutil.ignore_patterns(*_LEFT_OUT)
    shutil.copytree(source, target, ignore=left_out, symlinks=True, copy_function=copy_file)


def _keeping_time_of(old: Path, new: Path) -> Callable[[str, str], None]:
    """Copies a file: one that differs from that in `old` is new to whoever builds, whatever its
    time in the tree; one that does not is not.
    """

    def copy_file(source: str, target: str) -> None:
        shutil.copyfile(source, target)
        before = old / Path(target).relative_to(new)
        if before.exists() and before.read_bytes() == Path(target).read_bytes():
            shutil.copystat(before, target)

    return copy_file


@functools.cache
def _plainly() -> tuple[str, ...]:
    """What programs with sanitizers are run by, where memory lies too far apart for them."""
    command = ("setarch", "--addr-no-randomize")
    is_allowed = (
        shutil.which("setarch")
        and not subprocess.run([*command, "true"], capture_output=True, check=False).returncode
    )
    return command if is_allowed else ()


def _what_failed(status: int | None, output: str) -> str:
    if status is None:
        return "does not end"
    found = _FAILURE.search(output)
    last = (output.strip().splitlines() or ["no output"])[-1]
    return (found[1] if found else f"status {status}: {last}").strip()


def _first_error(output: str) -> str:
    return next((line for line in output.splitlines() if "error" in line), output.strip()[-300:])


class Progress:
    """A bar on a terminal, otherwise a line for each outcome."""

    def __init__(self, total: int) -> None:
        self.total, self.counts = total, Counter[str]()
        self.is_terminal = sys.stderr.isatty()

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.verdict] += 1
        done = sum(self.counts.values())
        said = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        if self.is_terminal:
            bar = "#" * (30 * done // self.total)
            end = "\n" if done == self.total else ""
            print(f"\r\x1b[K[{bar:30}] {done}/{self.total}: {said}", end=end, file=sys.stderr)
        else:
            print(f"{done}/{self.total} {line(outcome)}", file=sys.stderr)
        sys.stderr.flush()


def line(outcome: Outcome) -> str:
    """An outcome as a row."""
    mutant, by = outcome.mutant, outcome.by[:150]
    return f"{outcome.verdict:14} {outcome.seconds:5.0f} s  {mutant.id:34} {by or mutant.breaks}"


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All outcomes, to keep."""
    rows = [
        {
            **{name: getattr(o.mutant, name) for name in ("id", "suite", "file", "breaks")},
            "verdict": o.verdict,
            "by": o.by,
            "seconds": round(o.seconds, 1),
        }
        for o in outcomes
    ]
    return {"counts": dict(Counter(o.verdict for o in outcomes)), "mutants": rows}


def no_longer_killed(outcomes: Sequence[Outcome], before: Path) -> list[str]:
    """The ids that an earlier run killed, and this one tried and did not."""
    rows = json.loads(before.read_text())["mutants"]
    earlier = {row["id"] for row in rows if row["verdict"] == KILLED}
    return [o.mutant.id for o in outcomes if o.verdict != KILLED and o.mutant.id in earlier]


def arguments() -> argparse.Namespace:
    """What was asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="ID", help="ids, or patterns")
    parser.add_argument("--suite", choices=SUITES, help="mutants of the C++ or Python sources")
    parser.add_argument("--all", action="store_true", help="the whole suite on what survives")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--python", default=sys.executable, help="with JAX and pytest")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    parser.add_argument("--against", type=Path, metavar="FILE", help="outcomes of an earlier run")
    parser.add_argument("--list", action="store_true", help="only say which mutants there are")
    return parser.parse_args()


def choose(table: Table, args: argparse.Namespace) -> list[Mutant]:
    """The mutants that were asked for, whose texts are all found."""
    known = [m for m in table.mutants if args.suite in (None, m.suite)]
    chosen = [m for m in known if any(fnmatch.fnmatch(m.id, p) for p in args.only)]
    if not chosen:
        sys.exit(f"no mutant has an id such as {' or '.join(args.only)}")
    wrong = []
    for mutant in chosen:
        try:
            mutant.applied(ROOT)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        sys.exit(2)
    return chosen


def main() -> None:
    """Try the mutants, print the table; see the top for the status."""
    args = arguments()
    table = read_table(args.table)
    mutants = choose(table, args)
    if args.list:
        print("\n".join(f"{m.suite:7} {m.id:34} {m.file}: {m.breaks}" for m in mutants))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    bench = Bench(args.work.resolve(), args.python, args.jobs)
    progress, outcomes = Progress(len(mutants)), []
    try:
        bench.prepare()
        for outcome in bench.try_all(mutants, table.suites if args.all else {}):
            outcomes.append(outcome)
            progress.add(outcome)
    except BuildError as error:
        sys.exit(f"the unchanged sources do not build:\n{error}")
    except KeyboardInterrupt:
        print("\ninterrupted; what is known so far:", file=sys.stderr)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        bench.close()
    order = {m.id: i for i, m in enumerate(mutants)}
    outcomes.sort(key=lambda o: order[o.mutant.id])
    print("\n".join(map(line, outcomes)))
    counts = Counter(o.verdict for o in outcomes)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if args.json:
        args.json.write_text(json.dumps(as_json(outcomes), indent=1) + "\n")
    fewer = no_longer_killed(outcomes, args.against) if args.against else []
    if fewer:
        print(f"killed before and not now: {', '.join(fewer)}")
    tried = len(outcomes) == len(mutants) and not (counts[ERROR] or counts[BROKEN])
    sys.exit(2 if not tried else 1 if fewer or counts[SURVIVED] else 0)


if __name__ == "__main__":
    main()
