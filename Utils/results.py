"""results.csv and its companions: read, merge, write, remove. Statistics on them are in Utils/summary.py.

Beside `out/256B_150N_experiment/256B_150N_results.csv`, with the same beginning `256B_150N_`, lie

    results.csv   step, then one column a label: milliseconds
    losses.csv    the same shape: training loss
    runs.csv      one row a label (with ROUNDS: a label and round): settings, hardware, versions, what was measured
    summary.md    and the pictures: what plots.py makes of them

Everything here handles text. A number that is parsed and printed again may come back with other digits, and the columns
of earlier runs have to survive a merge bit for bit.
"""

import contextlib
import csv
import fcntl
import io
import math
import numbers
import os
import re
import tempfile
from pathlib import Path

from Utils.arguments import Parser, filename, positive
from Utils.errors import UserError

BASELINE = "no_optimization"
MUST_MATCH = ("model", "batch_size", "steps", "rounds", "seed", "data", "device_name", "gpus", "torch")
TABLES = ("results.csv", "losses.csv", "runs.csv")
PICTURES = ("mean_speedup_comparison.png", "optimization_performance_comparison.png", "performance_heatmap.png",
            "memory_comparison.png", "loss_comparison.png")
FOLDER = re.compile(r"(?:.+_)?(\d+B_\d+N_)experiment")  # 256B_150N_experiment, gpt2_16B_30N_experiment, ...
SEVERAL = re.compile(r"^\d+gpu_")  # in front of columns and folders of runs on several GPUs
ADVICE = "`make reset` deletes what is there, another PREFIX keeps both"


def warmup(steps):
    """How many of a run's first steps are kept in results.csv and left out of every statistic. The one definition."""
    return max(0, min(5, steps - 1))  # compilation, allocation, graph capture; at least one step is left to measure


def column(technique, gpus=1):
    """The name of a technique's column, `BF16`; trained on several GPUs, `4gpu_BF16`."""
    return f"{gpus}gpu_{technique}" if gpus > 1 else technique


def is_baseline(label):
    """Whether the label is the baseline's, on however many GPUs."""
    return SEVERAL.sub("", label, count=1) == BASELINE


def beginning(results_path):
    """What the names of all files of an experiment begin with: `out/256B_150N_experiment/256B_150N_`."""
    path = os.fspath(results_path)
    return path.removesuffix("results.csv") if path.endswith("results.csv") else os.path.splitext(path)[0] + "_"


def companion(results_path, name):
    """The path of the experiment's `losses.csv`, `runs.csv`, `summary.md` or picture."""
    return os.fspath(results_path) if name == "results.csv" else beginning(results_path) + name


def read_runs(results_path):
    """The experiment's runs.csv: a list with a dict of text for each row, [] if there is no such file."""
    path = companion(results_path, "runs.csv")
    table = read_table(path)
    if table and "label" not in table:
        raise UserError(f"{path} has no column named 'label', so it is not a table of this project: {ADVICE}")
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    seen = set()
    for line, row in enumerate(rows, 2):
        if (run := (row["label"], round_of(row))) in seen:
            raise UserError(f"{path}, line {line}: a second row of '{run[0]}' for round {run[1]}: delete one; "
                            f"otherwise {ADVICE}")
        seen.add(run)
    return rows


def record(results_path, milliseconds, losses, run, round=0, rounds=1):
    """Merge one finished run into the three tables: this label's two columns and its row, and nothing else.

    `milliseconds` and `losses` are one number a step, `run` is the row of runs.csv, a dict with at least `label`.
    Round k of n fills rows k * steps to (k + 1) * steps - 1 of the columns; round 0 empties the later ones.
    UserError: the tables there do not fit this run, or cannot be written; they are then as they were before.
    """
    label, steps = run["label"], len(milliseconds)
    if len(losses) != steps or not 0 <= round < rounds or label == "step":
        raise ValueError(f"{label}: {steps} times, {len(losses)} losses, round {round} of {rounds}")
    row = {"label": label, "steps": steps, **run, "round": round, "rounds": rounds}
    paths = {name: companion(results_path, name) for name in TABLES}
    with locked(results_path):
        results = _with_column(paths["results.csv"], label, [f"{ms:.4f}" for ms in milliseconds], round, rounds)
        losses = _with_column(paths["losses.csv"], label, [f"{loss:.9g}" for loss in losses], round, rounds)
        runs = _with_row(read_runs(results_path), {name: _text(value) for name, value in row.items()})
        # results.csv last, because it says which labels there are: whoever is killed between two of these renames
        # leaves a loss and a row that nobody asks for, and a folder that reads as if the run had not been. Only where
        # a label is replaced can old times stand beside a new row; summarize() compares their first step and says so.
        write({paths["losses.csv"]: _as_csv(losses), paths["runs.csv"]: _as_csv(runs),
               paths["results.csv"]: _as_csv(results)})


def check(results_path, run):
    """Refuse, before training, what record() would refuse after it, and settings that do not match those of the folder.

    `run` holds `label`, `steps`, perhaps `round` and `rounds`, and whatever of MUST_MATCH is known by now.
    Makes the folder. UserError names the difference and says what to do.
    """
    steps, rounds, round = int(run["steps"]), int(run.get("rounds") or 1), int(run.get("round") or 0)
    folder = os.path.dirname(os.path.abspath(results_path))
    with locked(results_path):
        with _beside({companion(results_path, "results.csv"): b"can this folder be written to?"}):
            pass
        for name in ("results.csv", "losses.csv"):
            path = companion(results_path, name)
            table = read_table(path)
            for column, texts in table.items():
                parse(path, column, texts)
            _fit(path, table, steps * rounds)
        for row in read_runs(results_path):
            if row["label"] == run["label"] and (round == 0 or round_of(row) == str(round)):
                continue  # about to be replaced
            for key in MUST_MATCH:
                old, new = row.get(key, ""), _text(run.get(key))
                if old and new and not _same(old, new):
                    raise UserError(f"{folder}: {row['label']} ran with {key} = {old}, this run has {new}, "
                                    f"so they cannot be compared: {ADVICE}")


def init(results_path, steps):
    """Write a results.csv that holds only `step`, 0 to steps - 1. One that exists is left alone: returns False."""
    with locked(results_path):
        if os.path.exists(results_path):
            return False
        write({os.fspath(results_path): _as_csv({"step": [str(step) for step in range(steps)]})})
        return True


def remove(results_path):
    """Delete the files that this tool writes for one experiment, by name, and its folder if that is then empty.

    Returns the paths of what was deleted. A folder that is not named like an experiment's was not made by this tool.
    """
    folder = Path(results_path).parent
    if not folder.is_dir():
        return []
    deleted = []
    with locked(results_path):
        for name in (*TABLES, "summary.md", *PICTURES):
            for suffix in ("", ".tmp"):  # .tmp: of a writer that was killed
                path = companion(results_path, name) + suffix
                if os.path.isfile(path) or os.path.islink(path):
                    try:
                        os.unlink(path)
                    except OSError as error:
                        raise UserError(f"cannot delete {path}: {error.strerror}") from error
                    deleted.append(path)
        if FOLDER.fullmatch(folder.name):
            with contextlib.suppress(OSError):  # not empty: it holds something of the user's
                folder.rmdir()
                deleted.append(f"{folder}/")
    return deleted


def clean(prefix):
    """remove() for every experiment's folder directly under `prefix`. Returns the paths of what was deleted."""
    if not os.fspath(prefix).strip():
        raise UserError("--prefix is empty: name the folder that holds the experiments, for example --prefix ./out")
    deleted = []
    for folder in sorted(Path(prefix).glob("*_experiment")):
        match = FOLDER.fullmatch(folder.name)
        if match and folder.is_dir() and not folder.is_symlink():
            for start in {match[1], folder.name.removesuffix("experiment")}:
                deleted += remove(folder / f"{start}results.csv")
    return deleted


@contextlib.contextmanager
def locked(path):
    """Make the folder of file `path` and hold its lock: one writer at a time.

    The lock lies on the folder itself: no lock file stays behind, and a holder that is killed lets go. On a network's
    folder, which may not be lockable, it lies on this machine's folder for temporary files.
    """
    folder = Path(os.path.abspath(path)).parent
    with contextlib.ExitStack() as held:
        try:
            blockers = [part for part in (folder, *folder.parents) if part.exists() and not part.is_dir()]
            if blockers:
                raise UserError(f"{blockers[0]} is a file where a folder is needed: move it, or choose another PREFIX")
            while not _lock(folder, held):
                held.close()  # while we waited, `make reset` removed the folder that we were waiting for
        except OSError as error:
            raise UserError(f"cannot use the folder {folder}: {error.strerror}; choose another PREFIX") from error
        yield


def _lock(folder, held):
    """Make and lock the folder until `held`, an ExitStack, is closed. False if it is gone again by then."""
    def opened(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        held.callback(os.close, descriptor)
        return descriptor

    os.makedirs(folder, exist_ok=True)
    try:
        descriptor = opened(folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # NFS locks only what is open for writing, which no folder can be
            fcntl.flock(opened(tempfile.gettempdir()), fcntl.LOCK_EX)
        return os.path.samestat(os.fstat(descriptor), os.stat(folder))
    except FileNotFoundError:
        return False


def write(contents):
    """`{path: bytes}`: every file appears whole or not at all. Call it under the lock.

    All are written, and on the disk, before the first takes its place: a full disk changes nothing.
    """
    with _beside(contents):
        for path in contents:
            os.replace(path + ".tmp", path)


@contextlib.contextmanager
def _beside(contents):
    """Every file's new content on the disk beside the old one, under the name that ends in `.tmp`; gone afterwards."""
    try:
        for path, data in contents.items():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + ".tmp")  # one fixed name: whoever is killed leaves it, the next replaces it
            with open(path + ".tmp", "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; "
                        "put that right, or choose another PREFIX") from error
    finally:
        for path in contents:
            with contextlib.suppress(OSError):
                os.unlink(path + ".tmp")


def read_table(path, notes=None):
    """A CSV file as `{column: [text of each row]}`, untouched; {} if there is none. UserError names the bad line.

    With a list `notes`, a last line that was cut is left out and the list says so; without one it is an error.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is a folder, a pipe or a device: remove it, or choose another PREFIX")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            text = file.read()
        if not text.strip():
            raise UserError(f"{path} is empty: delete it, or use another PREFIX")
        lines = list(csv.reader(io.StringIO(text.rstrip("\r\n"), newline=""), strict=True))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a CSV file ({error}): {ADVICE}") from error
    names, *rows = lines
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path} has two columns named '{twice}': {ADVICE}")
    if not text.endswith(("\n", "\r")):
        cut = bool(rows) and len(rows[-1]) < len(names)
        if notes is None:
            raise UserError(f"{path}, line {len(lines)}: the file ends in the middle of a line, so it may have been "
                            f"cut: put a line break there if it is whole; otherwise {ADVICE}")
        notes.append(f"{path}, line {len(lines)}: the file ends in the middle of a line"
                     + (", which is left out." if cut else "; its last number may have been cut."))
        rows = rows[:-1] if cut else rows
    for line, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise UserError(f"{path}, line {line}: {len(row)} fields instead of {len(names)}: {ADVICE}")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) if rows else {name: [] for name in names}


def parse(path, column, texts):
    """One column's numbers, as floats; an empty field is NaN. UserError names the line that holds none."""
    try:
        return [float(text or "nan") for text in texts]
    except ValueError:
        for line, text in enumerate(texts, 2):
            try:
                float(text or "nan")
            except ValueError:
                raise UserError(f"{path}, line {line}, column '{column}': '{text[:40]}' is not a number: "
                                f"{ADVICE}") from None
        raise


def _fit(path, table, rows):
    """UserError unless steps 0 to rows - 1 are what the table holds, or it holds no measurement yet."""
    if table and "step" not in table:
        raise UserError(f"{path} has no column named 'step', so it is not a table of this project: {ADVICE}")
    if len(table) > 1 and len(table["step"]) != rows:
        raise UserError(f"{path} holds {len(table['step'])} rows, this run has {rows} steps: {ADVICE}")
    if len(table) > 1 and parse(path, "step", table["step"]) != list(range(rows)):
        raise UserError(f"{path}: the column 'step' does not count 0, 1, 2, ...: {ADVICE}")


def _with_column(path, label, texts, round, rounds):
    rows = len(texts) * rounds
    table = read_table(path)
    _fit(path, table, rows)
    if len(table) <= 1:
        table = {"step": [str(step) for step in range(rows)]}
    if round == 0 or label not in table:
        table[label] = [""] * rows
    table[label][round * len(texts):(round + 1) * len(texts)] = texts
    return {name: table[name] for name in sorted(table, key=lambda name: (name != "step", not is_baseline(name)))}


def _with_row(rows, new):
    if new["round"] == "0":
        rows = [row for row in rows if row["label"] != new["label"] or round_of(row) == "0"]
    same = [i for i, row in enumerate(rows) if (row["label"], round_of(row)) == (new["label"], new["round"])]
    if same:
        rows[same[0]] = new
    else:
        rows.append(new)
    rows.sort(key=lambda row: not is_baseline(row["label"]))  # stable: the others keep their places
    return {name: [row.get(name, "") for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def round_of(row):
    """The round, as text, that a row of runs.csv is of."""
    return row.get("round") or "0"


def number(text):
    """A field of runs.csv as a float; NaN where there is no finite number, because a person may have edited it."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return math.nan
    return value if math.isfinite(value) else math.nan


def _same(old, new):
    """Whether two texts mean the same setting; a spreadsheet may have made 150 a 150.0."""
    try:
        return float(old) == float(new)
    except ValueError:
        return old == new


def _text(value):
    if value is None:
        return ""
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return f"{value:.7g}"
    return " ".join(str(value).splitlines())  # one run, one line: a file that was cut can be told


def _as_csv(table):
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    return file.getvalue().encode(errors="backslashreplace")  # a file's name need not be UTF-8


def main(argv=None):
    """python -m Utils.results {init,reset,clean} ...: what the Makefile's init_results, reset and clean call."""
    parser = Parser(description="Make or delete the files of an experiment.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in {"init": "write a results.csv that holds only steps", "reset": "delete one experiment's files",
                        "clean": "delete the files of every experiment under a prefix"}.items():
        command = commands.add_parser(name, help=words, description=words)
        if name == "clean":
            command.add_argument("--prefix", type=filename, required=True, help="the folder with the experiments in it")
        else:
            command.add_argument("--results_path", type=filename, required=True, help="the experiment's results.csv")
        if name == "init":
            command.add_argument("--steps", type=positive, required=True, help="number of steps")
    args = parser.parse_args(argv)
    if args.command != "clean" and not args.results_path.endswith(".csv"):
        raise UserError(f"--results_path '{args.results_path}' does not end in .csv: name the experiment's results.csv")
    if args.command == "init":
        made = init(args.results_path, args.steps)
        print(f"{args.results_path}: {'ready' if made else 'exists already and is left alone'}")
    else:
        deleted = remove(args.results_path) if args.command == "reset" else clean(args.prefix)
        print("\n".join(f"deleted {path}" for path in deleted) or "nothing to delete")


if __name__ == "__main__":
    main()
