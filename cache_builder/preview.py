"""What a build would make of the data: some samples as text, and an account of the rows."""

from collections.abc import Callable, Iterator
from itertools import groupby, islice

import click

from cache_builder.config import BuildConfig
from cache_builder.corpus import TokenizedSample
from cache_builder.planning import describe_writers, open_corpus
from cache_builder.target_config import load_config
from cache_builder.target_files import resolve_target
from cache_builder.template import ChatTemplate
from cache_builder.tokens import describe_tokens, load_template
from shared.quantity import count

Paint = Callable[[str, bool, bool], str]
"""Shows a text, given whether it is supervised and whether it is a special token."""


def preview(
    config: BuildConfig, num_samples: int, *, num_rows: int, is_colored: bool
) -> Iterator[str]:
    """Lines for a person: samples, the supervised tokens marked, then the reasons of the drops.

    The target is not loaded and its weights are not hashed.

    Args:
        num_samples: shown, the first ones.
        num_rows: read at least, for the account, as far as there are that many.

    Raises:
        DataError: the data cannot be used.
    """
    path = resolve_target(config.target)
    template = load_template(path, config.data)
    model_config = load_config(path)
    describe_tokens(path, config.data, template, model_config)  # refuses what a build would refuse
    corpus = open_corpus(config, model_config.get_text_config().vocab_size, template)
    paint = _painted if is_colored else _plain
    for sample in islice(corpus, num_samples):
        yield from _show(sample, template, paint)
    while corpus.report.num_rows < num_rows and next(corpus, None) is not None:
        pass
    report = corpus.report
    yield report.describe()
    yield from report.describe_drops()
    if line := describe_writers(report, config.target):
        yield line


def _show(sample: TokenizedSample, template: ChatTemplate, paint: Paint) -> Iterator[str]:
    length, num_supervised = len(sample.token_ids), int(sample.loss_mask.sum())
    yield (
        f"--- {sample.file}:{sample.row}, {sample.source}: {count(length, 'token')}, "
        f"{num_supervised:,} supervised"
    )
    tokens = [
        (int(token_id), bool(is_supervised), int(token_id) in template.special_ids)
        for token_id, is_supervised in zip(sample.token_ids, sample.loss_mask, strict=True)
    ]
    parts = []
    for (is_supervised, is_special), run in groupby(tokens, key=lambda token: token[1:]):
        text = template.decode([token_id for token_id, *_ in run])
        parts.append(paint(_printable(text), is_supervised, is_special))
    yield "".join(parts)


def _painted(text: str, is_supervised: bool, is_special: bool) -> str:
    return click.style(
        text,
        fg="green" if is_supervised else "yellow" if is_special else None,
        bold=is_supervised,
        underline=is_special,
    )


def _plain(text: str, is_supervised: bool, is_special: bool) -> str:
    return f"[[{text}]]" if is_supervised else text


def _printable(text: str) -> str:
    """What is in the data must not steer the terminal."""
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else f"\\x{ord(sign):02x}" for sign in text
    )
