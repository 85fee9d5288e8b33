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


def duration(seconds: float) -> str:
    """`90 s`, `12 min`, `3.4 h`, `2.5 days`: of a time that is not known more closely."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 47.95 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.1f} days"
