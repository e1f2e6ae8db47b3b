"""Two processes on CPUs train as one with their batches together; the slowest one's time counts; they end together."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from Utils import data, hardware, results
from Utils.errors import UserError
from Utils.model import GPT2, PRESETS
from Utils.results import record
from Utils.summary import cells, page, subject, summarize
from Utils.train import Run, stack, train

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TINY = PRESETS["tiny"]
STEPS, BATCH_SIZE = 6, 4
LABELS = ["no_optimization", "TF32", "BF16", "TC", "FA", "FuOp", "8bOp", "BF16+TC+FA+FuOp"]
LAUNCH = [sys.executable, "-m", "Utils.launch", "--standalone", "--nproc-per-node=2"]
FOLDER = "2gpu_tiny_4B_6N_experiment/4B_6N_"


def options(folder, steps=STEPS, *others):
    return ["--steps", str(steps), "--batch_size", str(BATCH_SIZE), "--results_path", str(folder / "results.csv"),
            "--model", "tiny", "--device", "cpu", *others]


def launched(script, arguments, **environment):
    return subprocess.run([*LAUNCH, str(script), *arguments], cwd=ROOT, env=os.environ | environment,
                          capture_output=True, text=True, timeout=200)


def tampered(folder, what):
    """The ended baseline in two processes, each of which, a RANK, does `what` before it makes the batch of `step`."""
    script = folder / "tampered.py"
    script.write_text(f"""
import os, runpy, signal, time
from Utils import data
batch, RANK = data.batch, int(os.environ["RANK"])
def tampered(tokens, step, *others):
    {what}
    return batch(tokens, step, *others)
data.batch = tampered
runpy.run_path({str(ROOT / "no_optimization.py")!r}, run_name="__main__")
""")
    return launched(script, options(folder), PYTHONPATH=str(ROOT))


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def one_process(tokens, *changes):
    """Losses of one process that trains on what both together train on."""
    def batch(step):
        return torch.cat([data.batch(tokens, step, BATCH_SIZE, TINY.block_size, 0, rank) for rank in (0, 1)], dim=1)

    run = Run(GPT2(TINY), batch, torch.device("cpu"))
    stack(run, changes)
    return [loss for _, loss in train(run, range(STEPS))]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """`make all GPUS=2` on this machine's CPU."""
    prefix = tmp_path_factory.mktemp("out")
    make = ["make", "all", "GPUS=2", "DEVICE=cpu", "MODEL=tiny", f"STEPS={STEPS}", f"BATCH_SIZE={BATCH_SIZE}",
            f"PREFIX={prefix}", f"PYTHON={sys.executable}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    return prefix, done


def test_the_whole_comparison_runs_on_two_processes(comparison):
    prefix, done = comparison
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for table in ("results.csv", "losses.csv"):
        rows = read(f"{prefix}/{FOLDER}{table}")
        assert list(rows[0]) == ["step", *(f"2gpu_{label}" for label in LABELS)]
        assert len(rows) == STEPS and all(float(value) > 0 for row in rows for value in list(row.values())[1:])


def test_only_the_first_process_prints(comparison):
    lines = comparison[1].stdout.splitlines()
    for label in LABELS:
        assert sum(line.startswith(f"2gpu_{label}: mean ") for line in lines) == 1


def test_two_processes_lose_as_one_does_on_their_batches_together(comparison, tokens):
    rows = read(f"{comparison[0]}/{FOLDER}losses.csv")
    expected = one_process(tokens)
    limits = dict.fromkeys(LABELS, 0.02) | dict.fromkeys(["no_optimization", "TF32", "TC", "FuOp"], 1e-5)
    for label, limit in limits.items():
        assert [float(row[f"2gpu_{label}"]) for row in rows] == pytest.approx(expected, abs=limit)


def test_tokens_of_all_processes_count(comparison):
    for row in read(f"{comparison[0]}/{FOLDER}runs.csv"):
        assert row["gpus"] == "2" and row["graph_breaks"] in ("", "0")
        tokens = 2 * BATCH_SIZE * TINY.block_size
        assert float(row["tokens_per_second"]) == pytest.approx(tokens / float(row["mean_ms"]) * 1e3, rel=1e-4)


def test_the_step_of_the_slowest_process_is_the_step(tmp_path):
    done = tampered(tmp_path, "time.sleep(0.3 * (RANK == 1 and step == 4))")
    assert done.returncode == 0, done.stderr
    times = [float(row["2gpu_no_optimization"]) for row in read(tmp_path / "results.csv")]
    assert times[3] > 300  # batch 4 is fetched in step 3
    assert times[5] < 200


@pytest.mark.parametrize(("arguments", "words"), [
    (["--data", "nowhere.txt"], "no such file"),
    (["--model", "huge"], "invalid choice"),
    (["--with", "no_optimization", "--with", "brainFloat16", "brainFloat16"], "named twice"),
])
def test_what_all_processes_would_say_is_said_once(tmp_path, arguments, words):
    done = launched("no_optimization.py", [*options(tmp_path), *arguments])
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "results.csv").exists()


def test_a_technique_that_cannot_run_here_keeps_its_status(tmp_path):
    broken = tmp_path / "bitsandbytes"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ModuleNotFoundError('gone', name='bitsandbytes')")
    done = launched("8-bit_optimizer.py", options(tmp_path), PYTHONPATH=str(tmp_path))
    assert done.returncode == 77
    assert len(done.stderr.splitlines()) == 1 and "bitsandbytes is not installed" in done.stderr


@pytest.mark.parametrize("victim", [0, 1])
def test_if_one_process_is_killed_all_end_and_nothing_is_recorded(tmp_path, victim):
    started = time.monotonic()
    done = tampered(tmp_path, f"RANK == {victim} and step == 4 and os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines() == [
        f"process {victim} was killed by SIGKILL, so all were ended; earlier results are as they were"]
    assert time.monotonic() - started < 55  # nobody waits for the dead
    assert not (tmp_path / "results.csv").exists()


def test_one_process_that_fails_alone_is_heard(tmp_path):
    done = tampered(tmp_path, "if RANK == 1 and step == 4: raise MemoryError")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "ran out of memory at BATCH_SIZE=4" in done.stderr
    assert not (tmp_path / "results.csv").exists()


def test_whoever_stops_the_launcher_stops_all(tmp_path):
    process = subprocess.Popen([*LAUNCH, "no_optimization.py", *options(tmp_path, 1_000_000)], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stdout:
        if "step 1 of" in line:
            break
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and said == ""
    assert not (tmp_path / "results.csv").exists()


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="4 processes need a GPU each, torch finds 2"):
        hardware.choose_device("auto", index=1, needed=4)
    assert hardware.choose_device("cpu", index=3, needed=4).type == "cpu"


# What the tables say


def tables(folder, gpus, milliseconds, **facts):
    path = folder / f"{f'{gpus}gpu_' if gpus > 1 else ''}8B_30N_experiment" / "8B_30N_results.csv"
    for technique, ms in milliseconds.items():
        times = [ms * (1 + 0.001 * (step % 3)) for step in range(30)]
        row = {"label": results.column(technique, gpus), "gpus": gpus, "device_name": "GPU", "model": "small",
               "batch_size": 8, **facts}
        record(path, times, [5.0] * 30, row)
    return path


def test_columns_of_several_gpus_are_compared_with_their_own_baseline(tmp_path):
    path = tables(tmp_path, 4, {"TF32": 50, "no_optimization": 100})
    assert list(read(path)[0]) == ["step", "4gpu_no_optimization", "4gpu_TF32"]
    summary = summarize(path)
    assert list(summary.table.index) == ["no_optimization", "TF32"]
    assert summary.table.at["TF32", "speedup"] == pytest.approx(2)
    assert subject(summary).startswith("4 x GPU")
    assert "scaling" not in cells(summary)[0]


def test_scaling_efficiency_is_shown_where_the_run_on_one_gpu_is_there(tmp_path):
    tables(tmp_path, 1, {"no_optimization": 90, "TF32": 47.5, "BF16": 40})
    summary = summarize(tables(tmp_path, 4, {"no_optimization": 100, "TF32": 50, "FA": 70}))
    assert summary.table["scaling"].to_dict() == pytest.approx(
        {"no_optimization": 0.9, "TF32": 0.95, "FA": float("nan")}, nan_ok=True)
    header, *rows = cells(summary)
    assert [row[header.index("scaling")] for row in rows] == ["90.0%", "95.0%", ""]
    assert "**scaling**" in page(summary)


def test_another_experiment_on_one_gpu_is_no_measure_of_scaling(tmp_path):
    tables(tmp_path, 1, {"no_optimization": 90}, torch="2.11")
    summary = summarize(tables(tmp_path, 4, {"no_optimization": 100}, torch="2.13"))
    assert summary.table["scaling"].isna().all()
    assert any("differs in torch" in note for note in summary.notes)


def test_a_column_of_several_gpus_among_others_is_a_label_like_any(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("step,no_optimization,4gpu_no_optimization\n" + "".join(f"{i},4,2\n" for i in range(30)))
    assert list(summarize(path).table.index) == ["no_optimization", "4gpu_no_optimization"]


def test_runs_on_different_numbers_of_gpus_are_not_mixed(tmp_path):
    path = tables(tmp_path, 4, {"no_optimization": 100})
    run = {"label": "2gpu_TF32", "steps": 30, "gpus": 2, "device_name": "GPU", "model": "small", "batch_size": 8}
    with pytest.raises(UserError, match="gpus = 4, this run has 2"):
        results.check(path, run)


# What the environment says


def test_a_process_that_torchrun_did_not_number_is_alone(tmp_path):
    done = subprocess.run([sys.executable, "plots.py", "--results_path", tmp_path / "results.csv"], cwd=ROOT,
                          env=os.environ | {"TORCHELASTIC_RUN_ID": "x"}, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "does not exist" in done.stderr
    code = "from Utils import distributed; print(distributed.LAUNCHED, distributed.RANK, distributed.SIZE)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"TORCHELASTIC_RUN_ID": "x"},
                          capture_output=True, text=True)
    assert done.stdout.split() == ["False", "0", "1"]


def test_processes_that_do_not_find_each_other_say_what_to_look_at(tmp_path):
    done = launched(ROOT / "no_optimization.py", options(tmp_path), GLOO_SOCKET_IFNAME="nowhere0")
    line, = done.stderr.splitlines()
    assert done.returncode == 1 and "nowhere0" in line and "GLOO_SOCKET_IFNAME" in line and "one GPU" in line
