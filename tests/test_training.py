"""The loop trains as a loop written by hand does; scripts stack in any order; a run that fails leaves no trace."""

import copy
import csv
import itertools
import math
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from Utils import data, scripts
from Utils.errors import CannotRunHere, UserError
from Utils.model import GPT2, PRESETS
from Utils.train import LEARNING_RATE, Run, stack, train

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
TINY = PRESETS["tiny"]
COMBINED = ["fused_optimizer", "--with", "brainFloat16", "torch_compile", "flash_attention"]
LABELS = ["no_optimization", "TF32", "BF16", "TC", "FA", "FuOp", "8bOp", "BF16+TC+FA+FuOp"]


@pytest.fixture
def a_run(tokens):
    """Builds a run of the tiny model on real text; names of scripts are stacked on it."""
    def build(*names, seed=0, batch_size=4, **settings):
        def batch(step):
            return data.batch(tokens, step, batch_size, TINY.block_size, seed)

        run = Run(GPT2(TINY, seed=seed), batch, CPU, **settings)
        stack(run, [scripts.load(name) for name in names])
        return run

    return build


def losses_of(run, steps):
    return [loss for _, loss in train(run, steps)]


# The loop


def test_each_step_of_the_range_gives_its_time_and_its_loss(a_run):
    run, asked = a_run(), []
    batch = run.batch
    run.batch = lambda step: asked.append(step) or batch(step)
    results = list(train(run, range(3, 7)))
    assert asked == [3, 4, 5, 6, 7]  # each while the one before is trained on
    assert all(0.1 < milliseconds < 60_000 for milliseconds, _ in results)
    assert all(isinstance(loss, float) and 7 < loss < 9 for _, loss in results)


def test_a_step_is_trained_only_when_it_is_asked_for(a_run):
    run = a_run()
    before = copy.deepcopy(run.model.state_dict())
    steps = train(run, range(2))
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
    next(steps)
    assert not torch.equal(before["lm_head.weight"], run.model.lm_head.weight)


def test_losses_are_those_of_a_loop_written_by_hand(a_run):
    run = a_run()
    model, batch = GPT2(TINY, seed=0), run.batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    expected = []
    for step in range(8):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses_of(run, range(8)) == expected


def test_losses_are_those_of_float64_arithmetic(a_run):
    """AdamW written out, gradients that are not carried over from step to step, and everything in float64."""
    run, model = a_run(), GPT2(TINY, seed=0).double()
    parameters = list(model.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    expected = []
    for step in range(8):
        x, y = run.batch(step)
        probabilities = model(x).softmax(dim=-1)                     # (B, T, V)
        loss = -probabilities.gather(-1, y[..., None]).log().mean()
        expected.append(loss.item())
        with torch.no_grad():
            for p, g, (m, v) in zip(parameters, torch.autograd.grad(loss, parameters), moments, strict=True):
                m.lerp_(g, 0.1)
                v.lerp_(g * g, 0.001)
                p *= 1 - LEARNING_RATE * 0.01
                p -= LEARNING_RATE * (m / (1 - 0.9**(step + 1))) / ((v / (1 - 0.999**(step + 1))).sqrt() + 1e-8)
    assert losses_of(run, range(8)) == pytest.approx(expected, abs=2e-5)


def test_loss_falls_on_real_text(a_run):
    losses = losses_of(a_run(batch_size=16, learning_rate=3e-3), range(20))
    assert losses[0] == pytest.approx(math.log(TINY.vocab_size), abs=0.1)
    assert np.mean(losses[-5:]) < losses[0] - 0.8


def test_the_same_seed_gives_the_same_losses_bit_for_bit_and_another_does_not(a_run):
    first = losses_of(a_run(), range(4))
    torch.manual_seed(99)  # nothing is left to PyTorch's own generator
    np.random.seed(99)  # noqa: NPY002
    assert losses_of(a_run(), range(4)) == first
    assert not set(losses_of(a_run(seed=1), range(4))) & set(first)


def test_a_batch_depends_on_its_step_alone(a_run):
    forwards, backwards = a_run(), a_run("brainFloat16", "fused_optimizer")
    seen = {step: forwards.batch(step) for step in range(5)}
    list(train(backwards, range(2)))
    for step in reversed(range(5)):
        assert all(torch.equal(a, b) for a, b in zip(seen[step], backwards.batch(step), strict=True))
    assert not torch.equal(seen[0][0], seen[1][0])


def test_optimizers_take_their_rate_from_the_run(a_run):
    for name in ("no_optimization", "fused_optimizer"):
        assert a_run(name, learning_rate=0.125).optimizer.param_groups[0]["lr"] == 0.125
    assert a_run().optimizer.param_groups[0]["lr"] == LEARNING_RATE == 3e-4


# Stacks


def test_the_order_of_a_stack_changes_nothing(a_run):
    names = ("brainFloat16", "flash_attention", "fused_optimizer")
    losses = [losses_of(a_run(*order), range(3)) for order in itertools.permutations(names)]
    assert all(other == losses[0] for other in losses)
    parts = [losses_of(a_run(*names[:n]), range(3)) for n in range(3)]
    assert len(set(map(tuple, parts))) == 3  # autocast and the other attention do something


@pytest.mark.slow  # with an empty cache; it compiles twice
def test_compiling_before_or_after_the_others_changes_nothing(a_run):
    names = ("torch_compile", "brainFloat16", "flash_attention")
    assert losses_of(a_run(*names), range(3)) == losses_of(a_run(*reversed(names)), range(3))


def test_a_stack_is_each_scripts_change(a_run):
    run, alone = a_run("flash_attention", "brainFloat16", "fused_optimizer"), a_run()
    assert run.model.attention is not alone.model.attention
    assert run.forward.__wrapped__ == run.model.forward  # autocast around it
    assert run.optimizer.param_groups[0]["fused"] and not alone.optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("names", (("8-bit_optimizer", "fused_optimizer"), ("fused_optimizer", "8-bit_optimizer"),
                                   ("fused_optimizer", "brainFloat16", "8-bit_optimizer")))
def test_two_optimizers_are_refused_and_both_are_named(names, a_run):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UserError, match="optimizer") as caught:
        a_run(*names)
    assert "FuOp" in str(caught.value) and "8bOp" in str(caught.value)


def test_two_attentions_are_refused(a_run):
    with pytest.raises(UserError, match="attention"):
        a_run("flash_attention", "flash_attention")


# The command line, in this process


@pytest.fixture
def path(tmp_path):
    return tmp_path / "4B_6N_experiment" / "4B_6N_results.csv"


@pytest.fixture
def command(path, monkeypatch):
    """Runs a script as `python SCRIPT ...` would; what it raises comes here."""
    def call(name, *more, steps=6):
        settings = ["--steps", steps, "--batch_size", 4, "--results_path", path, "--model", "tiny", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", [name, *map(str, settings), *more])
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")

    return call


def contents(path):
    return {file.name: file.read_bytes() for file in path.parent.iterdir()}


def table(path, name="results.csv"):
    """{column: [text]}, read by the standard library alone."""
    with open(str(path).removesuffix("results.csv") + name, newline="") as file:
        header, *rows = csv.reader(file)
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def test_a_run_writes_its_times_its_losses_and_its_row(command, path, capsys):
    command("no_optimization")
    assert sorted(contents(path)) == ["4B_6N_losses.csv", "4B_6N_results.csv", "4B_6N_runs.csv"]
    assert table(path)["step"] == list("012345")
    (row,) = zip(*table(path, "runs.csv").values(), strict=True)
    row = dict(zip(table(path, "runs.csv"), row, strict=True))
    assert row.items() >= {"label": "no_optimization", "model": "tiny", "batch_size": "4", "steps": "6", "seed": "0",
                           "device": "cpu", "parameters": "364288", "valid": "True", "logits_dtype": "float32",
                           "matmul_precision": "highest", "torch": torch.__version__}.items()
    milliseconds = list(map(float, table(path)["no_optimization"]))
    assert float(row["mean_ms"]) == pytest.approx(milliseconds[5], rel=1e-3)  # the first five are warm-up
    assert float(row["first_step_ms"]) == pytest.approx(milliseconds[0], rel=1e-3)
    assert "CPU" in (out := capsys.readouterr().out) and "6/6" in out


def test_losses_that_are_stored_are_those_of_the_loop(command, path, a_run):
    command("no_optimization")
    stored = list(map(float, table(path, "losses.csv")["no_optimization"]))
    assert stored == pytest.approx(losses_of(a_run(), range(6)), abs=1e-8)


def test_number_of_steps_is_another_name_of_steps(path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["no_optimization.py", "--number_of_steps", "2", "--batch_size", "1", "--model",
                                      "tiny", "--device", "cpu", "--results_path", str(path)])
    runpy.run_path(str(ROOT / "no_optimization.py"), run_name="__main__")
    assert table(path)["step"] == ["0", "1"]


def test_the_seed_of_the_command_line_reaches_weights_and_batches(command, path, a_run):
    command("no_optimization", "--seed", "7")
    stored = list(map(float, table(path, "losses.csv")["no_optimization"]))
    assert stored == pytest.approx(losses_of(a_run(seed=7), range(6)), abs=1e-8)


def test_ones_own_text_can_be_trained_on(command, path, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    command("no_optimization", "--data", str(text))
    assert table(path, "runs.csv")["text"] == [str(text)]


@pytest.mark.parametrize("more", (["--with", "fused_optimizer"], ["--with", "brainFloat16", "brainFloat16.py"],
                                  ["--with", "brainFloat16", "fused_optimizer.py", "flash_attention"]))
def test_a_script_that_is_named_twice_is_refused(more, command, path):
    with pytest.raises(UserError, match="twice"):
        command("fused_optimizer", *more)
    assert not path.parent.exists()


def test_two_optimizers_are_refused_before_anything_is_written(command, path):
    pytest.importorskip("bitsandbytes")
    command("no_optimization")
    before = contents(path)
    with pytest.raises(UserError, match=r"8bOp and FuOp"):
        command("fused_optimizer", "--with", "8-bit_optimizer")
    assert contents(path) == before


def test_a_stack_with_a_script_that_cannot_run_here_ends_with_77(command, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(CannotRunHere, match="bitsandbytes") as caught:
        command("brainFloat16", "--with", "8-bit_optimizer")
    assert caught.value.status == 77
    assert not path.parent.exists()


def test_running_a_script_again_replaces_its_column_and_no_other(command, path):
    for name in ("no_optimization", "fused_optimizer"):
        command(name)
    before = table(path)
    command("fused_optimizer")
    after = table(path)
    assert list(after) == ["step", "no_optimization", "FuOp"]
    assert after["no_optimization"] == before["no_optimization"] and after["FuOp"] != before["FuOp"]
    assert table(path, "runs.csv")["label"] == ["no_optimization", "FuOp"]


def test_rounds_are_pooled_below_each_other(command, path, capsys):
    for round in ("1", "2"):
        for name in ("no_optimization", "fused_optimizer"):
            command(name, "--rounds", "2", "--round", round, steps=3)
    assert table(path)["step"] == list("012345")
    assert all(table(path)["FuOp"])
    losses = table(path, "losses.csv")["FuOp"]
    assert losses[:3] == losses[3:]  # the same work again
    assert capsys.readouterr().out.count("x the baseline's speed") == 2


# A run that does not end well


class Broken(Exception):
    pass


def test_a_run_that_fails_changes_no_file(command, path, monkeypatch):
    command("no_optimization")
    before, taken = contents(path), itertools.count()

    def step(self, closure=None):
        if next(taken) == 4:
            raise Broken

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    for name in ("no_optimization", "fused_optimizer"):
        taken = itertools.count()
        with pytest.raises(Broken):
            command(name)
        assert contents(path) == before


def test_a_run_whose_fingerprint_fails_changes_no_file(command, path, monkeypatch):
    command("no_optimization")
    before = contents(path)

    def fail(*_):
        raise Broken

    monkeypatch.setattr("Utils.fingerprint.matmul_error", fail)
    with pytest.raises(Broken):
        command("tensorFloat32")
    assert contents(path) == before


@pytest.mark.parametrize("text, words", ((b"", "empty"), (b"too short", "33"), (b"\xff\xfe\x00", "UTF-8"),
                                         (None, "no such file")))
def test_a_text_that_cannot_be_trained_on_is_refused_and_no_file_changes(text, words, command, path, tmp_path):
    command("no_optimization")
    before, file = contents(path), tmp_path / "text.txt"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(UserError, match=words):
        command("fused_optimizer", "--data", str(file))
    assert contents(path) == before


def test_settings_that_do_not_match_the_folder_are_refused_before_training(command, path, monkeypatch):
    command("no_optimization")
    before = contents(path)
    monkeypatch.setattr("Utils.model.GPT2.__init__", lambda *_, **__: pytest.fail("began to train"))
    for more in (["--seed", "1"], ["--batch_size", "5"], ["--steps", "7"]):
        with pytest.raises(UserError):
            command("fused_optimizer", *more)
    assert contents(path) == before


def test_losses_that_are_no_numbers_mark_the_run_invalid(command, path, monkeypatch, capsys):
    command("no_optimization")
    monkeypatch.setattr(Run.__init__, "__defaults__", (1e30,))  # a learning rate under which every weight explodes
    command("fused_optimizer")
    runs = table(path, "runs.csv")
    assert runs["valid"] == ["True", "False"]
    assert "NaN" in runs["warnings"][1] and runs["warnings"][0] == ""
    out = capsys.readouterr().out
    assert "FuOp: warning: " in out and "x the baseline's speed" not in out


# As a user runs them


def run(name, *more, path):
    return subprocess.run(
        [sys.executable, ROOT / f"{name}.py", "--steps", "6", "--batch_size", "4", "--results_path", path, "--model",
         "tiny", "--device", "cpu", *more], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """The results.csv of the seven scripts and the combined stack, with what each printed."""
    path, printed = tmp_path_factory.mktemp("out") / "4B_6N_experiment" / "4B_6N_results.csv", {}
    for label, (name, *more) in zip(LABELS, [*([name] for name in scripts.NAMES), COMBINED], strict=True):
        done = run(name, *more, path=path)
        assert done.returncode == 0, f"{label}: {done.stderr}"
        printed[label] = done
    return path, printed


def test_all_scripts_and_their_stack_add_up_to_one_experiment(experiment):
    path, _ = experiment
    for name in ("results.csv", "losses.csv"):
        assert list(table(path, name)) == ["step", *LABELS]
        assert {len(column) for column in table(path, name).values()} == {6}
        assert all(float(text) > 0 for label in LABELS for text in table(path, name)[label])
    assert table(path, "runs.csv")["label"] == LABELS
    assert sorted(contents(path)) == ["4B_6N_losses.csv", "4B_6N_results.csv", "4B_6N_runs.csv"]


@pytest.mark.parametrize("label, tolerance", (
    ("TF32", 1e-3), ("TC", 1e-3), ("FuOp", 1e-3), ("FA", 2e-2), ("BF16", 2e-2), ("8bOp", 2e-2),
    ("BF16+TC+FA+FuOp", 2e-2)))
def test_a_technique_learns_what_the_baseline_learns(label, tolerance, experiment):
    losses = {label: np.array(column, float) for label, column in table(experiment[0], "losses.csv").items()}
    assert np.abs(losses[label] - losses["no_optimization"]).max() < tolerance
    assert losses["no_optimization"][5] < losses["no_optimization"][0]


def test_every_row_says_what_its_technique_changed(experiment):
    rows = table(experiment[0], "runs.csv")
    rows = {label: {name: column[i] for name, column in rows.items()} for i, label in enumerate(LABELS)}
    baseline = rows.pop("no_optimization")
    same = ("model", "batch_size", "steps", "seed", "data", "vocabulary", "learning_rate", "parameters", "device_name")
    for label, row in rows.items():
        assert {name: row[name] for name in same} == {name: baseline[name] for name in same}, label
    columns = ("matmul_precision", "logits_dtype", "graph_breaks", "optimizer_state_dtypes")
    changed = {label: {name for name in columns if row[name] != baseline[name]} for label, row in rows.items()}
    assert changed == {
        "TF32": {"matmul_precision"}, "BF16": {"logits_dtype"}, "TC": {"graph_breaks"}, "FA": set(), "FuOp": set(),
        "8bOp": {"optimizer_state_dtypes"}, "BF16+TC+FA+FuOp": {"logits_dtype", "graph_breaks"}}
    assert rows["TC"]["graph_breaks"] == rows["BF16+TC+FA+FuOp"]["graph_breaks"] == "0"
    assert rows["BF16+TC+FA+FuOp"]["scripts"] == "brainFloat16 torch_compile flash_attention fused_optimizer"


def test_gpu_columns_are_left_empty_on_a_cpu(experiment):
    rows = table(experiment[0], "runs.csv")
    for name in ("attention_kernel", "kernels_per_step", "peak_reserved_mib", "mfu", "gpu_busy_percent"):
        assert not any(rows.get(name, ())), name


def test_a_run_ends_with_one_line_that_compares_it_with_the_baseline(experiment):
    _, printed = experiment
    for label, done in printed.items():
        last = done.stdout.splitlines()[-1]
        assert last.startswith(f"{label}: ") and ("x the baseline's speed" in last) == (label != "no_optimization")
        assert "Traceback" not in done.stderr


def test_an_interrupted_run_ends_at_once_and_changes_no_file(experiment, tmp_path):
    path = tmp_path / "out" / "4B_90000N_results.csv"
    path.parent.mkdir()
    (path.parent / "4B_90000N_summary.md").write_text("of an earlier day")
    before = contents(path)
    process = subprocess.Popen(
        [sys.executable, ROOT / "fused_optimizer.py", "--steps", "90000", "--batch_size", "4", "--results_path", path,
         "--model", "tiny", "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        assert any("1/90000" in line for line in process.stdout)  # it trains
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "Traceback" not in error and len(error.splitlines()) == 1 and "interrupted" in error
    assert contents(path) == before
