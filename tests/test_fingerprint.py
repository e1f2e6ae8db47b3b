"""The fingerprint says what a technique really changed, and doubts a technique that changed nothing."""

from types import SimpleNamespace

from Utils import fingerprint as module
from Utils import scripts
from Utils.fingerprint import doubts, fingerprint, logits_dtype, matmul_error, optimizer_state
from Utils.model import GPT2, PRESETS, attention
from Utils.train import Run, train

import pytest
import torch
from torch.autograd import DeviceType

CPU = torch.device("cpu")
FLASH = "flash_fwd_kernel"


def a_run(*names, tokens):
    def batch(step):
        window = torch.from_numpy(tokens[step * 66:(step + 1) * 66].astype("int64")).view(2, 33)
        return torch.stack([window[:, :-1], window[:, 1:]])

    run = Run(GPT2(PRESETS["tiny"]), batch, CPU)
    for name in names:
        scripts.load(name).optimize(run)
    return run


# What is seen


def test_float32_products_of_a_cpu_are_exact_to_seven_digits():
    assert 1e-8 < matmul_error(CPU) < 1e-6


def test_products_of_rounded_factors_are_seen(monkeypatch):
    """TF32 keeps ten of float32's mantissa bits; a float16, which keeps as many, stands in for it here."""
    product = torch.Tensor.__matmul__

    def rounded(a, b):
        return product(a.half().float(), b.half().float()) if a.dtype == torch.float32 else product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert 1e-4 < matmul_error(CPU) < 1e-3


@pytest.mark.parametrize("names, dtype", (((), "float32"), (("brainFloat16",), "bfloat16"),
                                          (("flash_attention",), "float32"), (("tensorFloat32",), "float32")))
def test_the_dtype_of_the_logits_tells_autocast(names, dtype, tokens):
    assert logits_dtype(a_run(*names, tokens=tokens)) == dtype


def test_looking_changes_nothing(tokens):
    seen, unseen = a_run(tokens=tokens), a_run(tokens=tokens)
    list(train(seen, range(2)))
    fingerprint(seen, iter(()))
    list(train(unseen, range(2)))
    assert [loss for _, loss in train(seen, range(2, 4))] == [loss for _, loss in train(unseen, range(2, 4))]


@pytest.mark.parametrize("name", ("no_optimization", "fused_optimizer"))
def test_adamw_remembers_eight_bytes_a_parameter(name, tokens):
    run = a_run(name, tokens=tokens)
    list(train(run, range(1)))
    counters = 4 * len(list(run.model.parameters()))  # each tensor's own count of steps, a float32
    state = optimizer_state(run.optimizer)
    assert state["optimizer_state_mib"] * 2**20 == pytest.approx(8 * run.model.n_parameters + counters, rel=1e-12)
    assert state["optimizer_state_dtypes"] == f"float32:{state['optimizer_state_mib']:.2f}"


def test_8_bit_adamw_remembers_about_two_bytes_a_parameter(tokens):
    pytest.importorskip("bitsandbytes")
    run = a_run("8-bit_optimizer", tokens=tokens)
    list(train(run, range(1)))
    large = [p.numel() for p in run.model.parameters() if p.numel() >= 4096]
    small = run.model.n_parameters - sum(large)
    scales = sum(-(-n // 256) for n in large)  # a float32 for each block of 256, for each of two moments
    tables = 2 * 256  # the 256 numbers that the codes stand for, of one moment and the other
    state = optimizer_state(run.optimizer)
    sizes = dict(part.split(":") for part in state["optimizer_state_dtypes"].split())
    assert list(sizes) == ["uint8", "float32"]  # the larger first
    assert float(sizes["uint8"]) == pytest.approx(2 * sum(large) / 2**20, abs=0.006)
    others = 4 * (2 * small + 2 * scales)
    assert others / 2**20 <= float(sizes["float32"]) + 0.006
    assert float(sizes["float32"]) <= (others + 4 * tables * len(large)) / 2**20 + 0.006
    assert state["optimizer_state_mib"] == pytest.approx(sum(map(float, sizes.values())), abs=0.011)


def test_before_the_first_step_an_optimizer_remembers_nothing(tokens):
    assert optimizer_state(a_run(tokens=tokens).optimizer)["optimizer_state_mib"] == 0


def test_what_only_a_gpu_shows_is_left_out_on_a_cpu(tokens):
    taken = []
    seen = fingerprint(a_run(tokens=tokens), (taken.append(step) for step in range(3)))
    assert taken == []  # no step is profiled for nothing
    assert {"matmul_precision", "matmul_error", "logits_dtype", "graph_breaks"} <= seen.keys()
    assert not {"kernels_per_step", "cuda_graphs", "attention_kernel", "optimizer_kernels", "busy_ms"} & seen.keys()


def test_every_script_has_the_same_columns(tokens):
    names = [name for name in scripts.NAMES if name not in ("torch_compile", "8-bit_optimizer")]
    columns = {tuple(fingerprint(a_run(name, tokens=tokens), iter(()))) for name in names}
    assert len(columns) == 1


# Kernels, as PyTorch's profiler lists them (here made up: two steps of a run)


def event(device, name, start, end, annotation=False):
    return SimpleNamespace(device_type=device, name=name, time_range=SimpleNamespace(start=start, end=end),
                           is_user_annotation=annotation)


def on_cpu(name, start, end):
    return event(DeviceType.CPU, name, start, end)


def on_gpu(name, start, end, annotation=False):
    return event(DeviceType.CUDA, name, start, end, annotation)


@pytest.fixture
def profiled(monkeypatch):
    """A function that gives `kernels` the events to see."""
    class Profiler:
        def __init__(self, **_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def see(*events):
        Profiler.events = lambda self: list(events)
        monkeypatch.setattr(module, "profile", Profiler)
        return module.kernels(iter(range(2)))

    return see


FLASH_SIGNATURE = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>, false>(Flash_fwd_params)"


def test_kernels_are_counted_a_step_and_copies_are_none(profiled):
    seen = profiled(on_cpu("aten::mm", 0, 9), on_gpu("sgemm", 10, 20), on_gpu("sgemm", 30, 40), on_gpu("sgemm", 45, 50),
                    on_gpu("Memcpy HtoD (Pinned -> Device)", 0, 1000), on_gpu("Memset (Device)", 0, 1000))
    assert seen["kernels_per_step"] == 1.5
    assert seen["busy_ms"] == pytest.approx(25 / 1000 / 2)
    assert seen["attention_kernel"] == "written out"
    assert seen["cuda_graphs"] == seen["optimizer_kernels"] == 0


def test_kernels_that_overlap_keep_the_gpu_busy_once(profiled):
    assert profiled(on_gpu("a", 0, 2000), on_gpu("b", 1000, 3000))["busy_ms"] == pytest.approx(1.5)


def test_the_attention_kernel_is_named_without_its_signature(profiled):
    seen = profiled(on_gpu(FLASH_SIGNATURE, 0, 1), on_gpu(FLASH_SIGNATURE, 2, 3), on_gpu("softmax", 4, 5))
    assert seen["attention_kernel"] == FLASH


def test_launches_count_for_the_optimizer_only_inside_its_step(profiled):
    seen = profiled(on_cpu("Optimizer.step#AdamW.step", 100, 200), on_cpu("cudaLaunchKernel", 50, 51),
                    on_cpu("cudaLaunchKernel", 120, 121), on_cpu("cudaLaunchKernel", 130, 131),
                    on_cpu("cuLaunchKernel", 140, 141), on_cpu("cudaMemcpyAsync", 150, 151),
                    on_cpu("cudaLaunchKernel", 250, 251))
    assert seen["optimizer_kernels"] == 1.5


def test_names_that_pytorch_gives_to_stretches_of_time_are_no_kernels(profiled):
    seen = profiled(on_gpu("Optimizer.step#AdamW.step", 0, 9000, annotation=True), on_gpu("triton_poi_fused_0", 10, 20),
                    on_gpu("Torch-Compiled Region: 0/0", 0, 9000, annotation=True),
                    on_gpu("flash attention, annotated", 0, 9000, annotation=True))
    assert seen["kernels_per_step"] == 0.5
    assert seen["busy_ms"] == pytest.approx(10 / 1000 / 2)
    assert seen["attention_kernel"] == "written out"


def test_replayed_graphs_are_counted_a_step(profiled):
    assert profiled(*(on_cpu("cudaGraphLaunch", i, i + 1) for i in range(4)))["cuda_graphs"] == 2


# What is doubted


def doubt(monkeypatch, compiled=False, attention=attention, optimizer=None, **changes):
    """The doubts about a row of a healthy run on a GPU, but for `changes`."""
    monkeypatch.setattr(module, "compiled", lambda: compiled)
    row = {"matmul_precision": "highest", "matmul_error": 3e-7, "attention_kernel": "written out", "valid": True,
           "scripts": "no_optimization", "optimizer_state_dtypes": "float32:66.30",
           "graph_breaks": 0 if compiled else None, "cuda_graphs": 2.0 if compiled else 0.0} | changes
    optimizer = optimizer or torch.optim.AdamW([torch.zeros(1)])
    return doubts(SimpleNamespace(model=SimpleNamespace(attention=attention), optimizer=optimizer), row)


class AdamW8bit:
    """Named as bitsandbytes' optimizer."""


def another_attention(q, k, v):
    return v


HEALTHY = (
    {},
    {"matmul_precision": "high", "matmul_error": 3e-4},
    {"attention": another_attention, "attention_kernel": FLASH},
    {"attention": another_attention, "attention_kernel": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"},
    {"optimizer": AdamW8bit(), "optimizer_state_dtypes": "uint8:16.57 float32:0.90"},
    {"compiled": True, "scripts": "brainFloat16 torch_compile"},
)
SUSPICIOUS = (
    ({"matmul_precision": "high"}, "TF32"),
    ({"matmul_precision": "medium"}, "TF32"),
    ({"matmul_error": 3e-4}, "OVERRIDE"),
    ({"attention": another_attention, "attention_kernel": "fmha_cutlassF_f32_aligned_64x64_rf_sm80"}, "fmha_cutlassF"),
    ({"attention": another_attention}, "written out"),
    ({"optimizer": AdamW8bit()}, "float32"),
    ({"compiled": True, "graph_breaks": 2}, "2"),
    ({"compiled": True, "cuda_graphs": 0.0}, "CUDA graph"),
    ({"scripts": "brainFloat16 torch_compile fused_optimizer"}, "compiled nothing"),
    ({"valid": False}, "NaN"),
)


@pytest.mark.parametrize("changes", HEALTHY)
def test_a_technique_that_worked_is_not_doubted(changes, monkeypatch):
    assert doubt(monkeypatch, **changes) == []


@pytest.mark.parametrize("changes, words", SUSPICIOUS)
def test_a_technique_that_did_nothing_is_doubted_in_one_sentence(changes, words, monkeypatch):
    (found,) = doubt(monkeypatch, **changes)
    assert words in found and "\n" not in found and ";" not in found  # runs.csv joins them with semicolons


def test_every_doubt_is_told(monkeypatch):
    every = {"attention": another_attention, "optimizer": AdamW8bit(), "compiled": True, "matmul_error": 3e-4,
             "graph_breaks": 1, "cuda_graphs": 0.0, "valid": False}
    assert len(doubt(monkeypatch, **every)) == 6


def test_a_cpu_is_not_blamed_for_what_only_a_gpu_has(monkeypatch, tokens):
    run = a_run("flash_attention", tokens=tokens)
    row = fingerprint(run, iter(())) | {"scripts": "flash_attention", "valid": True}
    assert doubts(run, row) == []


def test_tf32_on_a_cpu_is_doubted_in_the_words_of_the_real_fingerprint(tokens):
    run = a_run("tensorFloat32", tokens=tokens)
    row = fingerprint(run, iter(())) | {"scripts": "tensorFloat32", "valid": True}
    assert row["matmul_precision"] == "high"
    assert ["TF32" in found for found in doubts(run, row)] == [True]
