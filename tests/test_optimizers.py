"""The optimizers do what AdamW does: against float64 arithmetic written out, and against each other."""

from types import SimpleNamespace

from Utils import scripts
from Utils.model import GPT2, PRESETS

import pytest
import torch

STEPS = 20
RATE = 3e-4
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01  # torch.optim.AdamW's defaults, which every script trains with
CHOOSERS = ("fused_optimizer", "8-bit_optimizer")
SMALLEST = 4096  # elements of a tensor that bitsandbytes gives 8-bit moments


def load(name):
    if name == "8-bit_optimizer":
        pytest.importorskip("bitsandbytes")
    return scripts.load(name)


def a_run(name=None, learning_rate=RATE):
    """A model (tiny, seed 0) with the optimizer of the script `name`; without a name, PyTorch's plain loop."""
    model = GPT2(PRESETS["tiny"])
    run = SimpleNamespace(model=model, learning_rate=learning_rate, device=torch.device("cpu"), forward=model.forward,
                          optimizer=torch.optim.AdamW(model.parameters(), lr=learning_rate, foreach=False))
    if name:
        load(name).optimize(run)
    return run


@pytest.fixture(scope="module")
def gradients(tokens):
    """The gradients of STEPS steps of real training: one list, in the order of the parameters, for each step."""
    run, recorded = a_run(), []
    for step in range(STEPS):
        window = torch.from_numpy(tokens[step * 132:(step + 1) * 132].astype("int64")).view(4, 33)
        run.forward(window[:, :-1].contiguous(), window[:, 1:].contiguous()).backward()
        recorded.append([parameter.grad.clone() for parameter in run.model.parameters()])
        run.optimizer.step()
        run.optimizer.zero_grad()
    return recorded


def follow(run, gradients):
    """The weights after the run's optimizer has been fed the gradients."""
    parameters = list(run.model.parameters())
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        run.optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def by_hand(gradients):
    """The same in float64, from the paper's algorithm 2 (decoupled weight decay)."""
    weights = [parameter.detach().double() for parameter in a_run().model.parameters()]
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for t, step in enumerate(gradients, 1):
        for w, m, v, g in zip(weights, first, second, (g.double() for g in step), strict=True):
            m += (1 - BETA1) * (g - m)
            v += (1 - BETA2) * (g * g - v)
            unbiased_m, unbiased_v = m / (1 - BETA1**t), v / (1 - BETA2**t)
            w -= RATE * (unbiased_m / (unbiased_v.sqrt() + EPSILON) + DECAY * w)
    return weights


def names():
    return [name for name, _ in a_run().model.named_parameters()]


def moved(weights):
    return [after.double() - before.detach().double()
            for after, before in zip(weights, a_run().model.parameters(), strict=True)]


@pytest.mark.parametrize("name", (None, "no_optimization", "fused_optimizer"))
def test_plain_and_fused_adamw_follow_float64_arithmetic(name, gradients):
    # A float32 near 1 (layer norms) is off by at most 6e-8 after each of 20 roundings; the weights moved by about 6e-3.
    for parameter, mine, exact in zip(names(), follow(a_run(name), gradients), by_hand(gradients), strict=True):
        assert (mine.double() - exact).abs().max() < 1.5e-6, parameter


def test_fused_adamw_takes_the_steps_of_plain_adamw(gradients):
    plain, fused = (moved(follow(a_run(name), gradients)) for name in (None, "fused_optimizer"))
    for parameter, a, b in zip(names(), plain, fused, strict=True):
        assert a.norm() > 0, parameter
        assert (a - b).norm() / a.norm() < 1e-5, parameter


def test_8_bit_adamw_takes_nearly_the_steps_of_plain_adamw(gradients):
    plain, small = (moved(follow(a_run(name), gradients)) for name in (None, "8-bit_optimizer"))
    for parameter, a, b in zip(names(), plain, small, strict=True):
        error = (a - b).norm() / a.norm()
        if a.numel() < SMALLEST:
            assert error < 1e-5, parameter  # moments in float32
        else:  # 8-bit codes: about two digits; wte's blocks mix rows that were seen with rows that never were
            assert 1e-3 < error < (0.15 if "wte" in parameter else 0.04), parameter


def test_8_bit_adamw_keeps_codes_for_large_tensors_and_float32_for_small_ones(gradients):
    run = a_run("8-bit_optimizer")
    follow(run, gradients[:2])
    dtypes = {}
    for name, parameter in run.model.named_parameters():
        state = run.optimizer.state[parameter]
        expected = torch.uint8 if parameter.numel() >= SMALLEST else torch.float32
        for moment in ("state1", "state2"):
            assert (state[moment].dtype, state[moment].shape) == (expected, parameter.shape), name
            assert state[moment].any(), name
        dtypes[parameter.numel()] = expected
        assert parameter.dtype == torch.float32
    assert dtypes[SMALLEST] == torch.uint8  # the tensors at the limit and below it are both there
    assert torch.float32 in dtypes.values()


def test_plain_and_fused_adamw_keep_float32_moments(gradients):
    for name in ("no_optimization", "fused_optimizer"):
        run = a_run(name)
        follow(run, gradients[:1])
        for parameter in run.model.parameters():
            state = run.optimizer.state[parameter]
            assert {state[moment].dtype for moment in ("exp_avg", "exp_avg_sq")} == {torch.float32}


@pytest.mark.parametrize("learning_rate", (RATE, 0.5))
@pytest.mark.parametrize("name", CHOOSERS)
def test_hyperparameters_are_those_of_the_baseline_and_the_rate_is_the_runs(name, learning_rate):
    baseline, run = a_run(None, learning_rate), a_run(name, learning_rate)
    (group,), (expected,) = run.optimizer.param_groups, baseline.optimizer.param_groups
    assert expected["weight_decay"] == DECAY and tuple(expected["betas"]) == (BETA1, BETA2)
    for setting in ("lr", "betas", "eps", "weight_decay"):
        assert group[setting] == expected[setting], setting
    assert group["lr"] == learning_rate
    assert not group.get("amsgrad") and not group.get("maximize")


@pytest.mark.parametrize("name", CHOOSERS)
def test_every_parameter_is_updated_and_the_tied_one_once(name):
    run = a_run(name)
    updated = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in updated} == {id(parameter) for parameter in run.model.parameters()}
    assert len(updated) == len(list(run.model.parameters()))


@pytest.mark.parametrize("name", (None, *CHOOSERS))
def test_weight_decay_alone_shrinks_every_weight(name):
    run = a_run(name, learning_rate=0.5)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    zeros = [torch.zeros_like(parameter) for parameter in before]
    for parameter, start in zip(follow(run, [zeros]), before, strict=True):
        torch.testing.assert_close(parameter, start * (1 - 0.5 * DECAY), rtol=1e-6, atol=0)


def test_scripts_that_choose_no_optimizer_leave_the_runs_own():
    for name in scripts.NAMES:
        run = a_run()
        before = run.optimizer
        load(name).optimize(run)
        assert (run.optimizer is not before) == (name in CHOOSERS), name
