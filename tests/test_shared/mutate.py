"""Strategies for damaged metadata."""

import json
import struct
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**300, max_value=10**400)
    | st.floats()
    | st.text()
)
json_values = st.recursive(
    _leaves,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children),
    max_leaves=8,
)
"""What a JSON parser may return, NaN and huge numbers included."""


def _places(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    places = [prefix] if prefix else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, dict | list):
            places += _places(value, (*prefix, key))
        else:
            places.append((*prefix, key))
    return places


@st.composite
def mutated(draw: st.DrawFn, tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with one value replaced, one key removed, or one key renamed, anywhere."""
    tree = deepcopy(tree)
    *parents, last = draw(st.sampled_from(_places(tree)))
    node: Any = tree
    for key in parents:
        node = node[key]
    match draw(st.sampled_from(["replace", "remove", "rename"])):
        case "rename" if isinstance(node, dict):
            node[draw(st.text())] = node.pop(last)
        case "remove":
            del node[last]
        case _:
            node[last] = draw(json_values)
    return tree


def safetensors(header: Any, body: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@st.composite
def safetensors_files(draw: st.DrawFn, names: list[str]) -> bytes:
    """Well-formed files: any of `names`, of any type and small shape."""
    header: dict[str, Any] = {}
    body = b""
    sizes = {"U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "I16": 2, "BF16": 2, "F16": 2}
    sizes |= {"I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8}
    for name in draw(st.lists(st.sampled_from(names), unique=True)):
        kind = draw(st.sampled_from(sorted(sizes)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = sizes[kind]
        for length in shape:
            size *= length
        offsets = [len(body), len(body) + size]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": offsets}
        body += bytes(size)
    return safetensors(header, body)
