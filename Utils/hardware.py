"""The machine a run is made on: which device, what it is called, how it feels, how fast it can multiply."""

import os
import platform
import time
import warnings
from importlib import metadata

from Utils.errors import UserError

import torch

NVIDIA_DRIVER = "/proc/driver/nvidia/version"
CPU_INSTEAD = "or choose the CPU with --device cpu (make: DEVICE=cpu)"


def choose_device(name="auto", index=0, needed=1):
    """torch.device for "auto" (a GPU where there is one), "cuda" or "cpu"; of `needed` GPUs the one at `index`.

    Raises UserError where there is no GPU, or not as many.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    with warnings.catch_warnings(record=True) as said:  # that the driver is too old, for instance
        warnings.simplefilter("always")
        if not torch.cuda.is_available():
            raise _no_gpu(said)
        if needed > torch.cuda.device_count():
            raise UserError(f"{needed} processes need a GPU each, torch finds {torch.cuda.device_count()}: ask for "
                            f"fewer (make: GPUS=...), {CPU_INSTEAD}")
        try:
            torch.cuda.set_device(index)
            torch.zeros(1, device="cuda").item()  # a GPU that is full, taken or without kernels says so now
        except Exception as error:
            raise refusal(error) from error
    return torch.device("cuda", index)


def _no_gpu(said):
    if torch.version.cuda is None:
        return UserError(f"torch {torch.__version__} is built for CPUs only: install the build for GPUs with "
                         f"pip install --force-reinstall -r requirements.txt, {CPU_INSTEAD}")
    why = "".join(f" ({warning.message})" for warning in said)
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        why += f" (CUDA_VISIBLE_DEVICES is '{os.environ['CUDA_VISIBLE_DEVICES']}')"
    return UserError(f"torch finds no usable NVIDIA GPU{why}: see whether nvidia-smi works, {CPU_INSTEAD}")


def refusal(error):
    """The UserError for what a GPU answers in place of working."""
    text = str(error).strip() or type(error).__name__
    if "no kernel image" in text:
        major, minor = torch.cuda.get_device_capability()
        return UserError(f"torch {torch.__version__} has no kernels for this GPU's compute capability {major}.{minor}, "
                         f"only for {' '.join(torch.cuda.get_arch_list())}: install the torch that pytorch.org names "
                         f"for this GPU, {CPU_INSTEAD}")
    return UserError(f"the GPU does not work ({text.splitlines()[0]}): see what nvidia-smi says and what else uses it, "
                     f"{CPU_INSTEAD}")


def notice(device):
    """What a person should know about timings on this device, in one line; None for a GPU."""
    if device.type != "cpu":
        return None
    line = "No GPU in use: the timings are of this CPU and say nothing about a GPU."
    if torch.cuda.is_available() or not os.path.exists(NVIDIA_DRIVER):
        return line
    if torch.version.cuda is None:
        return (f"{line} This machine has an NVIDIA driver, but torch {torch.__version__} is built for CPUs only: for "
                "the other build, pip install --force-reinstall -r requirements.txt")
    return f"{line} This machine has an NVIDIA driver, but torch finds no GPU to use: --device cuda says why"


def describe(device):
    """What runs.csv keeps of the hardware and the versions, as a dict; GPU entries only for a GPU."""
    facts = {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "bitsandbytes": _version("bitsandbytes"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device_memory_mib": properties.total_memory // 2**20,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": nvml(device).get("driver"),
        }
    return facts


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def nvml(device):
    """Clock, temperature and company of the GPU this moment, as a dict. Empty where NVML is absent or silent."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        causes = {
            "heat": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
            "heat (driver)": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
            "power limit": pynvml.nvmlClocksThrottleReasonSwPowerCap,
            "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        }
        return {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "throttled": ", ".join(cause for cause, bit in causes.items() if reasons & bit) or "no",
            # Process ids differ inside a container, so this process is counted, not recognized.
            "other_gpu_processes": max(0, len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) - 1),
        }
    except Exception:  # NVML reports its failures by a class of its own for each, and none of them is this run's
        return {}


def peak_tflops(device, seconds=0.8):
    """The card's bfloat16 matrix peak, measured: the best rate of square products (2 n^3 FLOP) of random matrices.

    Takes about `seconds` (s) and up to 384 MiB; sizes that do not fit are left out. None on a CPU.
    """
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()
    best = 0.0
    sizes = (2048, 4096, 8192)
    for n in sizes:
        try:
            a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
            out = torch.empty_like(a)
            torch.mm(a, b, out=out)
        except torch.OutOfMemoryError:
            break
        torch.cuda.synchronize(device)
        stop = time.perf_counter() + seconds / len(sizes)
        while time.perf_counter() < stop:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(4):
                torch.mm(a, b, out=out)
            end.record()
            end.synchronize()
            best = max(best, 4 * 2 * n**3 / start.elapsed_time(end) / 1e9)
    return best
