"""Rows of Parquet and Arrow files, some at a time."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shared.errors import DataError

_BATCH_ROWS = 256
"""In memory at once. An Arrow file has batches of its own, of 1,000 rows as `datasets` writes."""

_BUFFER_BYTES = 2**20
"""Of each column: without it whole columns of a row group are read, however large that is."""

_Convert = Callable[[Any], Any]


def is_table(path: Path) -> bool:
    return path.suffix in (".parquet", ".arrow")


def read_table(path: Path) -> Iterator[dict[str, Any]]:
    """The rows as JSON values.

    A table has every field in every row, null where a row had none; such fields are left out
    again, at every depth. Columns that hold JSON (`datasets.Json`) are read.

    Raises:
        DataError: the package pyarrow is missing.
        ValueError, OSError: the file cannot be read, pyarrow's own errors included.
    """
    for batch in _read_batches(path):
        convert = _converter(batch.schema)
        for row in batch.to_pylist():
            yield convert(row)


def count_table_rows(path: Path) -> int:
    """Rows of a file; of Parquet, without reading it.

    Raises:
        As `read_table`.
    """
    if path.suffix == ".parquet":
        with _pyarrow("pyarrow.parquet").ParquetFile(path) as file:
            return int(file.metadata.num_rows)
    return sum(batch.num_rows for batch in _read_batches(path))


def _read_batches(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        parquet = _pyarrow("pyarrow.parquet")
        with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            yield from file.iter_batches(_BATCH_ROWS)
    else:
        arrow = _pyarrow("pyarrow")
        with arrow.memory_map(str(path)) as data, arrow.ipc.open_stream(data) as stream:
            yield from stream


def _converter(schema: Any) -> _Convert:
    """Makes JSON values of rows of this type, a schema or the type of a column."""
    arrow = _pyarrow("pyarrow")
    types = arrow.types

    def of(kind: Any) -> _Convert:
        if isinstance(kind, arrow.BaseExtensionType):
            return _from_json if kind.extension_name == "arrow.json" else of(kind.storage_type)
        if types.is_struct(kind):
            return of_fields(kind)
        if types.is_map(kind):
            item = of(kind.item_type)
            return lambda value: value and {key: item(part) for key, part in value}
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            element = of(kind.value_type)
            if element is _same:
                return _same
            return lambda value: value and [element(part) for part in value]
        return _same

    def of_fields(fields: Any) -> _Convert:
        parts = {field.name: of(field.type) for field in fields}

        def convert(value: Any) -> Any:
            return value and {
                name: parts[name](part) for name, part in value.items() if part is not None
            }

        return convert

    return of_fields(schema)


def _same(value: Any) -> Any:
    return value


def _from_json(value: str | None) -> Any:
    return None if value is None else json.loads(value)


def _pyarrow(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            "reading Parquet and Arrow files needs the package pyarrow: "
            "pip install 'draftcache[datasets]'"
        ) from None
