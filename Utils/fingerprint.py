"""The fingerprint of a run: what its technique really changed in the step, seen in the process that ran it."""

import re
import sys

from Utils.model import attention

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def fingerprint(run, steps):
    """The same entries for every script, as a dict. On a CPU those that speak of GPU kernels are left out.

    `steps` is an iterator of further training steps, which are profiled here and not timed.
    """
    seen = {
        "matmul_precision": torch.get_float32_matmul_precision(),
        "matmul_error": matmul_error(run.device),
        "logits_dtype": logits_dtype(run),
        "graph_breaks": graph_breaks(),
        "compile_cache": compile_cache(),
        **optimizer_state(run.optimizer),
    }
    if run.device.type == "cuda":
        seen |= kernels(steps)
    return seen


def matmul_error(device, n=1024):
    """Relative error ||C - C64|| / ||C64|| of one float32 product of random n x n matrices against float64.

    About 3e-7 in float32 and 3e-4 in TF32.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, n, generator=generator).to(device) for _ in range(2))
    exact = a.double() @ b.double()
    return ((a @ b - exact).norm() / exact.norm()).item()


@torch.no_grad()
def logits_dtype(run):
    """In which dtype the forward call of the run computes its logits. Compiled code is bypassed, not recompiled."""
    x, _ = run.batch(0)
    with torch.compiler.set_stance("force_eager"):
        return str(run.forward(x[:1].to(run.device)).dtype).removeprefix("torch.")


def _counters(group):
    """TorchDynamo's own counts; empty if nothing was compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters[group] if dynamo else {}


def compiled():
    """Whether torch.compile compiled anything in this process."""
    return _counters("stats").get("unique_graphs", 0) > 0


def graph_breaks():
    """How often torch.compile had to fall back to Python in the middle; None if nothing was compiled."""
    return sum(_counters("graph_break").values()) if compiled() else None


def compile_cache():
    """"cold" if TorchInductor compiled, "warm" if it found all graphs in its cache, None if nothing was compiled."""
    if not compiled():
        return None
    return "cold" if _counters("inductor").get("fxgraph_cache_miss") else "warm"


def optimizer_state(optimizer):
    """Size (MiB) of what the optimizer remembers, and how many MiB of it in which dtype."""
    sizes = {}
    for state in optimizer.state.values():
        for tensor in state.values():
            if torch.is_tensor(tensor):
                dtype = str(tensor.dtype).removeprefix("torch.")
                sizes[dtype] = sizes.get(dtype, 0) + tensor.numel() * tensor.element_size() / 2**20
    listed = sorted(sizes.items(), key=lambda item: -item[1])
    return {
        "optimizer_state_mib": sum(sizes.values()),
        "optimizer_state_dtypes": " ".join(f"{dtype}:{mib:.2f}" for dtype, mib in listed),
    }


ATTENTION = re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)
NO_KERNEL = ("Memcpy", "Memset")
LAUNCH = re.compile(r"cu(da)?LaunchKernel")


def kernels(steps):
    """Profile `steps`; count their kernels and launches, and the time (ms) in which a kernel ran, all per step.

    Python launches a kernel, or with one launch a whole CUDA graph of them.
    The profiler slows Python down, not the kernels, so their time may be compared with that of unprofiled steps.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        n = sum(1 for _ in steps)
    events = profiler.events()
    on_cpu = [e for e in events if e.device_type == DeviceType.CPU]
    on_gpu = [e for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith(NO_KERNEL)
              and not e.is_user_annotation]
    optimizer = [e.time_range for e in on_cpu if e.name.startswith("Optimizer.step")]
    launches = [e.time_range.start for e in on_cpu if LAUNCH.match(e.name)]
    replays = sum(e.name.startswith("cudaGraphLaunch") for e in on_cpu)
    names = {_short(e.name) for e in on_gpu if ATTENTION.search(e.name)}
    return {
        "kernels_per_step": len(on_gpu) / n,
        "launches_per_step": (len(launches) + replays) / n,
        "cuda_graphs": replays / n,
        "attention_kernel": " ".join(sorted(names)) or "written out",
        "optimizer_kernels": sum(r.start <= t <= r.end for r in optimizer for t in launches) / n,
        "busy_ms": covered((e.time_range.start, e.time_range.end) for e in on_gpu) / 1e3 / n,
    }


def _short(kernel):
    """A kernel's name without the return type, the template arguments and the parameters of its C++ signature."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0].split("::")[-1]


def covered(intervals):
    """Length of the union of (start, end) intervals, in their unit: what overlaps counts once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def doubts(run, row):
    """Sentences for what was asked of PyTorch and did not happen, from the run and its row of runs.csv."""
    found = []
    exact = row["matmul_error"] < 1e-5
    if row["matmul_precision"] != "highest" and exact:
        found.append("TF32 was asked for, but float32 products are as exact as without it: this device has no TF32")
    if row["matmul_precision"] == "highest" and not exact:
        found.append("float32 products are rounded as in TF32 though nothing asked for it: unset "
                     "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE")
    if run.model.attention is not attention and "flash" not in row.get("attention_kernel", "flash"):
        found.append(f"no flash kernel ran in attention, but {row['attention_kernel']}")
    if "8bit" in type(run.optimizer).__name__ and "int8" not in row["optimizer_state_dtypes"]:
        found.append("an 8-bit optimizer was asked for, but its moments are "
                     f"{row['optimizer_state_dtypes'].split(':')[0]}: the model's tensors are too small")
    if "torch_compile" in row["scripts"].split() and not compiled():
        found.append("torch.compile was asked for and compiled nothing: unset TORCHDYNAMO_DISABLE and "
                     "TORCH_COMPILE_DISABLE")
    if row["graph_breaks"]:
        found.append(f"torch.compile went back to Python {row['graph_breaks']} times (graph breaks)")
    if compiled() and row.get("cuda_graphs") == 0:
        found.append("torch.compile recorded no CUDA graph, so Python launches every kernel")
    if not row["valid"]:
        found.append("the loss became infinite or NaN, so the speed of this run is not compared")
    return found
