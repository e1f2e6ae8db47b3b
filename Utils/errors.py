"""Errors that a person can put right: one line on stderr that says how, an exit status, no traceback.

Importing this module teaches the interpreter to end so. What nobody foresaw keeps its traceback: that is our bug.
"""

import os
import sys
import time


class UserError(Exception):
    """Something the person at the keyboard can change. The message is one line and says what to do."""

    status = 1


class CannotRunHere(UserError):
    """This machine lacks what the technique needs; the others may still run."""

    status = 77  # "skipped" to Automake and Meson


PACKAGES = ("torch", "numpy", "pandas", "matplotlib", "tiktoken", "bitsandbytes")


def _end(kind, error, traceback):
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":  # one of several that torchrun started
        if kind is KeyboardInterrupt:
            return
        time.sleep(3)  # where all fail alike, torchrun ends the others meanwhile, and only the first one speaks
    if kind is KeyboardInterrupt:
        _say("interrupted; earlier results are as they were")
    elif issubclass(kind, UserError):
        _say(error)
        sys.exit(error.status)
    elif issubclass(kind, ModuleNotFoundError) and error.name in PACKAGES:
        _say(f"the package {error.name} is not installed for {sys.executable}: pip install -r requirements.txt")
        sys.exit(CannotRunHere.status if error.name == "bitsandbytes" else UserError.status)
    else:
        sys.__excepthook__(kind, error, traceback)


def _say(message):
    program = sys.argv[0].rsplit("/", 1)[-1]
    print(f"{program}: {' '.join(str(message).split())}", file=sys.stderr)


sys.excepthook = _end
