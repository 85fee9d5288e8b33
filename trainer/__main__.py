"""`python -m trainer`, and the console script `trainer`."""

from shared import cli
from trainer import cli as trainer_cli


def main() -> None:
    cli.run(trainer_cli.main)


if __name__ == "__main__":
    main()
