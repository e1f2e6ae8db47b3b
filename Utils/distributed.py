"""Several processes that train one model, each on its own GPU and with batches of its own; torchrun starts them.

torchrun tells each process which one it is: RANK of WORLD_SIZE, and LOCAL_RANK of LOCAL_WORLD_SIZE on its machine.
Without torchrun there is one process, and everything here leaves it as it is.
"""

import contextlib
import os
import sys
import time

from Utils.advice import reason
from Utils.errors import UserError

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LAUNCHED = dist.is_torchelastic_launched() and "RANK" in os.environ
RANK, SIZE, LOCAL_RANK, LOCAL_SIZE = (
    int(os.environ[name]) if LAUNCHED else alone
    for name, alone in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items()
)
GONE = ("connection closed by peer", "connection reset by peer", "broken pipe")


@contextlib.contextmanager
def group(device):
    """Let the processes talk to each other: by NCCL on GPUs, by Gloo on CPUs. Only the first one prints.

    A process that loses another one waits to be ended by torchrun; it is for that other one to say why.
    """
    if not LAUNCHED:
        yield
        return
    on_gpu, hook = device.type == "cuda", sys.excepthook
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes do not find each other ({reason(error)}): put right what the "
                        "environment says of the network (MASTER_ADDR, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or "
                        "train on one GPU") from error
    finally:
        sys.excepthook = hook  # PyTorch's own would swallow what ours says
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if RANK else sys.stdout):
        try:
            yield
        except RuntimeError as error:
            if not any(words in str(error).lower() for words in GONE):
                raise
            time.sleep(60)
            sys.exit(1)
    dist.destroy_process_group()  # not after an error: it would wait for processes that may be gone


def from_first(ask):
    """What `ask()` returns in the first process; no other one calls it."""
    answer = [ask() if RANK == 0 else None]
    if LAUNCHED:
        dist.broadcast_object_list(answer)
    return answer[0]


def largest(values, device):
    """Each of the numbers, from that process where it is largest."""
    return _reduced(values, device, dist.ReduceOp.MAX)


def mean(values, device):
    """Each of the numbers, averaged over the processes."""
    return [total / SIZE for total in _reduced(values, device, dist.ReduceOp.SUM)]


def _reduced(values, device, how):
    if not LAUNCHED:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, how)
    return tensor.tolist()


def share(run):
    """Average the gradients of all processes in every backward pass, while it is still going on.

    DistributedDataParallel comes last, around whatever the scripts have made of the forward call: torch.compile then
    cuts its graph where a bucket of gradients is full, so that they travel while the rest is computed.
    Source   https://docs.pytorch.org/docs/stable/notes/ddp.html
    """
    if SIZE > 1:
        run.model.forward = run.forward
        run.forward = DistributedDataParallel(run.model, gradient_as_bucket_view=True).forward
