"""Errors that a person can put right: one line on stderr that says how, an exit status, no traceback.

Importing this module teaches the interpreter to end so. What nobody foresaw keeps its traceback: that is our bug.
"""

import io
import os
import sys
import textwrap
import time
import traceback


class UserError(Exception):
    """Something the person at the keyboard can change. The message is one line and says what to do."""

    status = 1


class CannotRunHere(UserError):
    """This machine lacks what the technique needs; the others may still run."""

    status = 77  # "skipped" to Automake and Meson


PACKAGES = ("torch", "numpy", "pandas", "matplotlib", "tiktoken", "bitsandbytes")


def explained(error):
    """The UserError to end with where `error` is one, or the machine's doing; None if it is a bug of ours."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, MemoryError):
        return UserError("this machine's memory is too small; earlier results are as they were")
    if isinstance(error, OSError) and error.errno:  # of the system: a full disk, an output that nobody reads any more
        what = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        return UserError(f"{what}; put that right and run it again, earlier results are as they were")
    if package := _package(error):
        kind = CannotRunHere if package == "bitsandbytes" else UserError
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return kind(f"the package {package} is not installed for {sys.executable}: pip install -r requirements.txt")
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        return kind(f"the package {package} does not work ({reason}): put that right, or reinstall it for "
                    f"{sys.executable}: pip install --force-reinstall -r requirements.txt")
    return None


def _package(error):
    """The one of PACKAGES that is missing, or in whose own import `error` arose, or that lacks what is imported."""
    if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        return error.name
    for package, function in passed(error):
        if function == "<module>" and package in PACKAGES:
            return package
    package = (error.name or "").split(".")[0] if isinstance(error, ImportError) else None
    return package if package in PACKAGES else None


def passed(error):
    """The (top-level package, function) that an error has come through, the outermost first."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame.f_globals.get("__name__", "").split(".")[0], frame.f_code.co_name


def _end(kind, error, traceback):
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":  # one of several of torchrun's
        if kind is KeyboardInterrupt:
            return
        time.sleep(3)  # where all fail alike, torchrun ends the others meanwhile, and only the first one speaks
    if kind is KeyboardInterrupt:
        _say("interrupted; earlier results are as they were")
    elif explanation := explained(error):
        _say(explanation)
        if isinstance(error, OSError):
            sys.stdout = None  # what could not be printed, the interpreter would try to print once more
        sys.exit(explanation.status)
    else:
        sys.__excepthook__(kind, error, traceback)


def _say(message):
    program = sys.argv[0].rsplit("/", 1)[-1]
    print(f"{program}: {' '.join(str(message).split())}", file=sys.stderr)


sys.excepthook = _end
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal can show every name and every sign
