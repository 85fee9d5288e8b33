"""Every variant with every seed, some at a time; what is done is not done again."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.files import read_json, remove_tree, write_bytes
from tests.conftest import REPOSITORY
from tests.experiments.variant import Cache, Variant
from tests.experiments.variants import CACHES, GROUPS, RECIPE, TRAIN_CONFIG, VARIANTS
from trainer.checkpoint import CHECKPOINTS

TARGET = REPOSITORY / ".demo" / "target"
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """One run that a result is wanted of."""

    variant: Variant
    seed: int

    def __str__(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"

    @property
    def settings(self) -> dict[str, str]:
        return {**RECIPE, **self.variant.settings, "train.seed": str(self.seed)}

    @property
    def key(self) -> str:
        """Of everything that decides the result but the code."""
        parts = [
            (REPOSITORY / TRAIN_CONFIG).read_text(),
            self.settings,
            self.variant.change,
            [cache.commands for cache in needed(self.variant.caches)],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def jobs_of(groups: Iterable[str]) -> list[Job]:
    """Jobs of these groups in the order of `GROUPS`, seed by seed, each once."""
    found: dict[Job, None] = {}
    for group in (GROUPS[name] for name in GROUPS if name in set(groups)):
        baseline, *variants = (VARIANTS[name] for name in (group.baseline, *group.variants))
        for seed in sorted({seed for variant in variants for seed in variant.seeds}):
            found |= {Job(v, seed): None for v in (baseline, *variants) if seed in v.seeds}
    return list(found)


def needed(names: Iterable[str]) -> list[Cache]:
    """These caches and those that they need, in the order in which they can be made."""
    found: dict[str, Cache] = {}

    def add(name: str) -> None:
        for other in CACHES[name].needs:
            add(other)
        found.setdefault(name, CACHES[name])

    for name in names:
        add(name)
    return list(found.values())


@dataclass(eq=False, slots=True)
class Results:
    """What is known of runs: a file of JSON lines, one run each."""

    path: Path
    by_key: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Results":
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        return cls(path, {record["key"]: record for record in records})

    def add(self, job: Job, facts: dict[str, Any]) -> None:
        """Keep the facts of a run that is done. Killed meanwhile, the file is as before."""
        if not job.variant.keeps_losses:
            facts = {k: v for k, v in facts.items() if k not in ("losses", "grad_norms")}
        record = {"key": job.key, "variant": job.variant.name, "seed": job.seed, **facts}
        self.by_key[job.key] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(self.path, lines_of(self.by_key.values()))

    def of(self, variant: str) -> dict[int, dict[str, Any]]:
        """The runs of a variant as it is defined now, by seed."""
        found = ((seed, Job(VARIANTS[variant], seed).key) for seed in VARIANTS[variant].seeds)
        return {seed: self.by_key[key] for seed, key in found if key in self.by_key}


def lines_of(records: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


class Runner:
    """Runs jobs below `directory`: caches, run directories and logs are there."""

    def __init__(
        self, directory: Path, results: Results, *, at_once: int, nice: int, say: Callable[..., Any]
    ) -> None:
        self._directory = directory
        self._results = results
        self._at_once = at_once
        self._nice = nice
        self._say = say

    def build(self, jobs: Sequence[Job]) -> None:
        """Make the caches that `jobs` read, or what is missing of them.

        Raises:
            RuntimeError: one of them cannot be made; those that were begun are finished.
        """
        self._caches.mkdir(parents=True, exist_ok=True)
        waiting = needed(name for job in jobs for name in job.variant.caches)
        made: set[str] = set()
        active: dict[Future[None], str] = {}
        pool = ThreadPoolExecutor(self._at_once)
        try:
            while waiting or active:
                for cache in [c for c in waiting if made.issuperset(c.needs)]:
                    waiting.remove(cache)
                    active[pool.submit(self._make, cache)] = cache.name
                for future in wait(active, return_when=FIRST_COMPLETED).done:
                    made.add(active.pop(future))
                    future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _make(self, cache: Cache) -> None:
        for words in cache.commands:
            filled = [word.replace("{caches}", str(self._caches)) for word in words]
            self._say(f"cache {cache.name}: {' '.join(filled)}")
            log = self._log(f"cache-{cache.name}")
            with self._process(filled, log) as process:
                code = process.wait()
            if code:
                raise RuntimeError(f"cache {cache.name}: exit code {code}, see {log}")

    def run(self, jobs: Sequence[Job]) -> list[Job]:
        """Run what has no result yet; returns the jobs that failed."""
        waiting = [job for job in jobs if job.key not in self._results.by_key]
        self._say(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done")
        total, seconds, failed = len(waiting), [], []
        active: list[tuple[Job, float, Any, subprocess.Popen[bytes]]] = []
        try:
            while waiting or active:
                while waiting and len(active) < self._at_once:
                    job = waiting.pop(0)
                    context = self._process(self._command(job), self._log(self._name(job)))
                    active.append((job, time.monotonic(), context, context.__enter__()))
                for entry in list(active):
                    job, began, context, process = entry
                    if process.poll() is None:
                        continue
                    active.remove(entry)
                    context.__exit__(None, None, None)
                    seconds.append(time.monotonic() - began)
                    left = len(waiting) + len(active) / 2
                    minutes = left * sum(seconds) / len(seconds) / self._at_once / 60
                    where = f"[{len(seconds)}/{total}] {job}: "
                    tail = f" ({seconds[-1]:.0f} s; about {minutes:.0f} min left)"
                    if process.returncode:
                        failed.append(job)
                        self._say(f"{where}failed, see {self._log(self._name(job))}{tail}")
                    else:
                        self._say(where + self._record(job) + tail)
                time.sleep(_POLL_SECONDS)
        finally:
            for *_, process in active:
                process.terminate()  # it finishes its step and saves
            for *_, context, _process in active:
                context.__exit__(None, None, None)
        return failed

    def _record(self, job: Job) -> str:
        """Keep the result of a run, and nothing else of it; returns a line about it."""
        facts = read_json(self._result(job))
        self._results.add(job, facts)
        remove_tree(self._run(job) / CHECKPOINTS)
        heldout = facts["heldout"]
        return (
            f"loss {heldout['loss']:.4f}, chain {heldout['tau_chain']:.4f}, "
            f"walk {heldout['tau_walk']:.4f}"
        )

    def _command(self, job: Job) -> list[str]:
        settings = {
            "run.path": str(self._run(job)),
            "cache.path": str(self._caches / job.variant.cache),
            **job.settings,
        }
        words = ["tests.experiments.one", "--config", str(REPOSITORY / TRAIN_CONFIG)]
        words += ["--target", str(TARGET), "--result", str(self._result(job))]
        if job.variant.change:
            words += ["--change", job.variant.change]
        if job.variant.also:
            words += ["--also", str(self._caches / job.variant.also)]
        return words + [word for pair in settings.items() for word in ("--set", "=".join(pair))]

    @contextmanager
    def _process(self, words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """`python -m WORDS` on one thread, at a lower priority; its output goes to `log`."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with (
            log.open("ab") as file,
            subprocess.Popen(
                ["nice", "-n", str(self._nice), sys.executable, "-m", *words],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            ) as process,
        ):
            yield process

    @property
    def _caches(self) -> Path:
        return self._directory / "caches"

    def _name(self, job: Job) -> str:
        return f"{job.variant.name}-{job.seed}-{job.key}"

    def _run(self, job: Job) -> Path:
        return self._directory / "runs" / self._name(job)

    def _result(self, job: Job) -> Path:
        return self._run(job).with_suffix(".json")

    def _log(self, name: str) -> Path:
        return self._directory / "logs" / f"{name}.log"
