"""What a build says about its data."""

import numpy as np
import pytest

from cache_builder.config import TargetConfig
from cache_builder.planning import describe_writers
from cache_builder.report import Tally


@pytest.mark.parametrize(
    ("target", "writers", "expected"),
    [
        pytest.param({"path": "Qwen/Qwen3-8B"}, ["Qwen/Qwen3-8B"], "", id="own"),
        pytest.param({"path": "/models/qwen3-8b/"}, ["Qwen/Qwen3-8B"], "", id="own-by-directory"),
        pytest.param({"path": ".demo/target", "name": "a/b"}, ["a/b", "b"], "", id="own-by-name"),
        pytest.param(
            {"path": "a/b"},
            ["b (greedy, a/c)", "b@0123", "a/b@vllm/completions"],
            "",
            id="own-with-a-remark",
        ),
        pytest.param({"path": "a/b"}, [], "", id="nothing"),
        pytest.param(
            {"path": "a/b"},
            ["b", "c/d", None, "c/d"],
            "3 of 4 samples not answered by the target 'b', by their `generated_by`: 2 by c/d, "
            "1 do not say by which model. ",
            id="others",
        ),
    ],
)
def test_samples_that_the_target_did_not_answer_are_one_sentence(
    target: dict[str, str], writers: list[str | None], expected: str
) -> None:
    tally = Tally()
    for writer in writers:
        tally.keep(source="s", generated_by=writer, num_tokens=int(np.int64(3)))
    line = describe_writers(tally.report(), TargetConfig(**target))
    assert line.startswith(expected)
    assert bool(line) == bool(expected)
