"""What the tests share: where the repository is, a text in tokens, PyTorch left as it was found, and no GPU needed."""

from pathlib import Path

from Utils import data

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch finds none here"))


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def tokens():
    """(n,) uint16: Python's own library in the 4,096-entry vocabulary."""
    return data.load(4096).tokens


@pytest.fixture(autouse=True)
def as_found():
    """A script may change PyTorch's settings for the whole process, which the next test must not inherit."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
