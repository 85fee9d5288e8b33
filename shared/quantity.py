"""Numbers as people read them."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def count(number: int, noun: str) -> str:
    """`1 sample`, `1,204 samples`. The plural of `noun` must be its own with an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: float) -> str:
    """`1 byte`, `999 bytes`, `1.00 kB`, `54.3 MB`: three digits, in powers of 1000."""
    value, unit = float(num_bytes), 0
    # 999.5 of one unit would be shown as 1000 of it.
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return count(round(value), "byte")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} {_UNITS[unit]}"
