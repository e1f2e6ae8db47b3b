"""The clock, what is computed from its times, and what a person is told of them."""

import gc
import io
import math
import time
from types import SimpleNamespace

from Utils.console import Progress, duration, report
from Utils.fingerprint import covered
from Utils.measure import clock, model_flops, peak_memory, timing, utilization
from Utils.model import GPT2, PRESETS, Config
from Utils.train import known_peak

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

CPU = torch.device("cpu")


# The clock


def test_the_clock_measures_the_block_and_nothing_else():
    time.sleep(0.05)
    with clock(CPU) as elapsed:
        assert math.isnan(elapsed.milliseconds)  # not known yet
        time.sleep(0.02)
    measured = elapsed.milliseconds
    time.sleep(0.05)
    assert elapsed.milliseconds == measured
    assert 20 <= measured < 70


def test_garbage_is_not_collected_while_the_clock_runs():
    assert gc.isenabled()
    with clock(CPU):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failing_block_leaves_garbage_collection_on():
    with pytest.raises(ZeroDivisionError), clock(CPU):
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_garbage_collection_that_was_off_stays_off():
    gc.disable()
    try:
        with clock(CPU):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_gpu_is_idle_when_the_clock_is_read(monkeypatch):
    happened, read = [], time.perf_counter
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: happened.append("synchronize"))
    monkeypatch.setattr(time, "perf_counter", lambda: happened.append("read") or read())
    with clock(SimpleNamespace(type="cuda")):
        happened.append("block")
    assert happened == ["synchronize", "read", "block", "synchronize", "read"]


def test_a_cpu_has_no_gpu_memory():
    assert peak_memory(CPU) == {}


# Statistics


@given(st.lists(st.floats(0.01, 1e5), min_size=1, max_size=40), st.integers(1, 10**6))
def test_statistics_are_numpys_without_the_first_five_steps(milliseconds, tokens):
    steady = np.array(milliseconds[min(5, len(milliseconds) - 1):])
    losses = [8.0] * (len(milliseconds) - 1) + [7.5]
    row = timing(milliseconds, losses, tokens)
    assert row["first_step_ms"] == milliseconds[0]
    assert row["mean_ms"] == pytest.approx(steady.mean())
    assert row["median_ms"] == pytest.approx(np.median(steady))
    assert row["tokens_per_second"] == pytest.approx(tokens * len(steady) / (steady.sum() / 1000))
    assert row["final_loss"] == 7.5
    assert row["valid"] is True


@pytest.mark.parametrize("loss", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("step", (0, 6, 9))
def test_one_loss_that_is_no_number_makes_the_run_invalid(loss, step):
    losses = [8.0] * 10
    losses[step] = loss
    assert timing([1.0] * 10, losses, 1)["valid"] is False


# Utilization


def flops_of_matrices(config):
    """FLOPs of the matrix products of one token, forward and backward, counted line by line."""
    L, _, C, T, V = config
    layer = 2 * C * 3 * C    # c_attn: a multiply and an add for each weight
    layer += 2 * C * T       # q k^T: with T keys (the causal half is counted too)
    layer += 2 * T * C       # weights v
    layer += 2 * C * C       # c_proj
    layer += 2 * C * 4 * C   # c_fc
    layer += 2 * 4 * C * C   # its c_proj
    forward = L * layer + 2 * C * V
    return 3 * forward       # the backward pass multiplies twice: for the input's gradient and for the weight's


@pytest.mark.parametrize("name", PRESETS)
def test_model_flops_are_those_of_the_matrix_products(name):
    config = PRESETS[name]
    L, _, C, _, _ = config
    with torch.device("meta"):
        n_parameters = GPT2(config).n_parameters
    vectors = L * (2 * 2 * C + 3 * C + C + 4 * C + C) + 2 * C  # biases and layer norms, which 6 N counts along
    assert model_flops(config, n_parameters) == flops_of_matrices(config) + 6 * vectors
    assert 6 * vectors < 0.01 * flops_of_matrices(config)


def test_model_flops_are_those_that_pytorch_counts():
    config, B = Config(n_layer=2, n_head=4, n_embd=64, block_size=16, vocab_size=512), 3
    model, x = GPT2(config), torch.zeros(B, config.block_size, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(x, x).backward()
    assert counter.get_total_flops() == flops_of_matrices(config) * B * config.block_size
    assert model_flops(config, model.n_parameters) == pytest.approx(flops_of_matrices(config), rel=0.02)


ROW = {"tokens_per_second": 1e6, "busy_ms": 6.0, "median_ms": 8.0, "mean_ms": 9.0}


def test_utilization_is_a_share_of_the_steps_time_and_of_the_cards_peak():
    config, n_parameters = PRESETS["small"], 8_689_536
    row = utilization(config, n_parameters, ROW, 500.0)
    assert row["gpu_busy_percent"] == pytest.approx(75)
    assert row["model_tflops"] == pytest.approx(model_flops(config, n_parameters) * 1e6 / 1e12)
    assert row["mfu"] == pytest.approx(row["model_tflops"] / 500)
    assert row["peak_tflops"] == 500


def test_a_gpu_is_never_busier_than_all_the_time():
    assert utilization(PRESETS["tiny"], 10**6, ROW | {"busy_ms": 8.5}, 1.0)["gpu_busy_percent"] == 100


def test_utilization_is_left_empty_on_a_cpu():
    assert utilization(PRESETS["tiny"], 10**6, {"tokens_per_second": 1e6, "median_ms": 8.0}, None) == {}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=12))
def test_time_that_kernels_share_counts_once(intervals):
    seconds = {second for start, end in intervals for second in range(start, end)}
    assert covered(iter(intervals)) == len(seconds)


# What is shown while a run goes on


class Terminal(io.StringIO):
    def isatty(self):
        return True


def progress(stream, steps, fail=False, **values):
    values = {"milliseconds": 12.345, "loss": 7.65432} | values
    with Progress("BF16+TC", steps, stream) as bar:
        for step in range(steps):
            if fail and step == 1:
                raise KeyboardInterrupt
            bar.update(values["milliseconds"], values["loss"])
    return stream.getvalue()


def test_a_terminal_sees_one_line_that_is_written_over(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = progress(Terminal(), 20)
    assert shown.endswith("\n") and shown.count("\n") == 1
    lines = shown.rstrip("\n").split("\r")[1:]
    assert len(lines) == 21  # one before the first step, which may take a minute
    assert "BF16+TC" in lines[0]
    for step, line in enumerate(lines[1:], 1):
        assert f"{step:>2}/20" in line and "12.3" in line and "7.654" in line
    assert [line.count("#") for line in lines[1:]] == [24 * step // 20 for step in range(1, 21)]


@pytest.mark.parametrize("columns", (20, 40, 60))
def test_a_narrow_terminal_gets_no_second_line(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = progress(Terminal(), 5).rstrip("\n").split("\r")[1:]
    assert {len(line) for line in lines} == {columns - 1}  # each covers the one before


def test_what_comes_after_an_interruption_begins_on_a_new_line():
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt):
        progress(stream, 5, fail=True)
    assert stream.getvalue().endswith("\n")


@pytest.mark.parametrize("steps", (1, 3, 10, 37, 150, 1000))
def test_a_pipe_gets_about_ten_plain_lines(steps):
    shown = progress(io.StringIO(), steps)
    lines = shown.splitlines()
    assert "\r" not in shown and "\033" not in shown
    assert 2 <= len(lines) <= 12
    assert f"1/{steps}" in lines[1] and f"{steps}/{steps}" in lines[-1]  # the first step, and the last
    assert len(lines) == 1 + steps or steps >= 10


def test_every_line_is_there_at_once_for_whoever_watches_a_pipe():
    flushed = []

    class Pipe(io.StringIO):
        def flush(self):
            flushed.append(self.getvalue())

    progress(Pipe(), 3)
    assert [text.count("\n") for text in flushed][:4] == [1, 2, 3, 4]


@pytest.mark.parametrize("milliseconds, text", ((4.281, "4.28 ms"), (364.0, "364.00 ms"), (31_240.0, "31.2 s")))
def test_durations_are_written_for_people(milliseconds, text):
    assert duration(milliseconds) == text


# The line at the end


def a_row(**changes):
    return {"label": "BF16", "round": 0, "mean_ms": 8.0, "median_ms": 7.5, "first_step_ms": 12_345.0, "valid": True,
            "final_loss": 6.54321} | changes


EARLIER = [
    {"label": "TF32", "round": "0", "mean_ms": "10"},
    {"label": "no_optimization", "round": "0", "mean_ms": "20"},
    {"label": "no_optimization", "round": "1", "mean_ms": "32"},
]


def test_the_report_says_what_was_measured():
    line = report(a_row(peak_reserved_mib=2816.4), EARLIER)
    assert line.startswith("BF16: ") and "\n" not in line
    for text in ("8.00 ms", "7.50 ms", "12.3 s", "2,816 MiB", "6.5432", "2.50x"):
        assert text in line


def test_the_report_compares_with_the_baseline_of_the_same_round():
    assert "4.00x" in report(a_row(round=1), EARLIER)
    assert "x the" not in report(a_row(round=2), EARLIER)


def test_the_report_compares_nothing_where_there_is_nothing_to_compare():
    for line in (report(a_row(), []), report(a_row(), EARLIER[:1]), report(a_row(label="no_optimization"), EARLIER),
                 report(a_row(valid=False), EARLIER), report(a_row(), [EARLIER[1] | {"valid": "False"}])):
        assert "x the" not in line and "MiB" not in line


@pytest.mark.parametrize("edited", [{"mean_ms": ""}, {"mean_ms": "5,03"}, {"mean_ms": "nan"}, {"mean_ms": None}])
def test_the_report_compares_nothing_with_what_is_no_time(edited):
    assert "x the" not in report(a_row(), [EARLIER[1] | edited])


def test_a_row_without_a_round_is_of_the_first_one():
    line = report(a_row(), [{"label": "no_optimization", "mean_ms": "20"}])
    assert "2.50x" in line


def test_a_matrix_peak_that_is_no_number_is_measured_again():
    rows = [{"device_name": "GPU", "peak_tflops": text} for text in ("", "783,5", "nan")]
    assert known_peak(rows, {"device_name": "GPU"}) is None
    assert known_peak([*rows, {"device_name": "GPU", "peak_tflops": "783.5"}], {"device_name": "GPU"}) == 783.5
