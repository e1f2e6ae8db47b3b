"""What earlier runs have measured survives whatever comes: other runs, crashes, full disks, damaged files, `clean`."""

import csv
import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

from Utils import results
from Utils.errors import UserError
from Utils.results import BASELINE, check, init, read_runs, read_table, record

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(results.__file__).resolve().parent.parent
SETTINGS = {"model": "small", "batch_size": 4, "steps": 3, "rounds": 1, "round": 0, "seed": 0, "data": "9a3c",
            "device_name": "NVIDIA H200", "torch": "2.13.0"}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "4B_3N_experiment" / "4B_3N_results.csv")


def a_run(label, **changes):
    return SETTINGS | {"label": label} | changes


def measure(path, label=BASELINE, milliseconds=(3.0, 2.0, 1.0), **changes):
    record(path, milliseconds, [8.0] * len(milliseconds), a_run(label, **changes))


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def columns_of(path):
    """Read by the standard library alone: {column: [text, ...]}."""
    header, *rows = rows_of(path)
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def contents(folder):
    return {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}


def run(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, **options)


@contextmanager
def refused(*words):
    """The block ends in a UserError whose message is one line and holds all the words."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


# Merging

LABELS = st.one_of(st.sampled_from([BASELINE, "TF32", "BF16+TC"]),
                   st.text(st.characters(min_codepoint=32, max_codepoint=0x24F, exclude_characters="\x7f\x85"),
                           min_size=1, max_size=5).filter(lambda label: label != "step"))
NUMBERS = st.lists(st.floats(0.001, 1e6), min_size=2, max_size=2)
FOUND = {"step": ["0", "1", "2", "3"], "from elsewhere": ["0.47288", "1e2", "007.50", ""]}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(LABELS, st.integers(0, 1), NUMBERS, NUMBERS), max_size=8), st.booleans())
def test_the_tables_are_what_a_simple_model_says(runs, something_is_there):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/results.csv"
        times = {}
        if something_is_there:
            Path(path).write_text("step,from elsewhere\n0,0.47288\n1,1e2\n2,007.50\n3,\n")
            times["from elsewhere"] = FOUND["from elsewhere"]
        losses, rows = {}, {}
        for label, round, milliseconds, loss in runs:
            record(path, milliseconds, loss, {"label": label, "note": f"{loss[0]}"}, round, 2)
            for table, texts in ((times, [f"{x:.4f}" for x in milliseconds]), (losses, [f"{x:.9g}" for x in loss])):
                old = table.get(label, [""] * 4) if round else [""] * 4
                table[label] = old[:2] + texts if round else texts + old[2:]
            if round == 0:
                rows.pop((label, 1), None)
            rows[label, round] = f"{loss[0]}"
        if not runs:
            return
        for name, table in (("results.csv", times), ("losses.csv", losses)):
            order = sorted(table, key=lambda label: label != BASELINE)
            assert list(columns_of(f"{folder}/{name}").items()) == [
                ("step", FOUND["step"]), *((label, table[label]) for label in order)]
        assert {(row["label"], int(row["round"])): row["note"] for row in read_runs(path)} == rows
        assert len(read_runs(path)) == len(rows)
        assert sorted(os.listdir(folder)) == ["losses.csv", "results.csv", "runs.csv"]


def test_the_baseline_stands_first_and_the_others_keep_their_places(path):
    for label in ("TF32", "BF16", BASELINE, "TF32"):
        measure(path, label)
    assert rows_of(path)[0] == ["step", BASELINE, "TF32", "BF16"]
    assert [row["label"] for row in read_runs(path)] == [BASELINE, "TF32", "BF16"]


def test_a_text_with_line_breaks_stays_one_line(path):
    measure(path, text="two\r\nlines\rand more")
    measure(path, "TF32")
    assert read_runs(path)[0]["text"] == "two lines and more"
    assert len(Path(results.companion(path, "runs.csv")).read_bytes().splitlines()) == 3


def test_what_is_unknown_is_empty_and_numbers_are_short(path):
    measure(path, sm_clock_mhz=None, mfu=1 / 3, valid=True)
    row = read_runs(path)[0]
    assert (row["sm_clock_mhz"], row["mfu"], row["valid"]) == ("", "0.3333333", "True")


def test_a_new_column_of_runs_csv_is_empty_for_earlier_runs(path):
    measure(path)
    measure(path, "TF32", mfu=0.5)
    assert [row["mfu"] for row in read_runs(path)] == ["", "0.5"]


def test_a_whole_run_replaces_all_rounds_of_its_label(path):
    for round in (0, 1, 0):
        record(path, [1.0, 2.0], [3.0, 4.0], {"label": BASELINE}, round, 2)
    assert columns_of(path)[BASELINE] == ["1.0000", "2.0000", "", ""]
    assert [row["round"] for row in read_runs(path)] == ["0"]


def test_warmup_is_five_steps_and_leaves_one():
    assert [results.warmup(steps) for steps in (1, 2, 5, 6, 7, 150)] == [0, 1, 4, 5, 5, 5]


@pytest.mark.parametrize("changes", [{"losses": [1.0]}, {"round": 1}, {"run": {"label": "step"}}])
def test_nonsense_from_a_script_is_our_bug_and_changes_nothing(path, changes):
    arguments = {"milliseconds": [1.0, 2.0], "losses": [1.0, 2.0], "run": {"label": BASELINE}}
    with pytest.raises(ValueError):
        record(path, **arguments | changes)
    assert not os.path.exists(path)


# Many writers, and writers that die

WRITER = textwrap.dedent("""
    import sys
    from Utils.results import record
    path, label, steps, times = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    print("ready", flush=True)
    for k in range(times):
        name = label if times > 1000 else f"{label}{k}"
        record(path, [k + 1.0] * steps, [k + 1.0] * steps, {"label": name, "k": k})
""")


def writer(path, label, steps, times):
    process = subprocess.Popen([sys.executable, "-c", WRITER, path, label, str(steps), str(times)], cwd=ROOT,
                               stdout=subprocess.PIPE, text=True)
    return process


def test_eight_writers_at_once_lose_nothing(path):
    processes = [writer(path, f"writer{i}_", steps=3, times=5) for i in range(8)]
    for process in processes:
        with process:
            process.wait(60)
        assert process.returncode == 0
    names = {f"writer{i}_{k}" for i in range(8) for k in range(5)}
    for name in ("results.csv", "losses.csv"):
        table = columns_of(results.companion(path, name))
        assert set(table) == {"step"} | names
        assert all(float(text) == int(label[-1]) + 1 for label in names for text in table[label])
    assert {row["label"] for row in read_runs(path)} == names


def test_a_writer_that_is_killed_leaves_a_whole_folder(path):
    """SIGKILL at fifty random moments, and all the while somebody reads."""
    steps, randomly = 300, random.Random(0)
    for label in (BASELINE, "TF32"):
        measure(path, label, [1 / 3 + step for step in range(steps)], steps=steps)
    earlier = {name: columns_of(results.companion(path, name)) for name in ("results.csv", "losses.csv")}
    leftovers = 0
    for _ in range(50):
        with writer(path, "BF16", steps, times=10**6) as process:
            process.stdout.readline()
            end = time.monotonic() + randomly.uniform(0, 0.04)
            while time.monotonic() < end:
                assert len(read_table(path)["step"]) == steps
                read_runs(path)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        for name, old in earlier.items():
            table = columns_of(results.companion(path, name))
            assert {label: table[label] for label in old} == old
            assert len(set(table.get("BF16", ["whole"]))) == 1
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)
        leftovers += len(os.listdir(os.path.dirname(path))) > 3
    assert leftovers, "no writer was killed while it wrote: this test has tested nothing"
    measure(path, "FA", [1.0] * steps, steps=steps)
    check(path, a_run("FA", steps=steps))
    assert sorted(os.listdir(os.path.dirname(path))) == [f"4B_3N_{name}.csv" for name in ("losses", "results", "runs")]


def test_a_lock_waits_for_its_holder_and_outlives_the_folder_it_waited_for(path):
    waiter = ("import sys; from Utils.results import locked; print('ready', flush=True)\n"
              "with locked(sys.argv[1]): print(1)")
    with results.locked(path):
        process = subprocess.Popen([sys.executable, "-c", waiter, path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        os.rmdir(os.path.dirname(path))
    assert process.communicate(timeout=20)[0] == "1\n"
    assert os.path.isdir(os.path.dirname(path))


def test_where_a_network_refuses_to_lock_a_folder_the_lock_is_this_machines(path, monkeypatch):
    lock, holding = fcntl.flock, []

    def flock(descriptor, how):
        if os.path.samestat(os.fstat(descriptor), os.stat(os.path.dirname(path))):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        holding.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    measure(path)
    measure(path, "TF32")
    assert list(columns_of(path)) == ["step", BASELINE, "TF32"]
    assert holding == [os.path.realpath(tempfile.gettempdir())] * 2


# Disks and folders

@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_full_disk_changes_nothing(path, monkeypatch, which):
    measure(path)
    before, calls = contents(os.path.dirname(path)), iter(range(100))

    def fsync(_):
        if next(calls) == which:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with refused("cannot write", "No space left on device", "PREFIX"):
        measure(path, "TF32")
    assert contents(os.path.dirname(path)) == before


def test_a_disk_that_is_really_full_changes_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        path = str(disk / "4B_3N_experiment" / "4B_3N_results.csv")
        measure(path)
        before = contents(os.path.dirname(path))
        with pytest.raises(OSError), open(disk / "fills the disk", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        os.truncate(disk / "fills the disk", os.path.getsize(disk / "fills the disk") - 4096)  # room for one of three
        with refused("cannot write", "No space left on device", "PREFIX"):
            measure(path, "TF32")
        assert contents(os.path.dirname(path)) == before
        os.unlink(disk / "fills the disk")
        measure(path, "TF32")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_limit_on_file_sizes_ends_in_one_line(path):
    measure(path)
    before = contents(os.path.dirname(path))
    code = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)); from Utils.results import *\n"
            "record(sys.argv[1], [1.] * 3, [1.] * 3, {'label': 'TF32'})")
    done = run("-B", "-c", code, path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "File too large" in done.stderr
    assert contents(os.path.dirname(path)) == before


def test_a_prefix_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    for act in (check, lambda path, run: init(path, 3), lambda path, run: measure(path)):
        with refused(str(tmp_path / "out"), "is a file where a folder is needed"):
            act(str(tmp_path / "out" / "4B_3N_experiment" / "4B_3N_results.csv"), a_run(BASELINE))
    assert (tmp_path / "out").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_refused():
    with refused("cannot use the folder /proc/out", "PREFIX"):
        check("/proc/out/4B_3N_results.csv", a_run(BASELINE))


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(path, monkeypatch):
    """Root may write anywhere, so the refusal is the operating system's in the one call that would meet it."""
    measure(path)

    def denied(name, mode="r", *arguments, **options):
        if mode != "r":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return open(name, mode, *arguments, **options)

    monkeypatch.setattr(results, "open", denied, raising=False)
    with refused("cannot write", "Permission denied", "PREFIX"):
        check(path, a_run("TF32"))


@pytest.mark.parametrize("name", results.TABLES)
def test_a_folder_in_a_tables_place_is_refused_before_training(path, name):
    os.makedirs(results.companion(path, name))
    with refused(f"{name} is a folder"):
        check(path, a_run(BASELINE))


def test_a_check_leaves_nothing_behind(path):
    check(path, a_run(BASELINE))
    assert os.listdir(os.path.dirname(path)) == []


# Files that do not fit

BAD = {
    "empty": ("", "results.csv is empty"),
    "only blank lines": ("\n\n", "results.csv is empty"),
    "cut in the middle of a line": ("step,a\n0,1\n1,1\n2", "line 4: the file ends in the middle of a line"),
    "cut in the middle of a number": ("step,a\n0,1\n1,1\n2,1.", "line 4: the file ends in the middle of a line"),
    "a field too few": ("step,a,b\n0,1,1\n1,1\n2,1,1\n", "line 3: 2 fields instead of 3"),
    "a field too many": ("step,a\n0,1\n1,1,1\n2,1\n", "line 3: 3 fields instead of 2"),
    "without step": ("a,b\n1,1\n2,1\n3,1\n", "no column named 'step'"),
    "two columns of one name": ("step,a,a\n0,1,1\n1,1,1\n2,1,1\n", "two columns named 'a'"),
    "other number of rows": ("step,a\n0,1\n1,1\n", "holds 2 rows, this run has 3 steps"),
    "steps that do not count": ("step,a\n0,1\n2,1\n1,1\n", "does not count 0, 1, 2"),
    "text in a number's place": ("step,a\n0,1\n1,fast\n2,1\n", "line 3, column 'a': 'fast' is not a number"),
    "text in a step's place": ("step,a\n0,1\nb,1\n2,1\n", "line 3, column 'step': 'b' is not a number"),
    "not text at all": (b"\x89PNG\r\n\xff\xfe", "cannot be read as a CSV file"),
    "a quote that never ends": ('step,a\n0,"1\n1,1\n2,1\n', "cannot be read as a CSV file"),
}


@pytest.mark.parametrize("name", ["results.csv", "losses.csv"])
@pytest.mark.parametrize("what", BAD)
def test_a_damaged_table_is_refused_before_training_and_left_alone(path, what, name):
    damage, message = BAD[what]
    damage = damage if isinstance(damage, bytes) else damage.encode()
    file = Path(results.companion(path, name))
    file.parent.mkdir()
    file.write_bytes(damage)
    with refused(message.replace("results.csv", name), str(file), "PREFIX"):
        check(path, a_run(BASELINE))
    assert contents(file.parent) == {file.name: damage}
    if what != "text in a number's place":  # a merge copies text as it is
        with refused(message.replace("results.csv", name)):
            measure(path)
        assert contents(file.parent) == {file.name: damage}


@pytest.mark.parametrize(("damage", "message"), [
    ("", "runs.csv is empty"),
    ("name,steps\na,3\n", "no column named 'label'"),
    ("label,steps\na,3\nb", "line 3: the file ends in the middle of a line"),
])
def test_a_damaged_runs_csv_is_refused(path, damage, message):
    os.makedirs(os.path.dirname(path))
    Path(results.companion(path, "runs.csv")).write_text(damage)
    for act in (check, lambda path, run: measure(path)):
        with refused(message):
            act(path, a_run(BASELINE))


def test_two_rows_of_one_run_are_refused_and_left_alone(path):
    for label in (BASELINE, "TF32"):
        measure(path, label)
    runs = Path(results.companion(path, "runs.csv"))
    runs.write_text(runs.read_text() + runs.read_text().splitlines()[2] + "\n")
    before = contents(Path(path).parent)
    for act in (check, lambda path, run: measure(path, "TF32")):
        with refused("runs.csv, line 4: a second row of 'TF32' for round 0", "delete one", "make reset"):
            act(path, a_run("TF32"))
    assert contents(Path(path).parent) == before


def test_what_a_killed_writer_left_is_replaced_whatever_it_has_become(path, tmp_path):
    os.makedirs(os.path.dirname(path))
    os.mkfifo(path + ".tmp")  # whoever opened it would wait for ever
    Path(results.companion(path, "losses.csv") + ".tmp").symlink_to(tmp_path / "of the user")
    measure(path)
    assert list(read_table(path)) == ["step", BASELINE] and not (tmp_path / "of the user").exists()


@pytest.mark.parametrize(("name", "other"), [
    ("model", "gpt2"), ("batch_size", 8), ("seed", 1), ("data", "77ff"), ("device_name", "NVIDIA A100"),
    ("torch", "2.12.1")])
def test_other_settings_are_refused_by_name(path, name, other):
    measure(path)
    check(path, a_run("TF32"))
    with refused(BASELINE, f"{name} = {SETTINGS[name]}", f"this run has {other}", "make reset", "PREFIX"):
        check(path, a_run("TF32", **{name: other}))


def test_other_rounds_are_refused(path):
    measure(path)
    with refused("holds 3 rows, this run has 6 steps"):
        check(path, a_run("TF32", rounds=2))


def test_the_last_run_of_a_folder_may_change_its_settings(path):
    measure(path)
    check(path, a_run(BASELINE, seed=1))


def test_a_setting_that_a_spreadsheet_has_made_a_fraction_is_the_same(path):
    measure(path)
    runs = Path(results.companion(path, "runs.csv"))
    runs.write_text(runs.read_text().replace(",small,4,", ",small,4.0,"))
    assert read_runs(path)[0]["batch_size"] == "4.0"
    check(path, a_run("TF32"))


def test_a_file_of_the_original_project_is_accepted_and_kept(path):
    os.makedirs(os.path.dirname(path))
    Path(path).write_text("step,no_optimization,TF32\n0,0.47288,0.2\n1,0.4701,0.21\n2,0.47,0.19\n")
    check(path, a_run("BF16"))
    measure(path, "BF16")
    assert columns_of(path) == {"step": ["0", "1", "2"], BASELINE: ["0.47288", "0.4701", "0.47"],
                                "TF32": ["0.2", "0.21", "0.19"], "BF16": ["3.0000", "2.0000", "1.0000"]}


def test_line_endings_and_a_byte_order_mark_of_windows_are_read(path):
    os.makedirs(os.path.dirname(path))
    Path(path).write_bytes(b"\xef\xbb\xbfstep,a\r\n0,1\r\n1,2\r\n2,3\r\n\r\n")
    check(path, a_run(BASELINE))
    assert read_table(path) == {"step": ["0", "1", "2"], "a": ["1", "2", "3"]}


def test_a_reader_with_notes_leaves_out_the_line_that_was_cut(path):
    os.makedirs(os.path.dirname(path))
    notes = []
    Path(path).write_text("step,a\n0,1\n1")
    assert read_table(path, notes) == {"step": ["0"], "a": ["1"]}
    Path(path).write_text("step,a\n0,1\n1,2")
    assert read_table(path, notes) == {"step": ["0", "1"], "a": ["1", "2"]}
    assert "line 3" in notes[0] and "left out" in notes[0]
    assert "may have been cut" in notes[1]


def test_init_makes_the_steps_and_never_touches_what_exists(path):
    assert init(path, 3)
    assert rows_of(path) == [["step"], ["0"], ["1"], ["2"]]
    measure(path)
    before = contents(os.path.dirname(path))
    assert not init(path, 5)
    assert contents(os.path.dirname(path)) == before


def test_steps_alone_fit_any_run(path):
    init(path, 7)
    check(path, a_run(BASELINE))
    measure(path)
    assert columns_of(path)["step"] == ["0", "1", "2"]


# reset and clean

def everything(folder, start):
    """Every file that the tool writes in an experiment's folder, and one that it does not."""
    folder.mkdir(parents=True)
    ours = [start + name for name in (*results.TABLES, "summary.md", *results.PICTURES)]
    ours += [f"{start}results.csv.tmp", f"{start}summary.md.tmp", f"{start}loss_comparison.png.tmp"]
    for name in ours:
        (folder / name).write_text("ours")
    return {str(folder / name) for name in ours}


def clean(prefix):
    return run("-m", "Utils.results", "clean", "--prefix", str(prefix))


def test_clean_deletes_the_files_of_every_experiment(tmp_path):
    ours = everything(tmp_path / "4B_3N_experiment", "4B_3N_")
    ours |= everything(tmp_path / "gpt2_16B_30N_experiment", "16B_30N_")
    done = clean(tmp_path)
    deleted = {line.removeprefix("deleted ") for line in done.stdout.splitlines()}
    folders = {f"{tmp_path}/4B_3N_experiment/", f"{tmp_path}/gpt2_16B_30N_experiment/"}
    assert (done.returncode, done.stderr, deleted) == (0, "", ours | folders)
    assert os.listdir(tmp_path) == []
    assert clean(tmp_path).stdout == "nothing to delete\n"


def test_clean_keeps_what_is_the_users(tmp_path):
    """A prefix like /usr: files of all kinds, some with our names in folders that are not ours."""
    experiment = tmp_path / "4B_3N_experiment"
    everything(experiment, "4B_3N_")
    mine = ["results.csv", "4B_3N_results.csv", "4B_3N_summary.md", "4B_3N_experiment.txt", "bin/python",
            "bin/4B_3N_results.csv", "my_experiment/results.csv", "my_experiment/4B_3N_results.csv",
            "B_N_experiment/B_N_results.csv", "4B_3N_experiments/4B_3N_results.csv",
            "deep/4B_3N_experiment/4B_3N_results.csv", "4B_3N_experiment/notes.txt",
            "4B_3N_experiment/results.csv", "4B_3N_experiment/5B_3N_results.csv",
            "4B_3N_experiment/4B_3N_results.csv.bak", "4B_3N_experiment/4B_3N_notes.md",
            "4B_3N_experiment/sub/4B_3N_results.csv"]
    for name in mine:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    (experiment / "4B_3N_losses.csv").unlink(missing_ok=True)
    (experiment / "4B_3N_losses.csv").mkdir()  # a folder of the user's, though it has our name
    assert clean(tmp_path).returncode == 0
    left = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert left == set(mine)
    assert (experiment / "4B_3N_losses.csv").is_dir()


def test_clean_follows_no_link(tmp_path):
    elsewhere, prefix = tmp_path / "elsewhere", tmp_path / "out"
    kept = everything(elsewhere / "4B_3N_experiment", "4B_3N_")
    everything(prefix / "5B_3N_experiment", "5B_3N_")
    (prefix / "4B_3N_experiment").symlink_to(elsewhere / "4B_3N_experiment")
    linked = prefix / "5B_3N_experiment" / "5B_3N_results.csv"
    linked.unlink()
    linked.symlink_to(elsewhere / "4B_3N_experiment" / "4B_3N_results.csv")
    (prefix / "5B_3N_experiment" / "5B_3N_losses.csv").unlink()
    (prefix / "5B_3N_experiment" / "5B_3N_losses.csv").symlink_to("nowhere")
    assert clean(prefix).returncode == 0
    assert os.listdir(prefix) == ["4B_3N_experiment"]
    assert all(os.path.isfile(name) for name in kept)


@pytest.mark.parametrize("prefix", ["", "  "])
def test_an_empty_prefix_is_not_this_folder(tmp_path, prefix):
    kept = everything(tmp_path / "4B_3N_experiment", "4B_3N_")
    done = run("-c", f"import os; from Utils.results import main; os.chdir({str(tmp_path)!r}); "
               f"main(['clean', '--prefix', {prefix!r}])")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "--prefix" in done.stderr and "empty" in done.stderr
    assert all(os.path.isfile(name) for name in kept)


def test_clean_without_a_prefix_is_refused():
    done = run("-m", "Utils.results", "clean")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "--prefix" in done.stderr


@pytest.mark.parametrize("prefix", ["missing", "file"])
def test_clean_of_what_is_no_folder_deletes_nothing(tmp_path, prefix):
    (tmp_path / "file").write_text("mine")
    done = clean(tmp_path / prefix)
    assert (done.returncode, done.stdout) == (0, "nothing to delete\n")
    assert os.listdir(tmp_path) == ["file"]


def test_reset_deletes_one_experiment(tmp_path, path):
    measure(path)
    kept = everything(tmp_path / "5B_3N_experiment", "5B_3N_")
    done = run("-m", "Utils.results", "reset", "--results_path", path)
    assert done.stdout.count("deleted") == 4
    assert os.listdir(tmp_path) == ["5B_3N_experiment"] and all(map(os.path.isfile, kept))


def test_reset_keeps_a_folder_that_is_not_named_like_an_experiments(tmp_path):
    path = str(tmp_path / "mine" / "results.csv")
    measure(path)
    assert run("-m", "Utils.results", "reset", "--results_path", path).stdout.count("deleted") == 3
    assert os.listdir(tmp_path / "mine") == []


@pytest.mark.parametrize("command", [["reset"], ["init", "--steps", "3"]])
@pytest.mark.parametrize("path", ["", "thesis.docx", "out/"])
def test_reset_and_init_take_only_csv_files(tmp_path, command, path):
    (tmp_path / "thesis.docx").write_text("mine")
    (tmp_path / ".tmp").write_text("mine")
    done = run("-c", f"import os; from Utils.results import main; os.chdir({str(tmp_path)!r}); "
               f"main({[*command, '--results_path', path]!r})")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert ("does not end in .csv" if path else "the name is empty") in done.stderr
    assert sorted(os.listdir(tmp_path)) == [".tmp", "thesis.docx"]


def test_init_takes_only_a_positive_number_of_steps(path):
    done = run("-m", "Utils.results", "init", "--results_path", path, "--steps", "0")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert not os.path.exists(path)


def test_this_module_needs_nothing_but_the_standard_library():
    """`make clean` works before anything is installed."""
    done = run("-S", "-m", "Utils.results", "clean", "--prefix", "nowhere")
    assert (done.returncode, done.stderr) == (0, "")
