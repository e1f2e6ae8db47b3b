"""What a person can do where PyTorch gives up: its error, as one line of ours."""

import gc
import traceback

from Utils.errors import CannotRunHere, UserError

import torch

FULL = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")


def advice(error, label, batch_size, device, peak):
    """The UserError to raise in place of `error`, which ended the run `label`; or None, if it is a bug of ours.

    `peak(n)` trains the baseline on n sequences and returns the most bytes its tensors took.
    """
    text = str(error).strip() or type(error).__name__
    if isinstance(error, MemoryError) or any(words in text.lower() for words in FULL):
        traceback.clear_frames(error.__traceback__)  # they hold the tensors that took the memory
        gc.collect()
        return UserError(f"{label} ran out of memory at BATCH_SIZE={batch_size}: {_smaller(batch_size, device, peak)}")
    if "no kernel image" in text:
        major, minor = torch.cuda.get_device_capability(device)
        return UserError(f"torch {torch.__version__} has no kernels for this GPU's compute capability {major}.{minor}, "
                         f"only for {' '.join(torch.cuda.get_arch_list())}: install the torch that pytorch.org names "
                         "for this GPU, or choose the CPU with --device cpu (make: DEVICE=cpu)")
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return CannotRunHere(f"{label} cannot be compiled here: {text.splitlines()[0]} (torch.compile needs a C++ "
                             "compiler such as g++, and for a GPU Triton: pip install -r requirements.txt)")
    return None


def _smaller(batch_size, device, peak):
    if device.type == "cpu":
        return f"try BATCH_SIZE={max(1, batch_size // 2)}"
    limit = usable_memory(device)
    words = f"the GPU has {limit / 2**20:,.0f} MiB for it; "
    fits = fitting_batch(limit, peak)
    if fits < 1:
        return words + "not even BATCH_SIZE=1 fits: choose a smaller MODEL"
    return words + f"BATCH_SIZE={min(fits, batch_size - 1 or 1)} should fit, for all scripts"


def usable_memory(device):
    """Bytes that this process may take from the GPU, with what it holds now: free ones, and under its own limit."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return min(free + torch.cuda.memory_reserved(device), torch.cuda.get_per_process_memory_fraction(device) * total)


def fitting_batch(limit, peak):
    """How many sequences fit into `limit` bytes if `peak(n)` bytes grow in proportion; 0 if not even one does.

    A tenth is kept back for what the allocator cannot use and what kernels take for themselves.
    """
    try:
        one, two = peak(1), peak(2)
    except RuntimeError:  # out of memory once more
        return 0
    fits = int(1 + (0.9 * limit - one) / (two - one))
    return max(0, fits if fits < 8 else fits - fits % 8)
