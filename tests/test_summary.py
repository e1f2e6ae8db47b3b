"""What the page says is so: intervals hold what they promise, nothing is dropped in silence, what is odd is said."""

import io
import math
from pathlib import Path

from Utils.errors import UserError
from Utils.results import BASELINE, companion, record
from Utils.summary import _compare, as_markdown, as_text, bootstrap_means, cells, page, ratio, subject, summarize

import numpy as np
import pandas as pd
import pytest

STEPS = 65


def times(mean, steps=STEPS, seed=0, noise=0.01):
    return mean * (1 + noise * np.random.default_rng(seed).standard_normal(steps))


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "4B_65N_results.csv")


@pytest.fixture
def measured(path):
    """Add runs to an experiment as the scripts do: measured(TF32=[times], BF16=...). Returns its summary."""
    def add(runs=None, losses=None, round=0, rounds=1, row=None, **more):
        for label, milliseconds in ((runs or {}) | more).items():
            loss = (losses or {}).get(label, np.linspace(8, 4, len(milliseconds)))
            facts = {"label": label, "first_step_ms": milliseconds[0]} | (row or {}).get(label, {})
            record(path, milliseconds, loss, facts, round, rounds)
        return summarize(path)
    return add


def write(path, **columns):
    """A results.csv of any columns."""
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def said(summary, *words):
    """How many warnings hold all the words."""
    return sum(all(word in text for word in words) for text in summary.warnings)


# Speedups and their intervals

def test_a_speedup_is_the_ratio_of_the_means_after_warmup(measured):
    base, fast = times(20), times(5, seed=1)
    base[:5], fast[:5] = 1000, 2000
    row = measured({BASELINE: base, "TF32": fast}).table.loc["TF32"]
    assert row["speedup"] == pytest.approx(base[5:].mean() / fast[5:].mean(), rel=1e-4)
    assert row["median_speedup"] == pytest.approx(np.median(base[5:]) / np.median(fast[5:]), rel=1e-4)
    assert row["low"] < row["speedup"] < row["high"]
    assert (row["n"], row["verdict"], row["first_step_ms"]) == (60, "faster", 2000)


def test_the_same_file_gives_the_same_page(path, measured):
    summary = measured({BASELINE: times(20), "TF32": times(15, seed=1), "BF16": times(9, seed=2)})
    assert page(summary) == page(summarize(path))


def test_a_labels_interval_does_not_depend_on_the_other_labels(measured):
    alone = measured({BASELINE: times(20), "TF32": times(15, seed=1)}).table.loc["TF32"]
    assert measured({"BF16": times(9, seed=2)}).table.loc["TF32"].equals(alone)


def coverage(steps_of, experiments=1000):
    """The share of experiments whose 95 % interval holds the true ratio, which is random in each of them."""
    generator, hits = np.random.default_rng(0), 0
    for _ in range(experiments):
        truth, steps = generator.choice([1, 1.02, 2.5]), generator.choice([45, 145, 300])
        base, other = (mean * steps_of(generator, steps) for mean in (25 * truth, 25))
        row = _compare({BASELINE: [base], "TF32": [other]}, set()).loc["TF32"]
        hits += row["low"] <= truth <= row["high"]
    return hits / experiments


def autocorrelated(generator, steps, share, noise=0.03):
    """Times around 1 of which each keeps a `share` of how far the one before it was off: an AR(1) process."""
    shocks, values = generator.standard_normal(steps + 50), [0.0]
    for shock in shocks:
        values.append(share * values[-1] + math.sqrt(1 - share**2) * shock)
    return 1 + noise * np.array(values[-steps:])


def test_the_interval_holds_the_truth_in_95_percent_of_independent_experiments():
    def skewed(generator, steps):
        return 0.9 + generator.gamma(4, 0.1 / 4, steps)

    assert 0.93 <= coverage(skewed) <= 0.97


def test_the_interval_holds_the_truth_in_95_percent_of_experiments_whose_steps_resemble_their_neighbours():
    assert 0.93 <= coverage(lambda generator, steps: autocorrelated(generator, steps, 0.25)) <= 0.97


def test_of_steps_that_resemble_their_neighbours_very_much_the_interval_promises_a_little_too_much():
    """Drawing steps one by one would hold the truth in less than 0.8 of these."""
    assert 0.88 <= coverage(lambda generator, steps: autocorrelated(generator, steps, 0.5), 400) <= 0.96


def test_rounds_are_drawn_within_themselves():
    """How far rounds lie apart is no chance within a run: it must not widen the interval."""
    near = bootstrap_means([times(10), times(10, seed=1)], "TF32")
    far = bootstrap_means([times(10), times(20, seed=1)], "TF32")
    assert far.std() < 3 * near.std()


def test_very_long_runs_are_drawn_in_longer_blocks():
    many = times(10, steps=100_000)
    assert bootstrap_means([many], "TF32").std() == pytest.approx(0.1 / math.sqrt(100_000), rel=0.1)


# Verdicts

def test_an_interval_that_holds_1_reads_no_measurable_difference(measured):
    row = measured({BASELINE: times(20, noise=0.1), "FuOp": times(20.1, seed=1, noise=0.1)}).table.loc["FuOp"]
    assert row["low"] < 1 < row["high"]
    assert row["verdict"] == "no measurable difference"


@pytest.mark.parametrize(("mean", "verdict"), [
    (10, "faster"), (30, "slower"), (19.7, "faster"), (20.3, "slower"), (19.9, "no measurable difference"),
    (20.1, "no measurable difference")])  # 0.5 %: as much as two processes that do the same
def test_a_difference_gets_its_word(measured, mean, verdict):
    summary = measured({BASELINE: times(20, noise=0.001), "TF32": times(mean, seed=1, noise=0.001)})
    assert summary.table.at["TF32", "verdict"] == verdict
    assert summary.table.at[BASELINE, "verdict"] == "baseline"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_whose_loss_is_no_number_is_not_compared(measured, loss):
    losses = np.linspace(8, 4, STEPS)
    losses[7] = loss
    row = measured({BASELINE: times(20), "BF16": times(5)}, losses={"BF16": losses}).table.loc["BF16"]
    assert row["verdict"] == "invalid: loss became NaN"
    assert math.isnan(row["speedup"]) and math.isnan(row["low"]) and row["mean_ms"] == pytest.approx(5, rel=0.01)


@pytest.mark.parametrize("valid", [False, "FALSE"])
def test_a_run_that_says_it_is_invalid_is_not_compared(measured, valid):
    summary = measured({BASELINE: times(20), "BF16": times(5)}, row={"BF16": {"valid": valid}})
    assert math.isnan(summary.table.at["BF16", "speedup"])


def test_nothing_is_compared_with_an_invalid_baseline(measured):
    summary = measured({BASELINE: times(20), "BF16": times(5)}, losses={BASELINE: [math.nan] * STEPS})
    assert list(summary.table["verdict"]) == ["invalid: loss became NaN",
                                              "not compared: the baseline's loss became NaN"]


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 1), (5, 4), (6, 5)])
def test_of_very_few_steps_one_is_measured_and_there_is_no_interval(measured, steps, warmup):
    base, fast = np.arange(1.0, steps + 1) * 10, np.arange(1.0, steps + 1)
    summary = measured({BASELINE: base, "TF32": fast})
    row = summary.table.loc["TF32"]
    assert (summary.warmup, row["n"], row["mean_ms"], row["speedup"]) == (warmup, 1, steps, 10)
    assert (row["verdict"], math.isnan(row["low"])) == ("one step: no interval", True)
    assert said(summary, "Only 1 step left after warm-up") == 1
    assert "95 % interval" not in cells(summary)[0]
    page(summary)


def test_two_measured_steps_have_an_interval(measured):
    row = measured({BASELINE: np.full(7, 20.0), "TF32": np.full(7, 10.0)}).table.loc["TF32"]
    assert (row["n"], row["low"], row["high"], row["verdict"]) == (2, 2, 2, "faster")


# Warnings

def test_a_steady_experiment_has_no_warnings(measured):
    summary = measured({BASELINE: times(20), "TF32": times(15, seed=1)})
    assert (summary.warnings, summary.notes) == ([], [])
    assert "## Warnings\n\nNone." in page(summary)


def test_slow_steps_are_counted_and_never_dropped(measured):
    slow = times(15, seed=1)
    slow[[3, 30, 40]] = 150  # the first of them in the warm-up
    summary = measured({BASELINE: times(20), "TF32": slow})
    assert list(np.flatnonzero(summary.slow["TF32"])) == [30, 40]
    assert (summary.table.at["TF32", "slow"], summary.table.at["TF32", "n"]) == (2, 60)
    assert summary.table.at["TF32", "mean_ms"] == pytest.approx(slow[5:].mean(), rel=1e-4)
    assert said(summary, "TF32: 2 of 60 steps were much slower") == 1


def test_a_slow_step_of_a_very_even_run_must_be_five_percent_slow(measured):
    even = np.full(STEPS, 10.0)
    even[30:32] = 10.4, 10.6
    assert list(np.flatnonzero(measured({BASELINE: even}).slow[BASELINE])) == [31]


@pytest.mark.parametrize(("end", "word"), [(1.08, "more"), (0.92, "less")])
def test_a_drift_is_a_warning(measured, end, word):
    drifting = times(15, seed=1) * np.linspace(1, end, STEPS)
    summary = measured({BASELINE: times(20), "TF32": drifting})
    assert said(summary, "TF32: the last third", f"% {word} time than the first") == 1
    assert said(summary, BASELINE) == 0


FACTS = {
    "throttled": ({"throttled": "heat, power limit"}, "slowed itself down (heat, power limit)"),
    "memory": ({"peak_reserved_mib": 3800, "device_memory_mib": 3904}, "used 3,800 of the 3,904 MiB"),
    "others": ({"other_gpu_processes": 1}, "1 other process used the GPU"),
    "more others": ({"other_gpu_processes": 2}, "2 other processes used the GPU"),
    "its own": ({"warnings": "two graph breaks"}, "two graph breaks"),
}
HARMLESS = {
    "throttled": {"throttled": "no"},
    "memory": {"peak_reserved_mib": 3700, "device_memory_mib": 3904},
    "others": {"other_gpu_processes": 0},
    "more others": {"other_gpu_processes": None},
    "its own": {"warnings": ""},
}


@pytest.mark.parametrize("what", FACTS)
def test_what_disturbed_a_run_is_a_warning(measured, what):
    facts, words = FACTS[what]
    summary = measured({BASELINE: times(20), "TF32": times(15)}, row={BASELINE: HARMLESS[what], "TF32": facts})
    assert (len(summary.warnings), said(summary, "TF32: ", words)) == (1, 1)
    assert words in page(summary)


@pytest.mark.parametrize(("clock", "warned"), [(1600, 1), (1670, 0)])
def test_clocks_that_differ_by_more_than_five_percent_are_a_warning(measured, clock, warned):
    summary = measured({BASELINE: times(20), "TF32": times(15)},
                       row={BASELINE: {"sm_clock_mhz": 1700}, "TF32": {"sm_clock_mhz": clock}})
    assert said(summary, "TF32: the GPU's clock ran at 1600 MHz", f"1700 for {BASELINE}") == warned
    assert len(summary.warnings) == warned


def test_times_and_a_row_of_different_runs_are_a_warning(measured):
    summary = measured({BASELINE: times(20), "TF32": times(15)}, row={"TF32": {"first_step_ms": 99}})
    assert said(summary, "TF32", "two different runs") == 1


# Rounds

def test_rounds_are_pooled_and_each_ones_warmup_is_left_out(measured):
    for round in range(3):
        base, fast = times(20, seed=round), times(10, seed=9 + round)
        base[:5] = fast[:5] = 5000
        summary = measured({BASELINE: base, "TF32": fast}, round=round, rounds=3)
    assert (summary.steps, summary.rounds, summary.table.at["TF32", "n"]) == (65, 3, 180)
    assert summary.table.at["TF32", "speedup"] == pytest.approx(2, rel=0.01)
    assert "65 steps x 3 rounds" in subject(summary)
    assert summary.warnings == []


def test_a_file_of_rounds_that_was_cut_still_leaves_out_each_ones_warmup(path, measured):
    for round in range(3):
        base = times(20, seed=round)
        base[:5] = 5000
        measured({BASELINE: base}, round=round, rounds=3)
    with open(path, "rb+") as file:
        file.truncate(file.seek(0, io.SEEK_END) - 30)
    summary = summarize(path)
    assert 175 < summary.table.at[BASELINE, "n"] < 180
    assert summary.table.at[BASELINE, "mean_ms"] == pytest.approx(20, rel=0.01)
    assert "middle of a line" in summary.notes[0]


def test_rounds_that_lie_apart_are_a_warning(measured):
    for round, mean in enumerate((10, 11)):
        summary = measured({BASELINE: times(20), "TF32": times(mean)}, round=round, rounds=2)
    assert said(summary, "TF32: one round took 10% more time") == 1


def test_a_round_that_is_missing_is_not_made_up_but_said(measured):
    measured({BASELINE: times(20), "TF32": times(10)}, round=0, rounds=2)
    summary = measured({BASELINE: times(20, seed=1)}, round=1, rounds=2)
    assert list(summary.table["n"]) == [120, 60]
    assert summary.table.at["TF32", "speedup"] == pytest.approx(2, rel=0.01)
    assert summary.warnings == ["TF32: only 1 of 2 rounds measured. Run it again to have them all."]


# Files of all kinds

def test_a_file_without_companions_is_enough(path):
    write(path, step=range(STEPS), no_optimization=times(472.88), TF32=times(159.66))
    summary = summarize(path)
    assert summary.table.at["TF32", "speedup"] == pytest.approx(2.96, abs=0.02)
    assert summary.losses is None and not len(summary.runs)
    assert "Not known: there is no runs.csv" in page(summary)
    assert subject(summary) == "65 steps"


def test_columns_and_rows_may_come_in_any_order(path):
    base, fast = times(20), times(10, seed=1)
    write(path, TF32=fast[::-1], step=np.arange(STEPS)[::-1], no_optimization=base[::-1])
    assert summarize(path).table.at["TF32", "speedup"] == pytest.approx(base[5:].mean() / fast[5:].mean())


def test_columns_that_hold_no_times_are_left_out_by_name(path):
    write(path, step=range(STEPS), no_optimization=times(20), comment=["fine"] * STEPS, TF32=times(10),
          **{"Unnamed: 0": range(STEPS), "minus": times(-3), "zero": np.zeros(STEPS)})
    summary = summarize(path)
    assert list(summary.table.index) == [BASELINE, "TF32"]
    assert summary.notes == [f"{path}: left out, because they hold no times: comment, Unnamed: 0, minus, zero."]
    assert "left out" in page(summary)


def test_missing_times_are_skipped_and_empty_columns_are_not_there(path):
    fast = times(10)
    fast[10:20] = math.nan
    write(path, step=range(STEPS), no_optimization=times(20), TF32=fast, BF16=[math.nan] * STEPS)
    summary = summarize(path)
    assert list(summary.table["n"]) == [60, 50]
    assert summary.table.at["TF32", "mean_ms"] == pytest.approx(np.nanmean(fast[5:]))


def test_missing_rows_are_no_steps(path):
    step = np.delete(np.arange(STEPS), range(3, 13))
    write(path, step=step, no_optimization=times(20)[step], TF32=times(10)[step])
    assert summarize(path).table.at["TF32", "n"] == 52


def test_a_technique_with_nothing_after_warmup_is_not_measured(path):
    late = [10.0] * 5 + [math.nan] * (STEPS - 5)
    write(path, step=range(STEPS), no_optimization=times(20), TF32=late)
    summary = summarize(path)
    assert summary.table.at["TF32", "verdict"] == "not measured"
    assert summary.warnings == []
    assert page(summary)


def test_a_runs_csv_with_semicolons_is_left_out_and_that_is_said(path, measured):
    measured({BASELINE: times(20), "TF32": times(10)})
    runs = Path(companion(path, "runs.csv"))
    runs.write_text(runs.read_text().replace(",", ";"))
    summary = summarize(path)
    assert not len(summary.runs) and summary.table.at["TF32", "speedup"] == pytest.approx(2, rel=0.01)
    note, = summary.notes
    assert note.startswith(f"{runs}: left out") and "commas" in note and note in page(summary)


def test_a_row_of_runs_csv_without_a_column_is_ignored(path, measured):
    measured({BASELINE: times(20)}, row={BASELINE: {"model": "small"}})
    with open(companion(path, "runs.csv"), "a") as file:
        file.write(",".join(["TF32", "65", "7", "medium", "0", "1"]) + "\n")
    assert set(summarize(path).runs["label"]) == {BASELINE}


@pytest.mark.parametrize("name", ["runs.csv", "losses.csv"])
def test_either_companion_may_be_missing(path, measured, tmp_path, name):
    measured({BASELINE: times(20), "TF32": times(10)})
    (tmp_path / f"4B_65N_{name}").unlink()
    assert summarize(path).table.at["TF32", "verdict"] == "faster"
    assert page(summarize(path))


def test_losses_without_the_baselines_are_not_compared(path, measured):
    summary = measured({BASELINE: times(20), "TF32": times(10)})
    assert summary.table.at["TF32", "loss_difference"] == 0
    losses = pd.read_csv(companion(path, "losses.csv"))
    losses.drop(columns=BASELINE).to_csv(companion(path, "losses.csv"), index=False)
    assert summarize(path).losses is None


def test_the_largest_difference_of_the_losses_is_told(measured):
    losses = np.linspace(8, 4, STEPS)
    losses[9] += 0.25
    summary = measured({BASELINE: times(20), "TF32": times(10)}, losses={"TF32": losses})
    assert summary.table.at["TF32", "loss_difference"] == pytest.approx(0.25)


BAD = {
    "no baseline": ("step,TF32\n0,1\n", "no measurement named 'no_optimization'"),
    "steps only": ("step\n0\n1\n", "no measurement named 'no_optimization'"),
    "a baseline without times": ("step,no_optimization,TF32\n0,,1\n", "no measurement named 'no_optimization'"),
    "a baseline of warm-up only": ("step,no_optimization,TF32\n0,3,1\n1,,2\n", "holds no step after warm-up"),
    "no rows": ("step,no_optimization\n", "holds no rows"),
    "empty": ("", "is empty"),
    "no step": ("no_optimization\n3\n", "no column named 'step'"),
    "a step twice": ("step,no_optimization\n0,3\n0,3\n", "does not count 0, 1, 2"),
    "half a step": ("step,no_optimization\n0.5,3\n", "does not count 0, 1, 2"),
    "a step before the first": ("step,no_optimization\n-1,3\n", "does not count 0, 1, 2"),
    "a step without end": ("step,no_optimization\n1e300,3\n", "does not count 0, 1, 2"),
    "a step without number": ("step,no_optimization\n0,3\n,3\n", "does not count 0, 1, 2"),
    "text among numbers": ("step,no_optimization,TF32\n0,3,1\n1,3,fast\n", "line 3, column 'TF32': 'fast'"),
    "a baseline of text": ("step,no_optimization\n0,slow\n", "column 'no_optimization': 'slow' is not a number"),
    "a time of nothing": ("step,no_optimization\n0,0\n", "column 'no_optimization': 0 is no time"),
    "a time before time": ("step,no_optimization\n0,-2\n", "column 'no_optimization': -2 is no time"),
    "a time without end": ("step,no_optimization\n0,inf\n", "column 'no_optimization': inf is no time"),
    "two columns of one name": ("step,no_optimization,no_optimization\n0,1,2\n", "two columns"),
    "a field too few": ("step,no_optimization\n0,1\n1\n", "line 3: 1 fields instead of 2"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_summarized_is_refused_in_one_line(path, what):
    text, message = BAD[what]
    with open(path, "w") as file:
        file.write(text)
    with pytest.raises(UserError) as caught:
        summarize(path)
    assert message in str(caught.value) and path in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_does_not_exist_is_refused_with_the_command_that_makes_it(path):
    with pytest.raises(UserError, match="does not exist: .*make all"):
        summarize(path)


# The page

def test_the_page_tells_what_was_measured_on_what(measured):
    row = {"model": "small", "parameters": 8_690_000, "batch_size": 256, "block_size": 64, "device": "cuda",
           "device_name": "NVIDIA H200", "gpus": 2, "seed": 0, "torch": "2.13.0"}
    facts = {BASELINE: row | {"matmul_error": 3e-7}, "TF32": row | {"matmul_error": 3e-4, "torch": "2.14"}}
    summary = measured({BASELINE: times(20), "TF32": times(15)}, row=facts)
    title = "2 x NVIDIA H200 · small (8.69 M parameters) · batch 256 x 64 tokens · 65 steps"
    text = page(summary)
    assert text.startswith(f"# {title}\n") and subject(summary) == title
    assert "| TF32 | 1.33x |" in text
    assert "| TF32 | 0.0003 |" in text
    assert "- torch: 2.13.0 (no_optimization); 2.14 (TF32)" in text
    assert "first 5 steps" in " ".join(text.split())
    assert "CPU" not in text


def test_times_of_a_cpu_are_called_so(measured):
    assert "They say nothing about a GPU" in page(measured({BASELINE: times(20)}, row={BASELINE: {"device": "cpu"}}))


def test_a_label_with_a_bar_stays_in_its_cell():
    assert as_markdown([["a"], ["b|c\nd"]]) == "| a |\n| --- |\n| b\\|c d |\n"


def test_a_wide_table_goes_on_below():
    text = as_text([["technique", "x" * 60, "y" * 60], ["TF32", "1", "2"]], width=100)
    assert [line.split()[0] for line in text.splitlines() if line] == ["technique", "TF32"] * 2
    assert max(map(len, text.splitlines())) <= 100


def test_what_is_very_slow_is_not_nothing():
    assert [ratio(value) for value in (6.0412, 1, 0.1, 0.0021)] == ["6.04x", "1.00x", "0.10x", "0.0021x"]
