"""Names of what a cache consists of, below its path. Normative: FORMAT.md."""

FORMAT = "draftcache"
DESCRIPTION = "cache.json"
MANIFEST = "manifest.json"
HEAD = "head.safetensors"
PROJECTION = "projection.safetensors"
TARGET = "target"
RECORDS = "records"
GENERATIONS = "generations"
CALIBRATIONS = "calibrations"
PLANS = "plans"
WIP = "wip"


def generation_key(generation: int, suffix: str) -> str:
    return f"{GENERATIONS}/{generation:04d}.{suffix}"


def record_key(shard_id: str) -> str:
    return f"{RECORDS}/{shard_id}.json"


def calibration_key(name: str) -> str:
    return f"{CALIBRATIONS}/{name}.safetensors"
