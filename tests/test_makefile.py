"""What `make` makes of its variables, by what `make help` says of them."""

import os
import shutil
import subprocess

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str) -> str:
    inherited = ("MAKEFLAGS", "MAKELEVEL", "CONFIG", "CACHE", "RUN", "DATA", "SET")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    done = subprocess.run(
        ["make", *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("qwen3.6-27b", "qwen3.6-27b"),
        ("mine/own.v2.toml", "own.v2"),
    ],
)
def test_cache_and_run_have_the_name_of_the_configuration(config: str, name: str) -> None:
    assert f"CACHE=caches/{name} RUN=runs/{name} " in make("help", f"CONFIG={config}")
