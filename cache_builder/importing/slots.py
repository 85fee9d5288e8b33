"""Which of the stored states become which blocks of the cache, as the user declares them."""

from dataclasses import dataclass
from typing import Any

from cache_builder.importing.config import DeclaredConfig
from shared.errors import DataError

_WHERE_IDS = {
    "speculators": (
        "they are --target-layer-ids of the vLLM launch script, which are 2, N//2 and N-3 of N "
        "blocks where it was not given, with N behind them unless the last layer was excluded: "
        "{default} for this target. Look into the launch command or its log"
    ),
    "specforge": (
        "they are target_layer_ids in the JSON configuration of the draft model that the capture "
        "was started with, under dflash_config"
    ),
}


@dataclass(frozen=True, slots=True)
class Slots:
    """The stored states that are kept."""

    columns: tuple[int, ...]
    """Positions among the stored states, in the order of the blocks."""

    target_layer_ids: tuple[int, ...]
    """The block of each, 0-based: its output before the final norm."""

    left_out: tuple[int, ...]
    """Ids, as declared, of states that are not kept."""

    def to_dict(self, declared: DeclaredConfig) -> dict[str, Any]:
        """What was declared, as JSON."""
        return {
            "layer_ids": list(declared.layer_ids),
            "layer_numbering": declared.layer_numbering,
            "last_hidden": declared.last_hidden,
            "left_out": list(self.left_out),
        }


def resolve_slots(
    declared: DeclaredConfig, kind: str, *, num_stored: int, num_layers: int
) -> Slots:
    """Turn declared ids into blocks.

    Args:
        num_stored: states per token in the files.
        num_layers: blocks of the target.

    Raises:
        DataError: something is not declared, or cannot be so.
    """
    ids = declared.layer_ids
    if not ids:
        default = (2, num_layers // 2, num_layers - 3, num_layers)
        where = _WHERE_IDS[kind].format(default=",".join(map(str, default)))
        raise DataError(
            f"--layer-ids is missing: the files hold {num_stored} states per token and do not say "
            f"of which layers. Give {num_stored} ids in the order stored; {where}."
        )
    if declared.layer_numbering is None:
        raise DataError(
            "--layer-numbering is missing: the files do not say what the layer ids count. `block`: "
            "id k is the output of decoder block k, from 0 (z-lab, SGLang, SpecForge). "
            "`hidden-states`: id k is entry k of transformers' hidden_states, whose 0 is the "
            "embedding (speculators, vLLM). Look into the documentation of the tool that captured; "
            "a wrong choice shifts every layer by one."
        )
    if len(ids) != num_stored:
        raise DataError(
            f"--layer-ids {_joined(ids)}: {len(ids)} ids, but the files hold {num_stored} states "
            "per token. Give one id for each, in the order stored, the last hidden state included."
        )
    if len(set(ids)) != len(ids):
        raise DataError(f"--layer-ids {_joined(ids)}: an id is named twice.")
    shift = 1 if declared.layer_numbering == "hidden-states" else 0
    if outside := [i for i in ids if not shift <= i < num_layers + shift]:
        other = "block" if shift else "hidden-states"
        hint = (
            f" All of them fit `{other}`: look whether the capture counted so."
            if all(1 - shift <= i < num_layers + 1 - shift for i in ids)
            else ""
        )
        raise DataError(
            f"--layer-ids {_joined(ids)}: {_joined(outside)} is out of range: the target has "
            f"{num_layers} blocks, in the numbering `{declared.layer_numbering}` {shift} to "
            f"{num_layers - 1 + shift}.{hint}"
        )
    last = num_layers - 1 + shift
    if declared.keep_last and last not in ids:
        raise DataError(
            f"--keep-last: none of --layer-ids {_joined(ids)} is the last block, {last} in the "
            f"numbering `{declared.layer_numbering}`. Leave it out, or correct the ids."
        )
    keeps_last = last in ids and _keeps_last(declared, last)
    kept = sorted((i - shift, column) for column, i in enumerate(ids) if i != last or keeps_last)
    if not kept:
        raise DataError(
            f"--layer-ids {_joined(ids)}: only the last block is stored, and it is left out by "
            "default. Import it with --keep-last."
        )
    return Slots(
        columns=tuple(column for _, column in kept),
        target_layer_ids=tuple(block for block, _ in kept),
        left_out=tuple(i for i in ids if i == last and not keeps_last),
    )


def _keeps_last(declared: DeclaredConfig, last: int) -> bool:
    if declared.last_hidden is None:
        raise DataError(
            f"--last-hidden is missing: id {last} is the output of the last block, and the files "
            "do not say whether it was taken before the target's final norm (`before-norm`: vLLM, "
            "and so speculators) or after it (`after-norm`: SGLang, and the last entry of "
            "transformers' hidden_states). Look into the documentation of the engine that captured."
        )
    if declared.keep_last and declared.last_hidden == "after-norm":
        raise DataError(
            f"--keep-last: id {last} is after the final norm, which cannot be undone; a cache "
            "holds blocks before it. Import without --keep-last."
        )
    return declared.keep_last


def _joined(ids: tuple[int, ...] | list[int]) -> str:
    return ",".join(map(str, ids))
