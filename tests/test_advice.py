"""Where PyTorch gives up, a person is told what to do."""

import types
import warnings

from Utils import advice as module
from Utils import hardware
from Utils.advice import advice, fitting_batch
from Utils.errors import CannotRunHere, UserError

import pytest
import torch
import torch._inductor.exc as inductor

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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    error = advice(RuntimeError("CUDA error: no kernel image is available for execution"), "TC", 8, GPU, None)
    assert "6.1" in str(error) and "sm_75 sm_90" in str(error) and "--device cpu" in str(error)


@pytest.mark.parametrize("text", ["CUDA error: unspecified launch failure\nCompile with ...",
                                  "CUDA driver error: unknown error", "Triton Error [CUDA]: an illegal instruction"])
def test_a_gpu_that_fails_in_the_middle_ends_the_run_in_one_line(text):
    error = advice(RuntimeError(text), "TC", 8, GPU, None)
    assert type(error) is UserError and "\n" not in str(error)
    assert text.splitlines()[0] in str(error) and "nvidia-smi" in str(error)


def raiser(error):
    def act(*_, **__):
        raise error

    return act


BEFORE = {
    "another program holds its memory": ("zeros", torch.OutOfMemoryError("CUDA error: out of memory\nCUDA kernel ...")),
    "another program holds it": (
        "set_device", RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel ...")),
    "it does not start": ("set_device", torch.cuda.DeferredCudaCallError("CUDA call failed lazily\n\n  File ...")),
    "its driver is too old": ("set_device", RuntimeError("The NVIDIA driver on your system is too old (found ...).")),
    "torch is broken": ("set_device", AssertionError("libcudart functions unavailable.")),
    "torch has no kernels for it": ("zeros", RuntimeError("CUDA error: no kernel image is available\nCUDA kernel ...")),
}


@pytest.fixture
def a_gpu(monkeypatch):
    """What torch says where there is one GPU."""
    for name, value in {"is_available": True, "device_count": 1, "set_device": None, "get_device_capability": (6, 1),
                        "get_arch_list": ["sm_75"]}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.mark.parametrize("what", BEFORE)
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_that_cannot_be_used_says_so_before_anything_else_is_done(name, what, a_gpu, monkeypatch):
    where, error = BEFORE[what]
    monkeypatch.setattr(torch if where == "zeros" else torch.cuda, where, raiser(error))
    with pytest.raises(UserError, match="--device cpu") as caught:
        hardware.choose_device(name)
    assert "\n" not in str(caught.value)
    assert ("compute capability 6.1" if "kernels" in what else str(error).splitlines()[0]) in str(caught.value)


def test_why_torch_finds_no_gpu_is_part_of_the_line(a_gpu, monkeypatch, recwarn):
    def too_old():
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=2)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="driver on your system is too old.*CUDA_VISIBLE_DEVICES is ''.*nvidia-smi"):
        hardware.choose_device("cuda")
    assert not recwarn.list


NOT_COMPILED = {
    "no Triton": (inductor.TritonMissing(None), "triton installation"),
    "no Triton, in another place": (inductor.InductorError(inductor.TritonMissing(None), None), "triton installation"),
    "a GPU too old for Triton": (
        inductor.GPUTooOldForTriton(types.SimpleNamespace(name="GTX 1080", major=6, minor=1), None), "GTX 1080"),
    "no C compiler for Triton": (
        inductor.InductorError(RuntimeError("Failed to find C compiler. Set CC"), None), "Failed to find C"),
    "no C++ compiler": (inductor.InductorError(inductor.InvalidCxxCompiler(), None), "No working C++ compiler"),
    "no Python.h": (inductor.InductorError(
        inductor.CppCompileError(["g++"], "In file\nx.cpp:1:10: fatal error: Python.h: No such file\nstop."), None),
        "Python.h: No such file"),
    "another backend": (
        torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("no g++"), None), "no g++"),
}


@pytest.mark.parametrize("what", NOT_COMPILED)
def test_a_compiler_that_fails_is_no_failure_of_the_comparison(what):
    error, words = NOT_COMPILED[what]
    line = advice(error, "TC", 8, CPU, None)
    assert isinstance(line, CannotRunHere) and "\n" not in str(line)
    assert words in str(line) and "g++" in str(line) and "Triton" in str(line)


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device"), OSError(30, "Read-only file system", "/x/.cache"),
    inductor.CppCompileError(["g++"], "x.cpp\nfatal error: when writing output to /tmp/x.s: No space left on device")],
    ids=lambda error: type(error).__name__)
def test_a_disk_that_takes_no_compiled_graphs_is_named(error):
    line = advice(inductor.InductorError(error, None), "TC", 8, CPU, None)
    assert type(line) is UserError and "\n" not in str(line)
    assert (error.strerror if isinstance(error, OSError) else "/tmp/x.s: No space left") in str(line)
    assert "TORCHINDUCTOR_CACHE_DIR" in str(line) and "TMPDIR" in str(line)


@pytest.mark.parametrize("missing", ["libnvJitLink.so.13: cannot open shared object file: No such file or directory",
                                     "No compatible CUDA binary found at /x/libbitsandbytes_cuda140.so"])
def test_a_bitsandbytes_whose_library_does_not_load_cannot_run_here(missing):
    """It is imported all the same, and fails in the first step, with a page of text."""
    native = pytest.importorskip("bitsandbytes").cextension.ErrorHandlerMockBNBNativeLibrary(missing)
    with pytest.raises(RuntimeError) as caught:
        native.cadam_8bit_blockwise_grad_fp32()
    line = advice(caught.value, "8bOp", 8, GPU, None)
    assert isinstance(line, CannotRunHere) and "\n" not in str(line)
    assert missing in str(line) and "python -m bitsandbytes" in str(line)


def test_a_bitsandbytes_without_its_gpu_part_cannot_run_here():
    native = pytest.importorskip("bitsandbytes").cextension.BNBNativeLibrary(types.SimpleNamespace())
    with pytest.raises(RuntimeError) as caught:
        native.cadam_8bit_blockwise_grad_fp32()
    assert "CPU-only version of bitsandbytes" in str(advice(caught.value, "8bOp", 8, GPU, None))


def test_a_bug_stays_a_bug():
    assert advice(IndexError("list index out of range"), "TC", 8, CPU, None) is None


def test_a_torch_for_cpus_beside_an_nvidia_driver_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path)
    assert "pip install --force-reinstall" in hardware.notice(CPU)
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path / "none")
    assert hardware.notice(CPU).count(".") == 1
    assert hardware.notice(GPU) is None


@pytest.mark.parametrize("available", [True, False])
def test_a_gpu_that_torch_does_not_find_is_noticed_and_one_that_is_left_alone_is_not(available, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path)
    assert ("--device cuda says why" in hardware.notice(CPU)) is not available
