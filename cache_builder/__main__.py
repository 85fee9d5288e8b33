"""`python -m cache_builder`, and the console script `cache-builder`."""

from cache_builder import cli as builder_cli
from shared import cli


def main() -> None:
    cli.run(builder_cli.main)


if __name__ == "__main__":
    main()
