"""On a GPU: every technique does what it says, in the memory of a 4 GB laptop card, and all together pay off.

The runs are made once, by the scripts themselves, and the tests read what they wrote.
"""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

from tests import clock_overhead
from Utils import data, distributed, scripts
from Utils.fingerprint import covered, fingerprint, kernels, matmul_error
from Utils.model import GPT2, PRESETS
from Utils.train import Run, train

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent
COMBINED = ["fused_optimizer", "--with", "brainFloat16", "torch_compile", "flash_attention"]
RUNS = {
    "no_optimization": ["no_optimization"],
    "TF32": ["tensorFloat32"],
    "BF16": ["brainFloat16"],
    "TC": ["torch_compile"],
    "FA": ["flash_attention"],
    "FuOp": ["fused_optimizer"],
    "8bOp": ["8-bit_optimizer"],
    "BF16+TC+FA+FuOp": COMBINED,
}
LAPTOP = 3.4 * 2**30   # bytes that a 4 GB card has left beside its CUDA context and a desktop
RESERVED = 3100        # MiB that a script may take of them at BATCH_SIZE=256
CAPPED = f"""
import runpy, sys, torch
torch.cuda.set_per_process_memory_fraction({LAPTOP} / torch.cuda.get_device_properties(0).total_memory)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

each_run = pytest.mark.parametrize("label", RUNS)
needs_ampere = pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
                                  reason="needs compute capability 8.0 (Ampere) or newer")


def command(name, *more, path, steps=12, python=()):
    return subprocess.run(
        [sys.executable, *python, str(ROOT / f"{name}.py"), "--steps", str(steps), "--batch_size", "256", "--device",
         "cuda", "--results_path", str(path), *more], capture_output=True, text=True, timeout=400, cwd=ROOT)


class Experiment:
    """The eight runs of `small` at batch 256: what each printed, and what is in the tables."""

    def __init__(self, folder):
        self.path = folder / "256B_12N_experiment" / "256B_12N_results.csv"
        self.runs = {label: command(*words, path=self.path) for label, words in RUNS.items()}

    def run(self, label):
        """The finished process; a technique that says that it cannot run here is skipped, with its reason."""
        done = self.runs[label]
        if done.returncode == 77:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        return done

    def row(self, label):
        """What runs.csv says of a run, as a dict of text."""
        self.run(label)
        with open(str(self.path).replace("results.csv", "runs.csv"), newline="") as file:
            return next(row for row in csv.DictReader(file) if row["label"] == label)

    def column(self, label, name):
        """A run's column of results.csv or losses.csv, as numbers."""
        self.run(label)
        with open(str(self.path).replace("results.csv", name), newline="") as file:
            return np.array([float(row[label]) for row in csv.DictReader(file)])


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return Experiment(tmp_path_factory.mktemp("out"))


@pytest.fixture
def a_run(tokens):
    """Builds a run of `small` in this process; names of scripts are stacked on it."""
    device, config = torch.device("cuda", torch.cuda.current_device()), PRESETS["small"]

    def build(*names, batch_size=256):
        def batch(step):
            return data.batch(tokens, step, batch_size, config.block_size, seed=0)

        run = Run(GPT2(config), batch, device)
        for name in names:
            scripts.load(name).optimize(run)
        return run

    yield build
    torch.compiler.reset()  # recorded graphs hold memory
    torch.cuda.empty_cache()


# Each run ends well


@each_run
def test_a_run_ends_well_and_fills_its_row(label, experiment):
    done, row = experiment.run(label), experiment.row(label)
    assert "Traceback" not in done.stderr
    assert row["device"] == "cuda" and row["valid"] == "True"
    for name in ("kernels_per_step", "launches_per_step", "busy_ms", "gpu_busy_percent", "model_tflops", "mfu",
                 "peak_tflops", "peak_allocated_mib", "peak_reserved_mib", "optimizer_kernels", "attention_kernel"):
        assert row[name], name
    assert 0 < float(row["mfu"]) < 1
    assert 0 < float(row["gpu_busy_percent"]) <= 100
    assert float(row["busy_ms"]) < 1.1 * float(row["median_ms"])


@needs_ampere
@each_run
def test_no_technique_is_doubted(label, experiment):
    assert experiment.row(label)["warnings"] == ""


@each_run
def test_the_model_and_the_data_are_the_same_for_all(label, experiment):
    row, baseline = experiment.row(label), experiment.row("no_optimization")
    for name in ("data", "seed", "parameters", "batch_size", "learning_rate", "device_name", "vocabulary"):
        assert row[name] == baseline[name]


# Precision


@pytest.mark.parametrize("label, tolerance", (
    ("TF32", 5e-3), ("TC", 2e-3), ("FuOp", 2e-3), ("FA", 2e-2), ("BF16", 2e-2), ("8bOp", 5e-2),
    ("BF16+TC+FA+FuOp", 2e-2)))
def test_a_technique_learns_what_the_baseline_learns(label, tolerance, experiment):
    losses, baseline = (experiment.column(name, "losses.csv") for name in (label, "no_optimization"))
    assert np.abs(losses - baseline).max() < tolerance
    assert baseline[-1] < baseline[0] - 0.5


def test_the_gpu_learns_what_a_cpu_learns(experiment, tokens):
    config = PRESETS["small"]
    run = Run(GPT2(config), lambda step: data.batch(tokens, step, 256, config.block_size, 0), torch.device("cpu"))
    on_cpu = [loss for _, loss in train(run, range(2))]
    assert experiment.column("no_optimization", "losses.csv")[:2] == pytest.approx(on_cpu, abs=1e-3)


@needs_ampere
def test_tf32_rounds_products_and_nothing_does_before():
    device = torch.device("cuda")
    assert matmul_error(device) < 1e-6
    scripts.load("tensorFloat32").optimize(None)
    assert 1e-4 < matmul_error(device) < 1e-3


@needs_ampere
def test_only_tf32_rounds_float32_products(experiment):
    rounded = {label for label in RUNS if experiment.runs[label].returncode == 0
               and float(experiment.row(label)["matmul_error"]) > 1e-5}
    assert rounded == {"TF32"}
    assert experiment.row("TF32")["matmul_precision"] == "high"


def test_bf16_computes_logits_in_bfloat16(experiment):
    assert experiment.row("BF16")["logits_dtype"] == "bfloat16"
    assert experiment.row("BF16+TC+FA+FuOp")["logits_dtype"] == "bfloat16"
    assert experiment.row("no_optimization")["logits_dtype"] == experiment.row("FA")["logits_dtype"] == "float32"


@pytest.mark.parametrize("names, tolerance", (((), 1e-5), (clock_overhead.COMBINED, 1e-2)),
                         ids=("baseline", "combined"))
def test_a_model_in_distributed_data_parallel_learns_what_it_learns_alone(names, tolerance, a_run, monkeypatch):
    """NCCL with one process, whose gradients are averaged with nobody's: GPUS=1 leaves that out, so SIZE says 2."""
    alone = [loss for _, loss in train(a_run(*names), range(6))]
    torch.compiler.reset()  # compiled code that does not look at its model must not meet another one
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = a_run(*names)
        monkeypatch.setattr(distributed, "SIZE", 2)
        distributed.share(run)
        assert "DistributedDataParallel" in repr(run.forward)
        assert [loss for _, loss in train(run, range(6))] == pytest.approx(alone, abs=tolerance)
    finally:
        dist.destroy_process_group()


# Kernels


@needs_ampere
def test_a_flash_kernel_runs_in_attention(experiment):
    for label in ("FA", "BF16+TC+FA+FuOp"):
        assert "flash" in experiment.row(label)["attention_kernel"]
    for label in ("no_optimization", "BF16", "FuOp"):
        assert experiment.row(label)["attention_kernel"] == "written out"


@pytest.mark.parametrize("label", ("TC", "BF16+TC+FA+FuOp"))
def test_torch_compile_fuses_kernels_and_replays_them_from_graphs(label, experiment):
    row, baseline = experiment.row(label), experiment.row("no_optimization")
    assert float(row["cuda_graphs"]) >= 2  # forward and backward
    assert row["graph_breaks"] == "0"
    assert float(row["kernels_per_step"]) < float(baseline["kernels_per_step"])
    assert float(row["launches_per_step"]) < 0.2 * float(baseline["launches_per_step"])
    assert float(baseline["cuda_graphs"]) == 0 and baseline["graph_breaks"] == ""


def test_the_fused_optimizer_needs_fewer_kernels(experiment):
    fused, plain = (float(experiment.row(label)["optimizer_kernels"]) for label in ("FuOp", "no_optimization"))
    assert 0 < fused < plain / 2


def test_the_8_bit_optimizer_remembers_a_quarter(experiment):
    row, baseline = experiment.row("8bOp"), experiment.row("no_optimization")
    assert row["optimizer_state_dtypes"].startswith("uint8:")
    assert baseline["optimizer_state_dtypes"].startswith("float32:")
    assert float(row["optimizer_state_mib"]) < 0.3 * float(baseline["optimizer_state_mib"])
    assert float(baseline["optimizer_state_mib"]) == pytest.approx(8 * int(baseline["parameters"]) / 2**20, rel=1e-3)


def traced(steps, folder):
    """Kernels and busy milliseconds a step by PyTorch's Chrome trace, which says of each event what it is."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        n = sum(1 for _ in steps)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "kernel"]
    return len(spans) / n, covered(spans) / 1000 / n


@pytest.mark.parametrize("names", (("fused_optimizer",), ("torch_compile",)))
def test_kernels_are_counted_as_in_pytorchs_own_trace(names, a_run, tmp_path):
    run = a_run(*names)
    list(train(run, range(6)))
    seen = kernels(train(run, range(6, 9)))
    count, busy = traced(train(run, range(9, 12)), tmp_path)
    assert seen["kernels_per_step"] == pytest.approx(count, abs=1)
    assert seen["busy_ms"] == pytest.approx(busy, rel=0.1)


def test_looking_at_a_step_takes_seconds_and_no_more(a_run):
    run = a_run()
    list(train(run, range(3)))
    start = time.perf_counter()
    seen = fingerprint(run, train(run, range(3, 6)))
    assert time.perf_counter() - start < 5
    assert seen["kernels_per_step"] > 100


# Memory and speed


@each_run
def test_a_script_fits_into_a_4_gb_laptop_card(label, experiment):
    row = experiment.row(label)
    assert 0 < float(row["peak_allocated_mib"]) <= float(row["peak_reserved_mib"]) <= RESERVED


@pytest.mark.parametrize("words", (["no_optimization"], COMBINED), ids=("baseline", "combined"))
def test_a_process_that_may_take_no_more_than_a_laptop_has_trains_to_the_end(words, experiment, tmp_path):
    """`experiment` comes first: it has compiled what the combined run needs."""
    done = command(*words, path=tmp_path / "256B_6N_results.csv", steps=6, python=("-c", CAPPED))
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "256B_6N_results.csv").read_text().splitlines()) == 7


@needs_ampere
def test_all_together_are_at_least_three_times_as_fast_as_the_baseline(experiment):
    baseline, combined = (np.median(experiment.column(label, "results.csv")[5:])
                          for label in ("no_optimization", "BF16+TC+FA+FuOp"))
    assert baseline / combined >= 3
    assert combined < min(np.median(experiment.column(label, "results.csv")[5:]) for label in ("TF32", "BF16", "TC"))


def test_the_clock_waits_for_the_gpu(a_run):
    """A step's time is that of its kernels at least: a clock that did not wait would see the launches alone."""
    run = a_run()
    list(train(run, range(5)))
    measured = np.median([milliseconds for milliseconds, _ in train(run, range(5, 15))])
    assert measured > 0.9 * kernels(train(run, range(15, 18)))["busy_ms"]
