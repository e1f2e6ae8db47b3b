"""Where PyTorch gives up, a person is told what to do."""

from Utils import advice as module
from Utils import hardware
from Utils.advice import advice, fitting_batch
from Utils.errors import CannotRunHere, UserError

import pytest
import torch

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIB = 2**20


def room_for(most):
    """An `attempt` that runs out of memory above `most` sequences."""
    def attempt(n):
        if n > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return attempt


@pytest.mark.parametrize(("tried", "most", "advised"), [
    (512, 341, 256), (512, 287, 128), (512, 288, 256), (16, 2, 2), (16, 1, 1), (3, 1, 1), (10**9, 300, 238)])
def test_the_batch_that_is_advised_has_been_trained_on_with_an_eighth_to_spare(tried, most, advised):
    assert fitting_batch(tried, room_for(most)) == advised
    assert advised + advised // 8 <= most


def test_where_not_even_one_sequence_fits_a_smaller_model_is_advised(monkeypatch):
    monkeypatch.setattr(module, "usable_memory", lambda device: 100 * MIB)
    for tried in (1, 16):
        error = advice(torch.OutOfMemoryError("CUDA out of memory."), "FA", tried, GPU, room_for(0))
        assert "not even BATCH_SIZE=1" in str(error) and "MODEL" in str(error)


def test_an_attempt_that_fails_for_another_reason_is_not_taken_for_a_full_gpu(monkeypatch):
    def attempt(n):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(module, "usable_memory", lambda device: 100 * MIB)
    with pytest.raises(RuntimeError, match="illegal"):
        advice(torch.OutOfMemoryError("CUDA out of memory."), "FA", 16, GPU, attempt)


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to allocate 2.00 GiB", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_a_full_gpu_is_told_with_its_size_and_a_batch_to_try(monkeypatch, text):
    monkeypatch.setattr(module, "usable_memory", lambda device: 3482 * MIB)
    error = advice(RuntimeError(text), "BF16", 512, GPU, room_for(341))
    assert type(error) is UserError and "\n" not in str(error)
    for words in ("BF16", "BATCH_SIZE=512", "3,482 MiB", "BATCH_SIZE=256 should fit"):
        assert words in str(error)


def test_what_a_run_held_is_let_go_before_memory_is_measured():
    def run():
        held.append(tensor := torch.zeros(1))
        raise RuntimeError(f"out of memory {tensor}")

    held = []
    with pytest.raises(RuntimeError) as caught:
        run()
    frame = caught.value.__traceback__.tb_next.tb_frame
    assert "tensor" in frame.f_locals
    advice(caught.value, "BF16", 8, CPU, None)
    assert "tensor" not in frame.f_locals


def test_a_full_cpu_is_told_to_halve_the_batch():
    assert "BATCH_SIZE=4" in str(advice(MemoryError(), "FA", 8, CPU, None))


def test_a_gpu_without_kernels_is_named_with_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    error = advice(RuntimeError("CUDA error: no kernel image is available for execution"), "TC", 8, GPU, None)
    assert "6.1" in str(error) and "sm_75 sm_90" in str(error) and "--device cpu" in str(error)


def test_a_compiler_that_fails_is_no_failure_of_the_comparison():
    error = advice(torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("no g++"), None), "TC", 8, CPU,
                   None)
    assert isinstance(error, CannotRunHere) and "\n" not in str(error)


def test_a_bug_stays_a_bug():
    assert advice(IndexError("list index out of range"), "TC", 8, CPU, None) is None


def test_a_torch_for_cpus_beside_an_nvidia_driver_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path)
    assert "pip install --force-reinstall" in hardware.notice(CPU)
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path / "none")
    assert hardware.notice(CPU).count(".") == 1
    assert hardware.notice(GPU) is None
