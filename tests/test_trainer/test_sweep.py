"""A sweep: many runs of one cache, each a process, whatever happens to them or to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from shared import cli
from shared.errors import CacheNotFoundError, ConfigError, RunError
from tests.test_trainer.runs import evaluation
from tests.test_trainer.test_stop import CONFIG, lines
from trainer.checkpoint import load, newest_valid
from trainer.cli import main
from trainer.run import Run
from trainer.sweep import sweep as sweep_module
from trainer.sweep.command import run_sweep
from trainer.sweep.config import load_sweep
from trainer.sweep.files import list_files
from trainer.sweep.process import Traffic
from trainer.sweep.space import Space
from trainer.sweep.sweep import Sweep

REPOSITORY = Path(__file__).parent.parent.parent
FEW = ("train.steps=4", "evaluate.every_steps=2")
MANY = 20
SECONDS = 600
"""What is waited for at most; a busy machine takes its time to import torch."""

HELD = """
import os, sys, time

def hold(event, arguments):
    if event == "os.mkdir" and os.fsdecode(arguments[0]).endswith(".partial"):
        while os.path.exists({held!r}):
            time.sleep(0.01)

sys.addaudithook(hold)
"""
"""Run by Python as it starts: no checkpoint is begun while a file is there. A trial then comes to a
stand after two steps more, and does not end before the test has seen it."""

LR = '"optimizer.lr" = { low = 1e-4, high = 1e-2, log = true }'


@pytest.fixture
def files(tmp_path: Path, tiny_cache: Path) -> Callable[..., tuple[Path, Path]]:
    """Writes `sweep.toml` and `train.toml`: `files("trials = 2", LR)`."""

    def write(*parts: str) -> tuple[Path, Path]:
        head, space = parts[:-1], parts[-1]
        sweep, base = tmp_path / "sweep.toml", tmp_path / "train.toml"
        sweep.write_text("\n".join(["[sweep]", *head, "[sweep.space]", space, ""]))
        base.write_text(CONFIG.format(run=tmp_path / "unused", cache=tiny_cache))
        return sweep, base

    return write


def search(
    out: Path, files: tuple[Path, Path], overrides: Sequence[str] = FEW, **options: Any
) -> tuple[list[str], signal.Signals | None]:
    said: list[str] = []
    given = {"trials": None, "jobs": None, "say": said.append, **options}
    return said, run_sweep(out, *files, overrides, **given)


def study_of(out: Path) -> optuna.Study:
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{out / 'sweep.db'}")


def test_a_sweep_ends_with_a_table_and_a_page_and_leaves_the_cache_alone(
    files: Callable[..., tuple[Path, Path]],
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at a time; a trial that fails is a row with its reason, and the others go on."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    out, before = tmp_path / "out", list_files([tiny_cache])
    failing = '"drafter.mask_token_id" = { choices = [3, 5000] }'
    said, stopped_by = search(out, files("trials = 4", "jobs = 2", f"{LR}\n{failing}"))
    assert stopped_by is None
    trials = study_of(out).trials
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    assert {t.params["drafter.mask_token_id"] for t in trials} == {3, 5000}
    for trial in trials:
        run = out / f"trial-{trial.number:04d}"
        if trial.params["drafter.mask_token_id"] == 5000:
            assert trial.state == TrialState.FAIL
            assert "5000: the target's embedding has 272 rows" in trial.user_attrs["error"]
        else:
            assert trial.state == TrialState.COMPLETE
            last = Run(run).evaluations(4)[-1]
            assert (last["step"], last["tau_walk"]) == (4, trial.value)
            assert Run(run).config().optimizer.lr == trial.params["optimizer.lr"]
            assert lines(run)[0]["train/lr"] == trial.params["optimizer.lr"]
            read, from_disk, _ = trial.user_attrs["traffic"]
            assert from_disk >= 0
            assert read > 0
    assert said[0].split()[:3] == ["trial", "state", "tau_walk"]
    assert sum("failed" in line and "5000" in line for line in said) >= 1
    best = study_of(out).best_trial
    assert said[1].split()[0] == str(best.number)
    assert any(line.startswith("best of ") and f"trial {best.number}," in line for line in said)
    assert any(f"{len(before)} files" in line and "none changed" in line for line in said)
    assert list_files([tiny_cache]) == before
    page = (out / "sweep.html").read_text()
    assert "Parallel Coordinate" in page
    assert "Optimization History" in page
    assert "<script src" not in page  # plotly's is inside


class Command:
    """`trainer sweep` as a process, in a session of its own."""

    def __init__(self, out: Path, files: tuple[Path, Path]) -> None:
        self.out = out
        self._arguments = ["--config", files[1], "--space", files[0], "-o", out]

    def start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "trainer", "sweep", *map(str, self._arguments)],
            cwd=REPOSITORY,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait_for_steps(self, process: "subprocess.Popen[bytes]", counts: list[int]) -> None:
        def have(number: int) -> int:
            path = self.out / f"trial-{number:04d}" / "metrics.jsonl"
            return path.read_bytes().count(b"\n") if path.exists() else 0

        wait_until(
            lambda: all(have(number) > count for number, count in enumerate(counts)),
            lambda: process.poll() is None,
        )


def wait_until(condition: Callable[[], bool], alive: Callable[[], bool] = lambda: True) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's death signal")
@pytest.mark.slow
def test_a_sweep_that_is_interrupted_and_killed_goes_on(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, then SIGKILL: both times the trial saves, and the same one goes on."""
    held, hooks = tmp_path / "held", tmp_path / "hooks"
    held.touch()
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HELD.format(held=str(held)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hooks), str(REPOSITORY)]))
    out = tmp_path / "out"
    given = files("trials = 1", LR)
    text = given[1].read_text().replace("every_steps = 10\n", "every_steps = 0\n")
    text = text.replace("every_steps = 1000", "every_steps = 1")
    given[1].write_text(text.replace("steps = 30", f"steps = {MANY}", 1))
    command = Command(out, given)
    runs = [out / f"trial-{number:04d}" for number in range(1)]

    def stops(count: int) -> None:
        """Let the trial go on once it has been told to stop, for the `count`-th time."""
        log = out / "trial-0000.log"
        wait_until(lambda: log.read_text().count("SIGTERM: finishing this step") == count)
        held.unlink()

    process = command.start()
    command.wait_for_steps(process, [0])
    process.send_signal(signal.SIGINT)
    stops(1)
    assert process.wait(SECONDS) == 130
    assert all(newest_valid(run) is not None for run in runs)
    trials = study_of(out).trials
    assert [trial.state for trial in trials] == [TrialState.RUNNING]
    counts = [len(lines(run)) for run in runs]

    held.touch()
    process = command.start()
    command.wait_for_steps(process, counts)
    process.kill()
    process.wait()
    stops(2)
    wait_until(lambda: not any(Run(run).is_locked() for run in runs))
    for run, count in zip(runs, counts, strict=True):
        saved = newest_valid(run)
        assert saved is not None
        assert count < load(saved).step < MANY  # what was learned after the first stop is there

    process = command.start()
    assert process.wait(SECONDS) == 0
    ended = study_of(out).trials
    assert [trial.params for trial in ended] == [trial.params for trial in trials]
    assert [trial.state for trial in ended] == [TrialState.COMPLETE]
    for run in runs:
        assert [line["step"] for line in lines(run)] == list(range(1, MANY + 1))


class Scripted:
    """Stands for a trial's process: it writes the evaluations it is given, then ends.

    Each look at it advances by one evaluation.
    """

    def __init__(self, script: dict[str, Any], run: Run, environment: Mapping[str, str]) -> None:
        self._script, self._run = script, run
        self.environment = environment
        self._pending = list(script["taus"])
        self._code: int | None = None
        self.traffic = Traffic(100, 0, 10)
        self.stopped = 0

    def poll(self) -> int | None:
        if self._script.pop("interrupts", False):
            signal.raise_signal(signal.SIGINT)
        if self._code is None and self._pending:
            step, tau = self._pending.pop(0)
            digests = self._script.get("digests", {})
            self._run.path.mkdir(exist_ok=True)
            (self._run.path / "evaluations").mkdir(exist_ok=True)
            self._run.write_evaluation(step, evaluation(tau, **digests))
        elif self._code is None:
            self._code = self._script.get("code", 0)
        return self._code

    def stop(self) -> None:
        self.stopped += 1
        self._code = self._script.get("stop_code", 143)

    def wait(self) -> None:
        assert self._code is not None

    def last_error(self) -> str:
        return "out of luck"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]]], list[Scripted]]:
    """Replaces the processes of the trials, in their order, by scripts."""

    def install(scripts: list[dict[str, Any]]) -> list[Scripted]:
        started: list[Scripted] = []

        def start(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Scripted:
            run = Run(log.with_suffix(""))
            started.append(Scripted(scripts[len(started)], run, environment))
            return started[-1]

        monkeypatch.setattr(sweep_module, "TrialProcess", start)
        monkeypatch.setattr(sweep_module, "_POLL_SECONDS", 0.0)
        return started

    return install


def test_a_trial_below_the_median_is_pruned(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
) -> None:
    good = {"taus": [(0, 1.0), (2, 1.5), (4, 1.6)]}
    processes = scripted([good, good, {"taus": [(0, 1.0), (2, 1.1), (4, 9.9)]}])
    said, _ = search(tmp_path / "out", files("trials = 3", "startup_trials = 2", LR))
    assert [p.stopped for p in processes] == [0, 0, 1]
    trials = study_of(tmp_path / "out").trials
    assert [t.state.name for t in trials] == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert [t.value for t in trials] == [1.6, 1.6, 1.1]
    assert said[-5].split()[:4] == ["2", "pruned", "1.1000", "2"]


@pytest.mark.parametrize("code", [130, 143, -2, -15])
def test_a_trial_that_the_sweep_stops_is_resumed_however_young_it_was(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
    code: int,
) -> None:
    """Before it has handlers of its own a signal kills it: that is no fault of its settings."""
    whole = [(0, 1.0), (4, 1.6)]
    script = {"taus": whole, "interrupts": True, "stop_code": code}
    scripted([script, {"taus": whole}])
    given = files("trials = 1", LR)
    _, stopped_by = search(tmp_path / "out", given)
    assert stopped_by == signal.SIGINT
    (trial,) = study_of(tmp_path / "out").trials
    assert trial.state == TrialState.RUNNING
    search(tmp_path / "out", given)
    (ended,) = study_of(tmp_path / "out").trials
    assert (ended.state, ended.params) == (TrialState.COMPLETE, trial.params)


@pytest.mark.parametrize("code", [-2, -15])
def test_a_trial_that_others_kill_has_failed(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
    code: int,
) -> None:
    scripted([{"taus": [(0, 1.0)], "code": code}])
    with pytest.raises(RunError, match=f"killed by {signal.Signals(-code).name}"):
        search(tmp_path / "out", files("trials = 1", LR))


def test_a_pruned_trial_is_pruned_however_it_ends(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
) -> None:
    good = {"taus": [(0, 1.0), (2, 1.5), (4, 1.6)]}
    scripted([good, good, {"taus": [(0, 1.0), (2, 1.1)], "stop_code": -15}])
    search(tmp_path / "out", files("trials = 3", "startup_trials = 2", LR))
    states = [t.state.name for t in study_of(tmp_path / "out").trials]
    assert states == ["COMPLETE", "COMPLETE", "PRUNED"]


def test_without_pruning_every_trial_ends_and_a_loss_is_minimized(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
) -> None:
    taus = [1.5, 1.6, 1.1]  # losses of 3.5, 3.4, 3.9
    processes = scripted([{"taus": [(2, tau), (4, tau)]} for tau in taus])
    head = ("trials = 3", "startup_trials = 1", "prune = false", 'metric = "loss"')
    search(tmp_path / "out", files(*head, LR))
    assert [p.stopped for p in processes] == [0, 0, 0]
    assert study_of(tmp_path / "out").best_trial.number == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heldout_sha256", "held-out samples are not those of the first trial"),
        ("index_sha256", "cache holds other samples than that of the first trial"),
    ],
)
def test_a_trial_of_other_samples_is_not_compared(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
    name: str,
    message: str,
) -> None:
    """A cache that grows between two trials may leave the held-out samples as they are."""
    taus = [(0, 1.0), (4, 1.6)]
    processes = scripted([{"taus": taus}, {"taus": taus, "digests": {name: "cd" * 32}}])
    search(tmp_path / "out", files("trials = 2", LR))
    assert processes[1].stopped == 1
    trial = study_of(tmp_path / "out").trials[1]
    assert trial.state == TrialState.FAIL
    assert message in trial.user_attrs["error"]


def test_trials_of_several_caches_are_compared_where_the_space_names_them(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
    tiny_cache: Path,
) -> None:
    taus = [(0, 1.0), (4, 1.6)]
    scripted([{"taus": taus}, {"taus": taus, "digests": {"index_sha256": "cd" * 32}}])
    space = f'"cache.path" = {{ choices = ["{tiny_cache}", "elsewhere"] }}'
    search(tmp_path / "out", files("trials = 2", space))
    assert [t.state.name for t in study_of(tmp_path / "out").trials] == ["COMPLETE", "COMPLETE"]


def test_a_sweep_of_which_all_trials_failed_says_why(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
) -> None:
    scripted([{"taus": [], "code": 1}, {"taus": [(0, 1.0)], "code": -9}])
    with pytest.raises(RunError, match=r"all 2 trials failed; trial 1: killed by SIGKILL.*luck"):
        search(tmp_path / "out", files("trials = 2", LR))
    assert study_of(tmp_path / "out").trials[0].user_attrs["error"] == "out of luck"
    assert (tmp_path / "out" / "sweep.html").exists()


def test_a_run_whose_last_figure_is_missing_has_failed(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
) -> None:
    scripted([{"taus": [(2, 1.6)]}, {"taus": [(4, float("nan"))]}, {"taus": [(4, 1.0)]}])
    search(tmp_path / "out", files("trials = 3", LR))
    errors = [t.user_attrs.get("error") for t in study_of(tmp_path / "out").trials]
    assert errors == ["its last evaluation has no tau_walk"] * 2 + [None]


def test_more_trials_of_a_finished_sweep_are_new_ones(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
) -> None:
    """And the sampler, begun anew, does not repeat itself."""
    scripted([{"taus": [(4, 1.0 + i / 10)]} for i in range(4)])
    given = files("trials = 2", f"{LR}\nloss.gamma = {{ low = 2, high = 9 }}")
    search(tmp_path / "out", given)
    search(tmp_path / "out", given, trials=4)
    trials = study_of(tmp_path / "out").trials
    assert len({trial.params["optimizer.lr"] for trial in trials}) == 4
    assert any(trial.params["loss.gamma"] % 1 for trial in trials)  # a float, whatever its ends
    other = files("trials = 4", '"optimizer.lr" = { low = 1e-4, high = 2e-2, log = true }')
    with pytest.raises(RunError, match=r"other settings \(space.loss.gamma.*before.*now"):
        search(tmp_path / "out", other)


def test_values_that_only_together_do_not_fit_cost_their_trial(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
) -> None:
    """4 heads go with 1 or 2 key heads, 6 with 3 too; 4 with 3 is found when it is drawn."""
    processes = scripted([{"taus": [(4, 1.0)]} for _ in range(12)])
    heads = "drafter.num_heads = { choices = [6, 4] }"
    space = f"{heads}\ndrafter.num_kv_heads = {{ choices = [2, 3] }}"
    search(tmp_path / "out", files("trials = 12", space))
    trials = study_of(tmp_path / "out").trials
    failed = [t for t in trials if t.state == TrialState.FAIL]
    assert 0 < len(failed) < 12
    assert len(processes) == 12 - len(failed)
    for trial in failed:
        assert trial.params == {"drafter.num_heads": 4, "drafter.num_kv_heads": 3}
        assert "must be a multiple of num_kv_heads" in trial.user_attrs["error"]


def test_choices_may_be_lists_and_words(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
) -> None:
    scripted([{"taus": [(4, 1.0)]} for _ in range(6)])
    space = "optimizer.betas = { choices = [[0.9, 0.95], [0.8, 0.9]] }"
    kinds = 'loss.kind = { choices = ["decay", "dpace"] }'
    search(tmp_path / "out", files("trials = 6", f"{space}\n{kinds}"))
    params = [trial.params for trial in study_of(tmp_path / "out").trials]
    assert {p["optimizer.betas"] for p in params} == {"[0.9, 0.95]", "[0.8, 0.9]"}
    assert {p["loss.kind"] for p in params} == {"decay", "dpace"}


@pytest.mark.parametrize(
    ("head", "space", "message"),
    [
        ("", '"optimizer.lrr" = { low = 1, high = 2 }', "'lrr', did you mean 'lr'"),
        ("", '"optimiser.lr" = { low = 1, high = 2 }', "did you mean 'optimizer'"),
        ("", '"optimizer.lr.x" = { low = 1, high = 2 }', "'x', which lies in no section"),
        ("", "optimizer = { low = 1, high = 2 }", "optimizer: is a section"),
        ("", '"drafter.rope_scaling" = { choices = ["yarn"] }', "rope_scaling: is a section"),
        ("", '"run.path" = { choices = ["a"] }', "run.path is set by the sweep"),
        ("", '"loss.kind" = { low = 1, high = 2 }', "loss.kind is no number"),
        ("", '"train.seed" = { low = 0.5, high = 2 }', "train.seed is an integer"),
        ("", '"optimizer.lr" = { low = 1e-4, high = 1e3 }', r"lr must be in .*got 1000"),
        ("", '"loss.kind" = { choices = ["decay", "dpaec"] }', "did you mean 'dpace'"),
        ("", '"optimizer.lr" = { low = 2, high = 1 }', "low must be below high"),
        ("", '"optimizer.lr" = { low = 1 }', "expected low and high, or choices"),
        ("", '"optimizer.lr" = { low = 0, high = 1, log = true }', "log needs low above 0"),
        ("", '"optimizer.lr" = { low = 1, high = 2, choices = [1] }', "either choices or low"),
        ("", '"optimizer.lr" = { lo = 1, high = 2 }', "'lo', did you mean"),
        ("", "", "space must name at least one"),
        ('metric = "tau_wlak"', LR, "'tau_wlak', did you mean 'tau_walk'"),
        ('metric = "tau_tree.64"', LR, "unknown 'tau_tree.64'"),  # budgets are 4 and 8
        (
            'metric = "loss"\ntrials = 1',
            '"loss.gamma" = { low = 1.0, high = 9.0 }',
            "loss.gamma of the space",
        ),
        ("trails = 3", LR, "'trails', did you mean 'trials'"),
        ('devices = ["cpu", ""]', LR, "devices must not be empty"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_anything_runs(
    head: str,
    space: str,
    message: str,
    files: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=message):
        search(tmp_path / "out", files(head, space))
    assert not (tmp_path / "out").exists()


def test_a_setting_of_a_section_that_may_be_left_out_can_vary(
    files: Callable[..., tuple[Path, Path]],
) -> None:
    key = "drafter.rope_scaling.factor"
    sweep, base = files("trials = 1", f"{key} = {{ low = 1.0, high = 8.0 }}")
    with base.open("a") as file:
        file.write('[drafter.rope_scaling]\nrope_type = "linear"\nfactor = 2.0\n')
    space = Space(load_sweep(sweep), base, FEW)
    assert space.draw(optuna.trial.FixedTrial({key: 4.0})) == [f"{key}=4.0"]


@pytest.mark.parametrize(
    ("given", "head", "space", "message"),
    [
        ("optimizer.lr=1e-3", (), LR, r"--set optimizer.lr: sweep.space varies optimizer.lr\."),
        (
            "drafter.rope_scaling.factor=2.0",
            (),
            '"drafter.rope_scaling" = { choices = ["yarn"] }',
            r"--set drafter.rope_scaling.factor: sweep.space varies drafter.rope_scaling\.",
        ),
        ("run.path=elsewhere", (), LR, r"--set run.path: a sweep gives each trial its own"),
        ("tracking.name=mine", (), LR, r"--set tracking.name: a sweep gives each trial its own"),
        ("train.device=cpu", ('devices = ["cpu"]',), LR, "train.device is given by sweep.devices"),
        (
            "train.steps=4",
            ('devices = ["cpu"]',),
            '"train.device" = { choices = ["cpu", "auto"] }',
            "train.device is given by sweep.devices",
        ),
    ],
)
def test_what_the_sweep_would_replace_cannot_be_set(
    given: str,
    head: tuple[str, ...],
    space: str,
    message: str,
    files: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=message):
        search(tmp_path / "out", files(*head, space), [given])
    assert not (tmp_path / "out").exists()


def test_without_a_cache_nothing_is_begun(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    overrides = [*FEW, f"cache.path={tmp_path / 'nowhere'}"]
    with pytest.raises(CacheNotFoundError):
        search(tmp_path / "out", files(LR), overrides)
    assert not (tmp_path / "out").exists()


def test_without_held_out_samples_nothing_is_begun(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """No trial would have a figure to be judged by, which shows at the end of each."""
    with pytest.raises(ConfigError, match=r"tau_walk: no held-out sample.*heldout_fraction"):
        search(tmp_path / "out", files(LR), [*FEW, "cache.heldout_fraction=0"])
    assert not (tmp_path / "out").exists()


def test_devices_that_no_job_takes_are_named(
    files: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Sweep, "run", lambda self: None)
    given = files('devices = ["cpu", "cpu:1", "cpu:2"]', LR)
    search(tmp_path / "three", given, jobs=3)
    assert "sweep.devices" not in caplog.text
    search(tmp_path / "one", given)
    assert "sweep.devices: cpu:1, cpu:2 stay idle, since sweep.jobs is 1" in caplog.text


@pytest.mark.parametrize(
    ("jobs", "given", "expected"),
    [
        pytest.param(3, None, "2", id="shared"),
        pytest.param(9, None, "1", id="more-jobs-than-cores"),
        pytest.param(3, "5", "5", id="somebody-shared-them"),
        pytest.param(1, None, None, id="one-has-all"),
    ],
)
def test_jobs_share_the_cores(
    files: Callable[..., tuple[Path, Path]],
    scripted: Callable[[list[dict[str, Any]]], list[Scripted]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    jobs: int,
    given: str | None,
    expected: str | None,
) -> None:
    monkeypatch.setattr(sweep_module, "num_cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    processes = scripted([{"taus": [(0, 1.0), (4, 1.6)]}])
    search(tmp_path / "out", files("trials = 1", LR), jobs=jobs)
    (process,) = processes
    assert process.environment.get("OMP_NUM_THREADS") == expected


def test_a_directory_of_something_else_is_left_alone(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"not a sweep and not empty \(it has thesis.tex\)"):
        search(tmp_path / "out", files(LR))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_damaged_database_is_one_line(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sweep.db").write_bytes(b"no database" * 1000)
    with pytest.raises(RunError, match="database cannot be used"):
        search(tmp_path / "out", files(LR))


def test_the_extra_is_named_where_it_is_missing(
    files: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep, base = files(LR)
    for name in [name for name in sys.modules if name.startswith("trainer.sweep")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    arguments = ["sweep", "--config", base, "--space", sweep, "-o", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["trainer", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.run(main)
    assert exit_.value.code == 1
    assert "pip install 'draftcache[sweep]'" in capsys.readouterr().err
