"""What a person can do where PyTorch gives up: its error, as one line of ours."""

import gc
import re
import textwrap
import traceback

from Utils import hardware
from Utils.errors import CannotRunHere, UserError, passed

import torch

GPU_SAYS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
NO_DISK = ("No space left on device", "Disk quota exceeded", "Read-only file system")
FULL = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")


def advice(error, label, batch_size, device, attempt):
    """The UserError to raise in place of `error`, which ended the run `label`; or None, if it is a bug of ours.

    `attempt(n)` trains the baseline on n sequences for some steps.
    """
    text = str(error).strip() or type(error).__name__
    if full(error):
        _release(error)
        return UserError(f"{label} ran out of memory at BATCH_SIZE={batch_size}: "
                         f"{_smaller(batch_size, device, attempt)}")
    if text.startswith(GPU_SAYS):
        return hardware.refusal(error)
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
        cause = getattr(error, "inner_exception", error)
        if any(words in text for words in NO_DISK):
            return UserError(f"{label} cannot be compiled: {reason(cause)}; put that right, or name other folders to "
                             "write to with TORCHINDUCTOR_CACHE_DIR and TMPDIR")
        return CannotRunHere(f"{label} cannot be compiled here: {reason(cause)} (torch.compile needs a C++ compiler "
                             "such as g++ and Python's header files, and for a GPU Triton: pip install -r "
                             "requirements.txt)")
    if any(package == "bitsandbytes" for package, _ in passed(error)):
        return CannotRunHere(f"{label} needs a bitsandbytes that works on this machine ({reason(error)}): "
                             "python -m bitsandbytes says more")
    return None


def reason(error):
    """The line of an error's text that compilers and libraries hide the error itself in; or the first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(next((line for line in lines if re.search("[Ee]rror: ", line)), lines[0]), 300)


def full(error):
    """Whether the error says that there was no memory left."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in FULL)


def _release(error):
    """Let go of the tensors that took the memory: the frames that the error went through still hold them."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    torch.cuda.empty_cache()


def _smaller(batch_size, device, attempt):
    if device.type == "cpu":
        return f"try BATCH_SIZE={max(1, batch_size // 2)}"
    words = f"the GPU has {usable_memory(device) / 2**20:,.0f} MiB for it; "
    fits = fitting_batch(batch_size, attempt)
    if fits < 1:
        return words + "not even BATCH_SIZE=1 fits: choose a smaller MODEL"
    return words + f"BATCH_SIZE={fits} should fit, for all scripts"


def usable_memory(device):
    """Bytes that this process may take from the GPU, with what it holds now: free ones, and under its own limit."""
    free, total = torch.cuda.mem_get_info(device)
    return min(free + torch.cuda.memory_reserved(device), torch.cuda.get_per_process_memory_fraction(device) * total)


def fitting_batch(batch_size, attempt):
    """The first of batch_size / 2, / 4, ... that `attempt` gets through; 0 if not even one sequence does.

    An eighth more is attempted, because some techniques take a little more memory than the baseline.
    """
    n = batch_size // 2
    while n and not _succeeds(attempt, n + n // 8):
        n //= 2
    return n


def _succeeds(attempt, n):
    try:
        attempt(n)
    except (RuntimeError, MemoryError) as error:
        if not full(error):
            raise
        _release(error)
        return False
    return True
