"""The peers are of our shape, helped where they are slowed down, measured in turns; what goes wrong is one line."""

import os
import re
import subprocess
import sys

from tests.test_model import a_model, turned
from Utils.errors import UserError
from Utils.model import PRESETS

import pytest
import torch

pytest.importorskip("transformers")
from tests import peers  # noqa: E402

CONFIG = PRESETS["tiny"]
CPU = torch.device("cpu")


def batch(step):
    """(2, 3, T): the input and what comes next."""
    window = torch.randint(CONFIG.vocab_size, (3, CONFIG.block_size + 1), generator=torch.Generator().manual_seed(step))
    return torch.stack([window[:, :-1], window[:, 1:]])


def run_program(*arguments, **changes):
    command = [sys.executable, "-m", "tests.peers", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | changes  # several threads wait long on a busy machine
    return subprocess.run(command, cwd=peers.scripts.ROOT, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "causal"])
def test_a_peer_with_our_weights_has_our_loss(attention):
    ours, run = a_model(CONFIG), peers.peer(CONFIG, batch, CPU, attention)
    run.model.load_state_dict({name: turned(name, tensor) for name, tensor in ours.state_dict().items()})
    x, y = run.fetch(0)
    torch.testing.assert_close(run.forward(x, y), ours(x[:, :-1], y[:, :-1]), atol=1e-4, rtol=0)


def test_a_peer_gets_whole_batches_and_optimizes_all_its_weights():
    run, seen = peers.peer(CONFIG, batch, CPU, "eager"), []
    run.model.transformer.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    before = [parameter.clone() for parameter in run.model.parameters()]
    list(peers.train(run, range(2)))
    assert seen == 2 * [(3, CONFIG.block_size)]
    assert not any(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_the_helped_peer_is_one_graph_whose_attention_needs_no_mask(monkeypatch):
    graphs, compiler = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, mode: compiler(
        forward, backend=lambda graph, inputs: graphs.append(graph) or graph))
    run = peers.peer(CONFIG, batch, CPU, "causal", peers.helped)
    run.forward(*run.fetch(0))
    (graph,) = graphs
    calls = [node.kwargs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert [(call["is_causal"], call["attn_mask"]) for call in calls] == CONFIG.n_layer * [(True, None)]


def test_all_train_on_the_same_steps_in_turns_forth_and_back(monkeypatch):
    turns = []
    monkeypatch.setattr(peers, "train", lambda run, steps: turns.append((run, steps)) or [(1.0, 2.0) for _ in steps])
    seen = peers.measured({"a": "A", "b": "B"}, 3)
    assert "".join(run for run, _ in turns) == "ABBAABBAAB"
    assert seen == {name: ((1.0,) * 17, (2.0,) * 17) for name in "ab"}
    for name in "AB":
        assert [step for run, steps in turns if run == name for step in steps] == [*range(17)]


@pytest.mark.slow
def test_the_program_measures_all_on_a_cpu_and_prints_the_ratios():
    done = run_program("--model", "tiny", "--batch_size", "2", "--steps", "3", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert f"torch {torch.__version__}, transformers {peers.transformers.__version__}" in done.stdout
    losses = {name.rstrip(): float(loss) for name, loss in re.findall(r"^(.{35}).* (\d+\.\d{4})$", done.stdout, re.M)}
    assert len(losses) == 6
    for name, loss in losses.items():  # each has trained its own weights, and as many steps as the others
        start = "ours, baseline" if name.startswith("ours") else "transformers"
        assert loss == pytest.approx(losses[start], abs=5e-3), name
    ratios = re.findall(r"^(.*) / (.*): (\d\.\d+) of the time \(medians: \d\.\d+\)$", done.stdout, re.M)
    assert [(mine, theirs) for mine, theirs, _ in ratios] == [
        ("ours, baseline", "transformers"), ("ours, combined", "transformers, compiled"),
        ("ours, combined", "transformers, helped"), ("ours, combined", "transformers, helped, default mode")]


def the_line(done):
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_missing_transformers_is_one_line(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('none', name='transformers')")
    line = the_line(run_program(PYTHONPATH=str(tmp_path)))
    assert line == "peers.py: tests.peers needs transformers: pip install -r tests/requirements.txt"


def test_a_bad_setting_is_one_line():
    assert "'0' is not a whole number from 1" in the_line(run_program("--steps", "0"))


def test_a_batch_that_does_not_fit_is_told(monkeypatch):
    def full(runs, steps):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(sys, "argv", ["peers.py", "--model", "tiny", "--batch_size", "64"])
    monkeypatch.setattr(peers, "measured", full)
    with pytest.raises(UserError, match="choose a --batch_size .* below 64"):
        peers.main()
