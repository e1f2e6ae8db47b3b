"""The seven scripts in teaching order, loaded by path: `8-bit_optimizer` is no Python name.

An eighth script joins by its name here and a target in the Makefile.
"""

import importlib.util
from pathlib import Path

from Utils.errors import UserError, explained

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    "no_optimization",
    "tensorFloat32",
    "brainFloat16",
    "torch_compile",
    "flash_attention",
    "fused_optimizer",
    "8-bit_optimizer",
)


def load(name):
    """The module of a script, `name` with or without .py. Raises UserError if there is none, or it lacks a package."""
    name = name.removesuffix(".py")
    if name not in NAMES:
        raise UserError(f"there is no script {name!r}; choose from {', '.join(NAMES)}")
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a package that is missing, or does not work with this machine's libraries
        raise (explained(error) or error) from None
    return module
