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
import fnmatch
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from mutant_bench import Bench
from mutant_build import BuildError
from mutant_report import BROKEN, ERROR, SURVIVED, Progress, as_json, line, no_longer_killed
from mutant_table import ROOT, SUITES, TABLE, Mutant, Table, read_table


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
