"""Command lines: complaints in one line, and the types of arguments."""

import argparse
import os

from Utils.errors import UserError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are one line, as all errors here."""

    def __init__(self, **settings):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message):
        raise UserError(f"{message}; see --help")


def whole(text, least=0, most=2**31 - 1):
    """The type of an argument that is a whole number from `least` to `most`."""
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def positive(text):
    """The type of an argument that counts something."""
    return whole(text, least=1, most=10**6)  # so many steps a table still holds


def filename(text):
    """The type of an argument that names a file; ~ is the home folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return os.path.normpath(os.path.expanduser(text))
