"""One chunk: some tokens of one plane, compressed and checksummed.

C tokens of one chunk   W bytes of one token in its plane
"""

from typing import Any

import crc32c
import numpy as np
import numpy.typing as npt
from numcodecs import zstd
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import Crc32cCodec, ZstdCodec

from shared.codec import Codec
from shared.errors import CacheIncompatibleError, ShardCorruptError

CHUNK_TOKENS = 64
"""Tokens of one chunk. 1,024 read 3 to 5 times slower, 16 make the index 4 times longer."""

CRC_BYTES = 4

_LEVEL = 1
"""Of zstd. Higher ones are slower and no smaller on these data."""

_MAX_CHUNK_BYTES = (1 << 31) - 1 - (1 << 20)
"""What the compressor takes in one call."""

Array = npt.NDArray[Any]


def checksum(data: Any) -> int:
    """CRC-32C of a buffer."""
    return int(crc32c.crc32c(data))


def zarr_compressors() -> list[BytesBytesCodec]:
    """What `encode_chunk` does, for the metadata of the array."""
    return [ZstdCodec(level=_LEVEL, checksum=False), Crc32cCodec()]


def check_chunk_bytes(codec: Codec, num_layers: int, hidden_size: int) -> None:
    """Refuse chunks that the compressor cannot take.

    Raises:
        CacheIncompatibleError: one chunk is larger than 2 GiB, or has an odd number of channels
            where the codec stores pairs.
    """
    _, width = codec.plane_shape(num_layers, hidden_size)
    size = CHUNK_TOKENS * width
    if size > _MAX_CHUNK_BYTES:
        raise CacheIncompatibleError(
            f"a chunk of {CHUNK_TOKENS} tokens x {num_layers} layers x {hidden_size} channels has "
            f"{size:,} bytes, the compressor takes {_MAX_CHUNK_BYTES:,}. Capture fewer layers."
        )


def encode_chunk(chunk_CW: Array) -> tuple[bytes, int]:
    """One chunk as stored, and its crc32c (which is also its last four bytes)."""
    body = bytes(zstd.compress(np.ascontiguousarray(chunk_CW), _LEVEL))
    crc = checksum(body)
    return body + crc.to_bytes(CRC_BYTES, "little"), crc


def decode_chunk(data: Array, crc: int, out_CW: Array, where: str) -> None:
    """Check one stored chunk, uint8, against the checksum of the record, then decode it.

    Raises:
        ShardCorruptError: other bytes than were written, or they do not decode.
    """
    body = data[:-CRC_BYTES]
    if int.from_bytes(data[-CRC_BYTES:].tobytes(), "little") != crc or checksum(body) != crc:
        raise ShardCorruptError(
            f"{where}: checksum differs from the one written. Run `cache-builder repair`."
        )
    try:
        zstd.decompress(body, out_CW)
    except (RuntimeError, ValueError) as error:
        raise ShardCorruptError(f"{where}: does not decode ({error}).") from error
