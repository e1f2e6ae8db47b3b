"""The clock of a step; what a run's times say about speed, memory and use of the GPU."""

import gc
import math
import statistics
import time
from contextlib import contextmanager
from types import SimpleNamespace

from Utils.results import warmup

import torch


@contextmanager
def clock(device):
    """Time the block: yields an object whose `milliseconds` holds, after the block, the wall time of all its work.

    The GPU is idle when the clock starts and idle again when it stops; garbage collection waits until then.
    """
    elapsed = SimpleNamespace(milliseconds=float("nan"))
    collecting = gc.isenabled()
    gc.disable()
    try:
        synchronize(device)
        start = time.perf_counter()
        yield elapsed
        synchronize(device)
        elapsed.milliseconds = (time.perf_counter() - start) * 1e3
    finally:
        if collecting:
            gc.enable()


def synchronize(device):
    """Wait until the GPU has done all it was given. A CPU is always done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device):
    """Most memory (MiB) that PyTorch's tensors, and PyTorch's allocator, ever held on the GPU. Empty on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "peak_allocated_mib": torch.cuda.max_memory_allocated(device) / 2**20,
        "peak_reserved_mib": torch.cuda.max_memory_reserved(device) / 2**20,
    }


def timing(milliseconds, losses, tokens):
    """Statistics of a run's step times (ms) after warm-up, and its speed where a step trains on `tokens` tokens."""
    steady = milliseconds[warmup(len(milliseconds)):]
    mean = sum(steady) / len(steady)
    return {
        "first_step_ms": milliseconds[0],
        "mean_ms": mean,
        "median_ms": statistics.median(steady),
        "tokens_per_second": tokens / mean * 1e3,
        "final_loss": losses[-1],
        "valid": all(map(math.isfinite, losses)),
    }


def model_flops(config, n_parameters):
    """Floating-point operations that one token costs, forward and backward: 6 N + 12 L C T.

    Two for each multiply-add, and twice the forward pass again for the backward pass: 6 for each of the N parameters
    that multiply (position embeddings do not; the tied matrix does so once, as `lm_head`), and 12 C T in each layer for
    the two products of attention, as if the causal half were not left out.
    Source   https://arxiv.org/abs/2204.02311   PaLM, appendix B
    """
    N = n_parameters - config.block_size * config.n_embd
    return 6 * N + 12 * config.n_layer * config.n_embd * config.block_size


def utilization(config, n_parameters, row, peak_tflops):
    """How well a run used its GPU, from its row of runs.csv and the card's matrix peak. Empty on a CPU.

    `peak_tflops` is in TFLOP/s. `gpu_busy_percent` is the share of a step in which a kernel ran; `mfu`, the model FLOPs
    utilization, the share of the peak (of all GPUs that trained) that the model's own operations reached. The peak is
    of bfloat16 products, so float32 runs stay far below 1.
    """
    if not peak_tflops:
        return {}
    model_tflops = model_flops(config, n_parameters) * row["tokens_per_second"] / 1e12
    return {
        "gpu_busy_percent": min(100.0, 100 * row["busy_ms"] / row["median_ms"]),
        "model_tflops": model_tflops,
        "peak_tflops": peak_tflops,
        "mfu": model_tflops / (peak_tflops * row.get("gpus", 1)),
    }
