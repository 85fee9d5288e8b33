"""The configuration of one cache, one frozen dataclass per concern.

A default is written here and nowhere else.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from shared.location import Location
from shared.manifest import MAX_THREADS
from shared.spec import LastHidden

MAX_WORKERS = 1024
Launcher = Literal["local", "ray"]
MAX_DEVICES = 64
"""Of one worker."""

DEVICE = re.compile(r"cpu|cuda(:\d{1,4})?")


@dataclass(frozen=True, slots=True)
class Forward:
    """How the target is run. In bfloat16 on a CPU both decide how sums round: other values give
    other bits of the same states. A plan has them, so that every capture of its shards is alike.
    """

    batch_tokens: int
    """Tokens of one forward, padding included."""

    threads: int
    """CPU threads of one worker; nothing on a GPU."""

    def __post_init__(self) -> None:
        if min(self.batch_tokens, self.threads) < 1:
            raise ValueError("batch_tokens and threads must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    path: Location
    """Directory of the cache, or `s3://BUCKET/PREFIX`. Building again into it adds what is new."""

    scratch: Path | None = None
    """For a cache in a bucket: where this machine keeps the shards in progress and copies of the
    plans; unset takes the user's cache directory."""

    min_free_gb: float = 5.0
    """Space of the disk that stays free: a build stops cleanly before it goes below."""

    def __post_init__(self) -> None:
        if self.scratch is not None:
            if isinstance(self.path, Path):
                raise ValueError("scratch is for caches at s3://; one in a directory works there")
            object.__setattr__(self, "path", replace(self.path, scratch=self.scratch))
        if not 0 <= self.min_free_gb <= 1e9:
            raise ValueError(f"min_free_gb must be in [0, 1e9], got {self.min_free_gb:g}")

    @property
    def min_free_bytes(self) -> int:
        return int(self.min_free_gb * 1e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    path: str
    """Directory in Hugging Face format, or the name of a model on the hub."""

    name: str = ""
    """The target's name in the rows' `generated_by`, where `regenerate` writes it and a build looks
    for it; empty takes the end of `path`."""

    revision: str | None = None
    """Commit, branch or tag of a hub model; unset takes the newest. `cache.json` has the commit."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and computation. Never float16: massive activations leave its range."""

    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"

    def __post_init__(self) -> None:
        _check_path("path", self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    path: str
    """A file, a glob or a directory of JSON lines (*.jsonl, *.jsonl.gz) or Parquet (*.parquet), a
    directory that `datasets` saved, or `hub:OWNER/NAME[@REVISION][:SUBSET][:SPLIT]`."""

    tag: str = ""
    """Name by which the trainer can select these samples; empty takes each row's `source`, or that
    of its file or dataset where the row has none."""

    weight: float = 1.0
    """Share of its rows that is taken, by a hash of each row: the same ones at every build."""

    limit: int | None = None
    """Rows at most, those with the smallest hash; unset takes all."""

    def __post_init__(self) -> None:
        _check_path("path", self.path)
        if not 0.0 < self.weight <= 1.0:
            raise ValueError(f"weight must be in (0, 1], got {self.weight:g}")
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"limit must be positive, got {self.limit}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    sources: tuple[SourceConfig | str, ...]
    """Tables with `path`, `tag`, `weight` and `limit`, or plain paths."""

    max_length: int
    """Tokens of one sample at most."""

    truncation: Literal["cut", "drop"] = "cut"
    """What happens to a longer sample. Either is counted."""

    cut_off_answers: Literal["keep", "drop"] = "keep"
    """Answers that hit the token limit when generated. Kept, they get no end-of-turn token."""

    on_bad_row: Literal["count", "stop"] = "count"
    """Rows without a usable conversation: counted by reason, or an error."""

    supervise_text: bool = False
    """Use rows of plain text, with every token but the first supervised. Nothing in them is the
    target's own. Control tokens written in them (`<|im_end|>`) become tokens, so that rendered
    conversations can come this way."""

    template_arguments: dict[str, bool | int | str] = field(default_factory=dict)
    """Arguments of the chat template, for example `enable_thinking = false`."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources must name at least one file, glob or directory")
        if not 2 <= self.max_length < 2**31:
            raise ValueError(f"max_length must be in [2, 2**31), got {self.max_length}")
        for source in self.sources:
            if isinstance(source, str):
                _check_path("sources", source)

    @property
    def tagged_sources(self) -> list[SourceConfig]:
        return [SourceConfig(path=s) if isinstance(s, str) else s for s in self.sources]


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecConfig:
    preset: Literal["lossless", "balanced", "small"] = "balanced"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureConfig:
    target_layer_ids: tuple[int, ...] = ()
    """Decoder blocks to store, 0-based; empty takes `num_layers` by the DFlash rule."""

    num_layers: int = 5
    """Of `target_layer_ids` where they are empty; of no effect where they are set."""

    last_hidden: LastHidden = "none"
    """Also store the last hidden state, for losses that need the target's distribution: one more
    layer on disk, and the blocks above the last tap are run. `post_norm`, after the final norm, is
    what the LM head reads; `pre_norm` is for those who need the norm's input."""

    projection: Path | None = None
    """File that `trainer projection` wrote of a pilot of this target with these blocks: stored are
    its products with the states, a few times fewer values, instead of the states themselves."""

    batch_tokens: int = 16384
    """Tokens of one forward, padding included. One longer sample goes alone."""

    max_quarantined_fraction: float = 0.001
    """Share of samples with unusable states above which the build fails."""

    def __post_init__(self) -> None:
        ids = self.target_layer_ids
        if list(ids) != sorted(set(ids)) or (ids and ids[0] < 0):
            raise ValueError(
                f"target_layer_ids must ascend from 0 without repeats, got {list(ids)}"
            )
        if self.num_layers <= 0:
            raise ValueError(f"num_layers must be positive, got {self.num_layers}")
        if not 0 < self.batch_tokens <= 2**24:
            raise ValueError(f"batch_tokens must be in [1, 2**24], got {self.batch_tokens}")
        if not 0.0 <= self.max_quarantined_fraction <= 1.0:
            raise ValueError(
                f"max_quarantined_fraction must be in [0, 1], got {self.max_quarantined_fraction:g}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    shard_mib: float = 2048
    """Raw bfloat16 states in one shard, MiB. Stored it is a fifth to two thirds of that."""

    def __post_init__(self) -> None:
        if not 0 < self.shard_mib <= 2**24:
            raise ValueError(f"shard_mib must be in (0, 2**24], got {self.shard_mib:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    launcher: Launcher = "local"
    """`local`: processes of this machine. `ray`: actors on the nodes of a running Ray cluster, the
    one that Ray itself finds (RAY_ADDRESS, or started on this machine); it is never started here.
    """

    devices: Literal["auto", "cpu"] | tuple[str, ...] = "auto"
    """`auto`: all GPUs, or the CPU. Or a list such as ["cuda:0", "cuda:1"]; not under Ray, which
    gives each worker its GPUs."""

    devices_per_worker: int = 1
    """GPUs that share one copy of the target, each with some of its blocks: for targets that one
    does not hold. They work one after the other, so that a target that fits one is faster there."""

    num_workers: int = 0
    """Processes, each with the target in its memory; 0 takes one per GPU, or on a CPU as many as
    its cores and memory hold; under Ray as many as the cluster's resources hold. Never more than
    shards. One local worker runs inside the calling process.
    """

    num_tokenizers: int = 0
    """Processes that tokenize a dataset of more than 10,000 rows; 0 takes one per core, 8 at most.
    Any number gives the same samples."""

    threads: int = 1
    """CPU threads of one worker's forward. Many workers of one thread are faster than one of many,
    as long as memory holds a copy of the target for each. In bfloat16 other values give other bits.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.num_workers <= MAX_WORKERS:
            raise ValueError(f"num_workers must be in [0, {MAX_WORKERS}], got {self.num_workers}")
        if not 0 <= self.num_tokenizers <= MAX_WORKERS:
            raise ValueError(
                f"num_tokenizers must be in [0, {MAX_WORKERS}], got {self.num_tokenizers}"
            )
        names = () if isinstance(self.devices, str) else self.devices
        if not self.devices:
            raise ValueError('devices must name at least one, or be "auto"')
        if bad := [name for name in names if not DEVICE.fullmatch(name)]:
            raise ValueError(f'devices must be "cpu" or "cuda:N" each, got {bad[0]!r}')
        if self.launcher == "ray" and names:
            raise ValueError(
                'devices must be "auto" or "cpu" with launcher "ray", which picks GPUs'
            )
        if not 1 <= self.devices_per_worker <= MAX_DEVICES:
            raise ValueError(
                f"devices_per_worker must be in [1, {MAX_DEVICES}], got {self.devices_per_worker}"
            )
        if not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be in [1, {MAX_THREADS}], got {self.threads}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig:
    cache: CacheConfig
    target: TargetConfig
    data: DataConfig
    codec: CodecConfig = field(default_factory=CodecConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)

    @property
    def forward(self) -> Forward:
        """What decides the bits of bfloat16 states besides the capture spec."""
        return Forward(self.capture.batch_tokens, self.workers.threads)


def _check_path(name: str, text: str) -> None:
    """Raises ValueError for what the operating system takes for no path, or for this directory."""
    if not text.strip() or "\0" in text or len(text.encode(errors="replace")) > 4095:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise ValueError(f"{name} must be a path of 1 to 4095 bytes without NUL, got {shown!r}")
