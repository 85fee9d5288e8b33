import json
import logging
import math
import os
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainer.tracking
from shared.errors import RunError
from trainer.config import TrackingConfig
from trainer.tracking import Tracker

OFF = TrackingConfig()
OFFLINE = TrackingConfig(wandb="offline", project="tiny", name="first")


def lines(run_dir: Path) -> list[dict[str, Any]]:
    text = (run_dir / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def log_steps(
    run_dir: Path, steps: range, config: TrackingConfig = OFF, start_step: int = 0
) -> None:
    with Tracker(run_dir, config, {"lr": 0.5}, start_step) as tracker:
        for step in steps:
            tracker.log(step, {"train/loss": 1.0 / step})


class FakeWandb:
    """Stands where the wandb module would; ignores row numbers that do not rise, as W&B does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.points: list[dict[str, Any]] = []
        self.ids: set[str] = set()
        self.axes: list[tuple[str, str | None]] = []
        self.last_row = -1
        self.url, self.dir = None, "somewhere"
        self.init_arguments: dict[str, Any] = {}

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802  # wandb's own name
        return settings

    def setup(self, settings: dict[str, Any]) -> None:
        self.calls.append(f"setup {settings['mode']}")

    def init(self, **arguments: Any) -> "FakeWandb":
        self.calls.append("init")
        self.ids.add(arguments["id"])
        self.init_arguments = arguments
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, record: dict[str, Any], step: int) -> None:
        if step > self.last_row:
            self.last_row = step
            self.points.append(record)

    def finish(self) -> None:
        self.calls.append("finish")

    def teardown(self) -> None:
        self.calls.append("teardown")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_every_step_is_one_line_that_is_on_disk_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    with Tracker(run_dir, OFF, {}) as tracker:
        for step in range(3):
            tracker.log(step, {"train/loss": 0.5, "eval/tau_tree": {"8": [1, 2.5]}})
            assert len(lines(run_dir)) == step + 1
    first = (run_dir / "metrics.jsonl").read_text().splitlines()[0]
    assert first == '{"step": 0, "train/loss": 0.5, "eval/tau_tree": {"8": [1, 2.5]}}'


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    with Tracker(tmp_path, OFF, {}) as tracker:
        tracker.log(1, {"a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}, "e": True})
    assert lines(tmp_path) == [
        {"step": 1, "a": None, "b": [None, 1.0], "c": {"d": None}, "e": True}
    ]


def test_a_step_twice_or_backwards_is_refused(tmp_path: Path) -> None:
    with Tracker(tmp_path, OFF, {}) as tracker:
        tracker.log(4, {})
        for step in (4, 3):
            with pytest.raises(ValueError, match="greater than 4"):
                tracker.log(step, {})
    assert [line["step"] for line in lines(tmp_path)] == [4]


def test_resume_cuts_later_lines_and_none_is_lost_or_doubled(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 18))
    log_steps(tmp_path, range(11, 31), start_step=10)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 31))
    with Tracker(tmp_path, OFF, {}, start_step=20):
        pass
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 21))


def test_a_run_that_starts_at_step_0_starts_an_empty_file(tmp_path: Path) -> None:
    with Tracker(tmp_path, OFF, {}) as tracker:
        tracker.log(0, {"eval/loss": 2.0})
        tracker.log(1, {})
    with Tracker(tmp_path, OFF, {}, start_step=0) as tracker:
        tracker.log(0, {"eval/loss": 3.0})
    assert lines(tmp_path) == [{"step": 0, "eval/loss": 3.0}]


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        pytest.param(b'{"step": 3, "train/lo', [1, 2], id="half-a-line"),
        pytest.param(b'{"step": 3', [1, 2], id="half-a-step"),
        pytest.param(b"\0\0\0\0\n", [1, 2], id="zeros-after-a-power-cut"),
        pytest.param(b"7\n", [1, 2], id="not-an-object"),
        pytest.param(b'{"step": 3, "x": 1}', [1, 2, 3], id="only-the-line-end-is-missing"),
    ],
)
def test_a_line_cut_short_is_dropped_before_the_next_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tail: bytes, kept: list[int]
) -> None:
    log_steps(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    with Tracker(tmp_path, OFF, {}, start_step=5) as tracker:
        tracker.log(6, {})
    assert [line["step"] for line in lines(tmp_path)] == [*kept, 6]
    assert ("cut short" in caplog.text) == (3 not in kept)


def test_a_full_disk_delays_lines_and_loses_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    tracker = Tracker(tmp_path, OFF, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for step in range(1, 101):
            tracker.log(step, {"train/loss": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").stat().st_size == 1000
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    tracker.log(101, {"train/loss": 0.5})
    tracker.finish()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 102))


def test_lines_that_a_full_disk_delayed_are_there_before_a_checkpoint_is(tmp_path: Path) -> None:
    """Killed behind it, the run goes on after them and never makes them again."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    tracker = Tracker(tmp_path, OFF, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        tracker.log(1, {"train/loss": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tracker.sync()
    assert [line["step"] for line in lines(tmp_path)] == [1]
    tracker.finish()


def test_lines_that_never_reach_the_disk_are_an_error_at_the_end(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    tracker = Tracker(tmp_path, OFF, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        tracker.log(1, {"train/loss": 0.5})
        with pytest.raises(RunError, match="the last 1 lines could not be written"):
            tracker.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_wandb_is_imported_only_when_asked_for(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from trainer.tracking import *\n"
        "with Tracker(Path(sys.argv[1]), TrackingConfig(), {}) as tracker: tracker.log(1, {})\n"
        "assert not {'wandb', 'torch', 'transformers'} & sys.modules.keys()"
    )
    root = Path(trainer.tracking.__file__).parents[1]
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=root)


def test_offline_is_decided_before_the_first_call(tmp_path: Path, fake: FakeWandb) -> None:
    log_steps(tmp_path, range(1, 4), OFFLINE)
    assert fake.calls == ["setup offline", "init", "finish", "teardown"]
    assert fake.init_arguments["mode"] == "offline"
    assert fake.init_arguments["resume"] is None
    assert fake.init_arguments["dir"] == tmp_path
    assert fake.init_arguments["config"] == {"lr": 0.5}
    assert (fake.init_arguments["project"], fake.init_arguments["name"]) == ("tiny", "first")
    assert fake.axes == [("step", None), ("*", "step")]
    assert [point["step"] for point in fake.points] == [1, 2, 3]


def test_online_resumes_the_same_run(tmp_path: Path, fake: FakeWandb) -> None:
    config = TrackingConfig(wandb="online")
    log_steps(tmp_path, range(1, 3), config)
    log_steps(tmp_path, range(3, 5), config, start_step=2)
    assert fake.init_arguments["resume"] == "allow"
    assert fake.ids == {json.loads((tmp_path / "wandb.json").read_text())["id"]}


def test_no_point_is_ignored_after_resuming_from_older_checkpoints(
    tmp_path: Path, fake: FakeWandb
) -> None:
    log_steps(tmp_path, range(1, 18), OFFLINE)
    log_steps(tmp_path, range(11, 15), OFFLINE, start_step=10)
    log_steps(tmp_path, range(11, 31), OFFLINE, start_step=10)
    assert [point["step"] for point in fake.points] == [
        *range(1, 18),
        *range(11, 15),
        *range(11, 31),
    ]
    assert len(fake.ids) == 1
    log_steps(tmp_path, range(1, 3), OFFLINE)  # killed before the first checkpoint
    assert [point["step"] for point in fake.points[-2:]] == [1, 2]


def test_a_failed_start_is_one_warning(
    tmp_path: Path,
    fake: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def init(**_: Any) -> None:
        raise TimeoutError("no answer in 60 s")

    monkeypatch.setattr(fake, "init", init)
    log_steps(tmp_path, range(1, 6), OFFLINE)
    assert "could not be started (TimeoutError: no answer in 60 s)" in caplog.text
    assert "W&B missed 5 of 5 steps" in caplog.text
    assert fake.calls == ["setup offline", "teardown"]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_missing_wandb_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    log_steps(tmp_path, range(1, 4), OFFLINE)
    assert "could not be started (ModuleNotFoundError" in caplog.text
    assert len(lines(tmp_path)) == 3


def test_wandb_that_dies_on_the_way_is_counted(
    tmp_path: Path,
    fake: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = fake.log

    def log(record: dict[str, Any], step: int) -> None:
        if record["step"] > 5:
            raise ConnectionError("service is gone")
        real(record, step)

    monkeypatch.setattr(fake, "log", log)
    log_steps(tmp_path, range(1, 21), OFFLINE)
    assert caplog.text.count("service is gone") == 1
    assert "W&B missed 15 of 20 steps" in caplog.text
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 21))


@pytest.fixture
def stuck(fake: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    """A W&B that does not come back from `init` until the test is over, or for a minute."""
    release = threading.Event()
    real = fake.init

    def init(**arguments: Any) -> FakeWandb:
        release.wait(60)
        return real(**arguments)

    monkeypatch.setattr(fake, "init", init)
    yield fake
    release.set()


def test_a_stuck_wandb_delays_no_step_and_costs_no_line(
    tmp_path: Path, stuck: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(tmp_path, OFFLINE, {})
    for step in range(1, 501):
        tracker.log(step, {"train/loss": 1.0})
    tracker.finish(timeout=0.2)
    assert "init" not in stuck.calls  # else somebody waited until it was there
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 501))
    assert "did not finish within 0.2 s" in caplog.text
    assert "W&B missed 500 of 500 steps" in caplog.text


def test_a_full_queue_drops_for_wandb_only_and_says_how_many(
    tmp_path: Path,
    stuck: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trainer.tracking, "QUEUE_STEPS", 5)
    tracker = Tracker(tmp_path, OFFLINE, {})
    for step in range(1, 9):
        tracker.log(step, {"train/loss": 1.0})
    tracker.finish(timeout=0.05)
    assert "init" not in stuck.calls
    dropped = [line["tracking/wandb_dropped"] for line in lines(tmp_path)]
    assert dropped == [0, 0, 0, 0, 0, 0, 1, 2]
    assert "did not finish within 0.05 s" in caplog.text


def test_nothing_is_said_when_all_went_well(
    tmp_path: Path, fake: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        log_steps(tmp_path, range(1, 100), OFFLINE)
    assert caplog.records == []


def wandb_records(path: Path) -> Iterator[bytes]:
    """Records of a .wandb file: LevelDB log framing after a header of seven bytes."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    offset, partial = 7, b""
    while offset < len(data):
        left = 32768 - offset % 32768
        if left < 7:
            offset += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, offset)
        if kind == 0:
            offset += left
            continue
        record = data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind == 1:
            yield record
        elif kind == 2:
            partial = record
        else:
            partial += record
            if kind == 4:
                yield partial


def wandb_history(path: Path) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    history = []
    for data in wandb_records(path):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # made at import
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in items
                }
            )
    return history


def test_a_real_offline_run_holds_every_step_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    for place in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):  # shared by all that is in a home
        monkeypatch.setenv(f"WANDB_{place}_DIR", str(tmp_path / "home"))
    monkeypatch.setattr(trainer.tracking, "INIT_TIMEOUT_SECONDS", 300.0)
    for begin, end in ((1, 801), (601, 1001)):
        tracker = Tracker(tmp_path, OFFLINE, {}, start_step=begin - 1)
        for step in range(begin, end):
            tracker.log(step, {"train/loss": 1.0 / step})
        tracker.finish(timeout=300)  # a busy machine takes its time to start W&B's service
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    run_id = json.loads((tmp_path / "wandb.json").read_text())["id"]
    files = tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    parts = sorted((wandb_history(file) for file in files), key=lambda part: part[0]["_step"])
    rows = [row for part in parts for row in part]
    assert [row["step"] for row in rows] == [*range(1, 801), *range(601, 1001)]
    assert all(row["train/loss"] == 1.0 / row["step"] for row in rows)
    assert [row["_step"] for row in rows] == list(range(1, 1201))
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 1001))
