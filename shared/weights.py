"""Which weights a directory of a model holds."""

import logging
from pathlib import Path

from shared.errors import TargetError
from shared.files import canonical_json, sha256_bytes, sha256_file
from shared.quantity import count, size

logger = logging.getLogger(__name__)


def weights_sha256(path: Path) -> str:
    """Digest of the weight files of the model in `path`, of their names and their bytes.

    Raises:
        TargetError: there are no safetensors weights.
    """
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise TargetError(f"{path}: no *.safetensors weights. Convert the model first.")
    total = sum(file.stat().st_size for file in weights)
    logger.info("hashing %s, %s", count(len(weights), "weight file"), size(total))
    return sha256_bytes(canonical_json({file.name: sha256_file(file) for file in weights}))
