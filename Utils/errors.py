"""Errors that a person can put right: one line on stderr that says how, an exit status, no traceback."""

import functools
import signal
import sys


class UserError(Exception):
    """Something the person at the keyboard can change. The message is one line and says what to do."""

    status = 1


class CannotRunHere(UserError):
    """This machine lacks something that the technique needs; the other techniques may still run."""

    status = 77  # what Automake's test driver, Meson and CTest users know as "skipped"


def one_line_errors(main):
    """Decorate a program's entry point: UserError and interruption end it in one line, anything else is our bug."""

    @functools.wraps(main)
    def wrapper(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"{_program()}: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(error.status)
        except KeyboardInterrupt:
            print(f"\n{_program()}: interrupted; nothing was written", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)

    return wrapper


def _program():
    return sys.argv[0].rsplit("/", 1)[-1] or "python"
