"""The dataset as tokenized samples, one at a time, with an account of every row.

A row that cannot be used is dropped under a named reason, counted, and its place remembered.
Memory does not grow with the dataset but for some 18 bytes of identity per sample.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cache_builder.config import SourceConfig
from cache_builder.conversation import Drop, DropReason
from cache_builder.id_set import IdSet
from cache_builder.report import CHOSEN_DROPS, MAX_EXAMPLES, CorpusReport, Tally
from cache_builder.rows import CHANGED, NOT_CHOSEN, choose_below, read_rows
from cache_builder.sources import DataFile, find_files
from cache_builder.template import ChatTemplate
from cache_builder.tokenized_row import RowRules, TokenizedRow
from cache_builder.tokenizer_pool import tokenize_rows
from shared.errors import DataError
from shared.index import MAX_SOURCES
from shared.quantity import count
from shared.shard import SAMPLE_ID_BYTES

_LEFT_OUT = Drop(DropReason.NOT_CHOSEN, "weight or limit leave it out")
_Place = tuple[SourceConfig, DataFile, int]
"""Where a row is: its source, its file and its number there."""


@dataclass(frozen=True, eq=False)
class TokenizedSample:
    token_ids: npt.NDArray[np.int32]
    """int32 [S]."""

    loss_mask: npt.NDArray[np.uint8]
    """uint8 [S]: 1 where the target generated the token."""

    source: str
    file: str
    row: int
    """Line of `file`, from 1."""

    generated_by: str | None
    """The model that wrote the answers, as the record says."""

    @cached_property
    def sample_id(self) -> str:
        """Identity of the sample, 16 bytes in hex: a hash of ids and mask, and of nothing else."""
        digest = hashlib.sha256(b"draftcache.sample.1\0")
        digest.update(self.token_ids.astype("<i4").tobytes())
        digest.update(self.loss_mask.astype("u1").tobytes())
        return digest.digest()[:SAMPLE_ID_BYTES].hex()

    @cached_property
    def split_key(self) -> int:
        """A uint64 that samples with the same first prompt share.

        A held-out split by it keeps all answers to one prompt on one side. Where the prompt has
        fewer than two tokens (plain text has none), the whole sample counts.
        """
        first = int(np.argmax(self.loss_mask)) if self.loss_mask.any() else len(self.token_ids)
        ids = self.token_ids[:first] if first >= 2 else self.token_ids
        digest = hashlib.sha256(b"draftcache.split.1\0" + ids.astype("<i4").tobytes())
        return int.from_bytes(digest.digest()[:8], "little")


class CorpusReader(Iterator[TokenizedSample]):
    """Yields samples. `report` accounts for the rows read so far."""

    def __init__(self, samples: Iterator[TokenizedSample], tally: Tally) -> None:
        self._samples = samples
        self._tally = tally

    def __next__(self) -> TokenizedSample:
        return next(self._samples)

    @property
    def report(self) -> CorpusReport:
        return self._tally.report()


def read_corpus(
    sources: Sequence[SourceConfig],
    template: ChatTemplate,
    *,
    vocab_size: int,
    max_length: int,
    truncation: Literal["cut", "drop"],
    cut_off_answers: Literal["keep", "drop"],
    on_bad_row: Literal["count", "stop"],
    supervise_text: bool,
    digests: Mapping[Path, str] | None = None,
    known_tags: Collection[str] = (),
    on_drop: Callable[[str, int, Drop], None] | None = None,
    num_processes: int = 0,
) -> CorpusReader:
    """The samples of `sources` in order of files and rows, each identity once.

    Rows of plain text are used, with every token but the first supervised, only where
    `supervise_text` says so: nothing in them shows what the target would generate.

    Args:
        digests: of every file that is expected, by its path.
        known_tags: source tags that the cache has already.
        on_drop: called with file, row and reason of every row that is dropped, but for those that
            `weight` and `limit` of a source leave out.
        num_processes: as in `tokenize_rows`.

    Raises:
        DataError: a source names no file, or others than in `digests`. While reading: a file is
            not as its digest says, a line is not JSON, a row cannot be used and `on_bad_row` is
            `stop`, there are more than `MAX_SOURCES` tags, or no row at all can be used.
    """
    rules = RowRules(
        vocab_size=vocab_size,
        max_length=max_length,
        truncation=truncation,
        cut_off_answers=cut_off_answers,
        supervise_text=supervise_text,
    )
    files = [(source, find_files(source.path)) for source in sources]
    names = [file for _, own in files for file in own]
    if digests is not None and (others := sorted(digests.keys() ^ {file.path for file in names})):
        raise DataError(f"{others[0]}: {CHANGED}")
    tags = set(known_tags)
    tally = Tally()
    seen = IdSet()

    def use(
        row: TokenizedRow, source: SourceConfig, file: DataFile, number: int
    ) -> TokenizedSample | Drop:
        tokens = row.tokens
        sample = TokenizedSample(
            tokens.token_ids,
            tokens.loss_mask,
            source=source.tag or row.source or file.tag,
            file=str(file),
            row=number,
            generated_by=row.generated_by,
        )
        if not seen.add(bytes.fromhex(sample.sample_id)):
            return Drop(DropReason.DUPLICATE, f"sample {sample.sample_id}")
        tags.add(sample.source)
        if len(tags) > MAX_SOURCES:
            raise DataError(
                f"{file}:{number}: source tag {sample.source[:40]!r} is one more than the "
                f"{MAX_SOURCES:,} that a cache can have. Give the files of data.sources a `tag`."
            )
        tally.keep(
            source=sample.source,
            generated_by=sample.generated_by,
            num_tokens=len(sample.token_ids),
            num_supervised_tokens=int(sample.loss_mask.sum()),
            num_truncated=row.is_truncated,
            num_straddling_tokens=tokens.num_straddling,
            num_unthinking=tokens.num_unthinking,
            num_unsupervised_turns=tokens.num_unsupervised_turns,
        )
        return sample

    def rows() -> Iterator[tuple[_Place, Any]]:
        for source, own in files:
            below = choose_below(own, weight=source.weight, limit=source.limit)
            for file in own:
                digest = digests[file.path] if digests is not None else None
                for number, row in read_rows(file, digest=digest, below=below):
                    yield (source, file, number), _LEFT_OUT if row is NOT_CHOSEN else row

    def samples() -> Iterator[TokenizedSample]:
        for (source, file, number), outcome in tokenize_rows(
            rows(), template, rules, num_processes=num_processes
        ):
            tally.totals["num_rows"] += 1
            tally.totals["num_cut_off"] += outcome.is_cut_off
            row = outcome.result
            found = row if isinstance(row, Drop) else use(row, source, file, number)
            if isinstance(found, TokenizedSample):
                yield found
                continue
            tally.drop(f"{file}:{number}", found)
            if on_drop and found.reason != DropReason.NOT_CHOSEN:
                on_drop(file.name, number, found)
            if on_bad_row == "stop" and found.reason not in CHOSEN_DROPS:
                raise DataError(
                    f"{file}:{number}: {found.reason}: {found.detail}. Fix or delete the row, or "
                    'set data.on_bad_row = "count".'
                )
        _check_not_empty(tally.report(), [str(name) for name in names])

    return CorpusReader(samples(), tally)


def _check_not_empty(report: CorpusReport, files: Sequence[str]) -> None:
    if report.num_kept:
        return
    names = ", ".join(files[:MAX_EXAMPLES])
    if not report.num_rows:
        raise DataError(f"{names}: no rows. Expected one conversation per line as a JSON object.")
    reasons = "; ".join(
        f"{dropped.count} {reason} ({dropped.examples[0]})"
        for reason, dropped in report.dropped.items()
    )
    raise DataError(f"{names}: none of {count(report.num_rows, 'row')} can be used: {reasons}.")
