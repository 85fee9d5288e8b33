"""The prompts of a dataset: its conversations without their answers, each once."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cache_builder.answer_file import KEY_BYTES, AnswerFile
from cache_builder.conversation import Conversation, Drop, RowRefusedError
from cache_builder.exchange import Prompt
from cache_builder.json_values import as_json
from cache_builder.record import parse_prompt
from cache_builder.rows import read_rows
from cache_builder.sources import DataFile
from cache_builder.template import ChatTemplate
from shared.errors import DataError
from shared.files import canonical_json, sha256_bytes

REPLACED_KEYS = frozenset(
    {
        *("messages", "conversations", "prompt", "response", "text", "system", "tools"),
        *("input_ids", "loss_mask", "finished", "finish_reason", "answered_by", "generated_by"),
        *("sampling", "chat_template_kwargs", "rendered_by"),
    }
)
"""Keys of a row that are written anew. Every other key is carried over."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PromptCounts:
    """What became of the rows that were read."""

    num_rows: int = 0
    num_present: int = 0
    """Answered by an earlier run into the same file."""

    num_duplicates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def num_passed_over(self) -> int:
        return self.num_present + self.num_duplicates + self.dropped.total()


def read_prompts(
    files: Sequence[DataFile],
    template: ChatTemplate,
    answers: AnswerFile,
    counts: PromptCounts,
    *,
    max_prompt_tokens: int,
    limit: int | None,
) -> Iterator[Prompt]:
    """The prompts that `answers` does not hold yet. Of each one read only its key stays in memory.

    Args:
        counts: filled while rows are read.
        limit: prompts at most, those in `answers` included.

    Raises:
        DataError: a file cannot be read, or there are no rows.
    """
    seen: set[bytes] = set()
    for file in files:
        for number, row in read_rows(file):
            if limit is not None and len(seen) >= limit:
                return
            counts.num_rows += 1
            place = f"{file}:{number}"
            conversation = parse_prompt(row)
            try:
                if isinstance(conversation, Drop):
                    raise RowRefusedError(conversation.reason, conversation.detail)
                template.require_no_control_token(conversation)
                roles = [message.role for message in conversation.messages]
                first = conversation.messages[: roles.index("assistant")]
                ids = tuple(template.prompt_ids(first, conversation.tools).tolist())
                carried = {
                    name: as_json(value, name)
                    for name, value in row.items()
                    if name not in REPLACED_KEYS
                }
            except RowRefusedError as error:
                counts.dropped[error.drop.reason] += 1
                logger.warning("%s: %s (%s)", place, error.drop.reason, error)
                continue
            if len(ids) > max_prompt_tokens:
                counts.dropped["too_long"] += 1
                logger.warning(
                    "%s: the prompt has %d tokens, at most %d leave room for an answer",
                    place,
                    len(ids),
                    max_prompt_tokens,
                )
                continue
            key = _key(conversation)
            if key in seen:
                counts.num_duplicates += 1
                continue
            seen.add(key)
            if answers.take(key):
                counts.num_present += 1
                continue
            yield Prompt(key, place, carried, conversation, ids)
    if not counts.num_rows:
        raise DataError(f"{', '.join(map(str, files))}: no rows.")


def _key(conversation: Conversation) -> bytes:
    asked = [[m.role, m.content, dict(m.fields)] for m in conversation.messages]
    digest = sha256_bytes(canonical_json([asked, [dict(t) for t in conversation.tools]]))
    return bytes.fromhex(digest)[:KEY_BYTES]
