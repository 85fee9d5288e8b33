"""The plans of a cache, wherever it lies. Plans are read as files: from a bucket, as copies."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_builder.plan import DESCRIPTION, Plan, find_plans, is_plan_id
from cache_builder.workspace import workspace
from shared.files import commit_directory, remove_tree, writing
from shared.layout import PLANS
from shared.location import Location, S3Url
from shared.object_storage import ObjectStorage
from shared.storage import Storage, open_storage

_COPY_BYTES = 1 << 24


def own_plans(cache: Location) -> list[Path]:
    """Directories of the plans, oldest first, for the builder that holds the cache's lock.

    Those of a bucket are copied into the workspace, and what else is there is removed: a plan that
    never reached the bucket is none. Parts of a plan in the bucket are removed, too.
    """
    place = workspace(cache) / PLANS
    if isinstance(cache, S3Url):
        storage = open_storage(cache)
        _remove_parts(storage)
        _copy(storage, place)
    return find_plans(place)


def plan_ids(cache: Location) -> list[str]:
    """Of the plans that are in the cache, oldest first."""
    if isinstance(cache, Path):
        return [directory.name for directory in find_plans(cache / PLANS)]
    return sorted(_stored_ids(open_storage(cache)), key=int)


@contextmanager
def readable_plan(cache: Location, plan_id: str) -> Iterator[Path]:
    """The directory of one plan, for whoever only reads the cache. It need not exist."""
    if isinstance(cache, Path):
        yield cache / PLANS / plan_id
        return
    with tempfile.TemporaryDirectory(prefix="draftcache-plan-") as name:
        yield fetch_plan(open_storage(cache), plan_id, Path(name))


def share_plan(cache: Location, plan: Plan) -> Plan:
    """Put a new plan into the bucket. `plan.json` goes last: with it the plan is there.

    Raises:
        CacheLockedError: another builder wrote a plan of this number.
    """
    if isinstance(cache, S3Url):
        storage = ObjectStorage(cache)
        for file in sorted(plan.directory.iterdir()):
            if file.name != DESCRIPTION:
                storage.put_file(file, f"{PLANS}/{plan.plan_id}/{file.name}")
        key = f"{PLANS}/{plan.plan_id}/{DESCRIPTION}"
        storage.put_over(key, (plan.directory / DESCRIPTION).read_bytes(), None)
    return plan


def _remove_parts(storage: Storage) -> None:
    names = filter(is_plan_id, storage.names(PLANS))
    parts = set(names).difference(_stored_ids(storage))
    storage.delete_trees(*(f"{PLANS}/{name}" for name in sorted(parts)))


def _stored_ids(storage: Storage) -> list[str]:
    names = filter(is_plan_id, storage.names(PLANS))
    return [name for name in names if storage.exists(f"{PLANS}/{name}/{DESCRIPTION}")]


def _copy(storage: Storage, place: Path) -> None:
    """Make `place` hold the plans of the bucket and no others."""
    stored = {n: storage.read(f"{PLANS}/{n}/{DESCRIPTION}") for n in _stored_ids(storage)}
    for directory in find_plans(place):
        description = directory / DESCRIPTION
        if not description.is_file() or stored.get(directory.name) != description.read_bytes():
            remove_tree(directory)
    for name in stored:
        if not (place / name).is_dir():
            fetch_plan(storage, name, place)


def fetch_plan(storage: Storage, plan_id: str, place: Path) -> Path:
    """Copy a plan of the bucket into `place`; returns its directory there."""
    wip = place / f"{plan_id}.wip"
    remove_tree(wip)
    with writing(wip):
        wip.mkdir(parents=True)
        for file, size in storage.sizes(f"{PLANS}/{plan_id}").items():
            with (wip / file).open("wb") as copy:
                for start in range(0, size, _COPY_BYTES):
                    part = min(_COPY_BYTES, size - start)
                    copy.write(storage.read_range(f"{PLANS}/{plan_id}/{file}", start, part))
        commit_directory(wip, place / plan_id)
    return place / plan_id
