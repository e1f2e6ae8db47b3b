"""torchrun, ending as the scripts do: with the exit status of the process that failed, and no traceback of its own.

    python -m Utils.launch --standalone --nproc-per-node=4 brainFloat16.py --steps ...

The process that failed has said why; only one that was killed could not.
"""

import logging
import sys

import Utils.errors  # noqa: F401

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main():
    logging.disable(logging.CRITICAL)
    try:
        run.main()
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"process {rank} was killed by {failure.signal_name()}, so all were ended; earlier results are as "
                  "they were", file=sys.stderr)
        sys.exit(abs(failure.exitcode) + 128 * (failure.exitcode < 0))


if __name__ == "__main__":
    main()
