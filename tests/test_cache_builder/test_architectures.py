"""Any decoder: what a build stores of a target is what hooks see in an unpadded run of a sample.

Each type is built, saved, and then goes the way of a real target: described, loaded, captured in
batches of samples of mixed length, stored, and read from the cache.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cache_builder.build import build as build_cache
from cache_builder.config import BuildConfig, TargetConfig
from cache_builder.readout import TOLERANCE
from cache_builder.target import Target
from cache_builder.target_files import describe_target
from shared.cache import Cache
from shared.errors import TargetError
from tests.conftest import REPOSITORY, write_jsonl
from tests.test_cache_builder.models import ARCHITECTURES, REFUSED, Architecture, build
from tests.test_cache_builder.test_target import ids

pytestmark = pytest.mark.slow

LAYERS = (1, 3)
LENGTHS = (40, 17, 33, 3)
NOT_RMS = {"gpt2", "gpt_neox", "falcon", "opt", "cohere", "olmo"}
"""Types whose final norm is a LayerNorm."""

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, eq=False, slots=True)
class Case:
    """One architecture, its model in float32, and the cache of what a build captured of it."""

    architecture: Architecture
    model: Any
    path: Path
    cache: Path

    def target(self, last_hidden: Any, dtype: Any = "float32") -> Target:
        return Target.load(self.path, self.config(dtype), LAYERS, last_hidden, "cpu")

    def config(self, dtype: Any = "float32") -> TargetConfig:
        return TargetConfig(path="-", dtype=dtype, attention=self.architecture.attention)


def part(model: Any, path: str) -> Any:
    return reduce(getattr, filter(None, path.split(".")), model)


def tensor(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else output[0]
    assert isinstance(found, Tensor)
    return found[0]


def run_alone(
    architecture: Architecture, model: Any, token_ids: np.ndarray
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [T, L, D], input and output of the final norm [T, 2, D], and logits [T, V]: of one
    sample without padding, by the whole model, with hooks where the table says."""
    decoder = part(model, architecture.decoder)
    blocks = part(decoder, architecture.layers)
    norm = part(decoder, architecture.norm)
    seen: dict[Any, Tensor] = {}

    def keep(key: Any) -> Any:
        return lambda module, inputs, output: seen.__setitem__(key, tensor(output))

    def keep_both(module: Any, inputs: Any, output: Any) -> None:
        seen["norm"] = torch.stack([inputs[0][0], output[0]], dim=1)

    handles = [blocks[k].register_forward_hook(keep(k)) for k in LAYERS]
    handles.append(norm.register_forward_hook(keep_both))
    with torch.inference_mode():
        ids_1T = torch.from_numpy(token_ids.astype(np.int64))[None]
        whole = part(model, architecture.whole)
        logits_TV = whole(input_ids=ids_1T, use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return torch.stack([seen[k] for k in LAYERS], dim=1), seen["norm"], logits_TV


def require_rounded(found_TLD: Tensor, exact_TLD: Tensor) -> None:
    """`found` is `exact` in bfloat16, but for what float32 makes of another order of its sums.

    That is a millionth of a layer's largest value, and where it crosses a border of bfloat16, a
    last bit in one value of some hundred.
    """
    difference = (found_TLD.float() - exact_TLD).abs()
    largest = exact_TLD.abs().amax((0, 2), keepdim=True)
    assert (difference <= 2**-8 * exact_TLD.abs() + 2e-6 * largest).all()
    assert (found_TLD == exact_TLD.bfloat16()).float().mean() > 0.99


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda architecture: architecture.id)
def case(
    request: pytest.FixtureRequest,
    tiny_target: Path,
    tiny_build: Callable[..., BuildConfig],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:
    architecture: Architecture = request.param
    model = build(architecture)
    directory = tmp_path_factory.mktemp("architecture")
    path = directory / "target"
    model.save_pretrained(path)
    for name in TOKENIZER:
        shutil.copy(tiny_target / name, path)
    texts = [ids(length, seed).tolist() for seed, length in enumerate(LENGTHS)]
    texts.append([5, 6, 7, 512, 8])  # one id more than the model has
    data = write_jsonl(
        directory / "rows.jsonl", [{"input_ids": t, "loss_mask": [1] * len(t)} for t in texts]
    )
    case = Case(architecture, model, path, directory / "cache")
    config = tiny_build(case.cache, preset="lossless", data=[data], layer_ids=LAYERS)
    build_cache(
        replace(
            config,
            target=replace(case.config(), path=str(path)),
            capture=replace(config.capture, last_hidden="post_norm"),
        )
    )
    yield case
    shutil.rmtree(directory)


def test_stored_states_are_those_of_hooks_in_an_unpadded_run(case: Case) -> None:
    cache = Cache(case.cache)
    assert len(cache.index) == len(LENGTHS)
    (record,) = [json.loads(file.read_text()) for file in (case.cache / "records").iterdir()]
    assert record["batch_tokens"] >= len(LENGTHS) * max(LENGTHS)  # all in one forward, padded
    for position in range(len(cache.index)):
        sample = cache.read(position)
        found_TLD = cache.unpack(sample)
        blocks_TLD, norm_TLD, _ = run_alone(case.architecture, case.model, sample.token_ids)
        expected_TLD = torch.cat([blocks_TLD, norm_TLD[:, 1:]], dim=1)
        assert found_TLD.dtype == torch.bfloat16
        assert found_TLD.shape == expected_TLD.shape
        require_rounded(found_TLD, expected_TLD)


def test_layers_are_told_apart(case: Case) -> None:
    """Else the test above could not see a tap on a wrong block."""
    blocks_TLD, norm_TLD, _ = run_alone(case.architecture, case.model, ids(40))
    first, last = blocks_TLD[:, 0], blocks_TLD[:, 1]
    assert (first - last).norm() > 0.2 * first.norm()
    assert torch.equal(norm_TLD[:, 0], last)
    assert (norm_TLD[:, 1] - last).norm() > 0.1 * last.norm()


def test_one_sample_a_batch_is_captured_bit_for_bit_in_bfloat16(case: Case) -> None:
    model = type(case.model).from_pretrained(
        case.path, dtype=torch.bfloat16, attn_implementation=case.architecture.attention
    )
    (states_TLD,) = case.target("post_norm", "bfloat16").capture([ids(33)])
    blocks_TLD, norm_TLD, _ = run_alone(case.architecture, model.eval(), ids(33))
    expected_TLD = torch.cat([blocks_TLD, norm_TLD[:, 1:]], dim=1)
    assert torch.equal(states_TLD, expected_TLD.bfloat16())


def test_the_stored_head_gives_the_targets_logits(case: Case) -> None:
    cache = Cache(case.cache)
    head = cache.head()
    _, norm_TLD, logits_TV = run_alone(case.architecture, case.model, ids(40))
    # The head in float32 on the exact state: to the last digits. Weights are exact in bfloat16.
    found_TV = head.to("cpu", torch.float32).logits(norm_TLD[:, 1])
    torch.testing.assert_close(found_TV, logits_TV, rtol=1e-4, atol=1e-4)
    # On the states as stored, and in the type of the trainer: by what bfloat16 rounds.
    sample = next(s for i in range(len(cache.index)) if len((s := cache.read(i)).token_ids) == 40)
    stored_TV = head.logits(cache.unpack(sample)[:, -1]).float()
    assert (stored_TV - logits_TV).norm() <= TOLERANCE * logits_TV.norm()


def test_the_head_is_that_of_the_model(case: Case) -> None:
    head = Cache(case.cache).head()
    whole = part(case.model, case.architecture.whole)
    embedding, lm_head = whole.get_input_embeddings(), whole.get_output_embeddings()
    assert torch.equal(head.embedding_VD.float(), embedding.weight)
    assert torch.equal(head.lm_head_VD.float(), lm_head.weight)
    assert head.is_tied == (embedding.weight is lm_head.weight)
    decoder = part(case.model, case.architecture.decoder)
    weight = getattr(part(decoder, case.architecture.norm), "weight", torch.ones(64))
    assert torch.equal(head.final_norm_D.float(), weight)


def test_the_head_norms_a_state_of_before_the_norm_or_says_that_it_cannot(case: Case) -> None:
    target = case.target("pre_norm")
    if case.architecture.model_type in NOT_RMS:
        with pytest.raises(TargetError, match=r"no RMS norm .* Set capture\.last_hidden = 'post_"):
            target.head(ids(20))
        return
    _, norm_TLD, logits_TV = run_alone(case.architecture, case.model, ids(40))
    found_TV = target.head(ids(20)).to("cpu", torch.float32).logits(norm_TLD[:, 0])
    torch.testing.assert_close(found_TV, logits_TV, rtol=1e-4, atol=1e-4)
    (states_TLD,) = target.capture([ids(40)])
    require_rounded(states_TLD[:, -1:], norm_TLD[:, :1])


def test_ids_outside_the_model_are_refused(case: Case) -> None:
    assert describe_target(case.path, case.config()).vocab_size == 512
    (file,) = case.cache.glob("plans/*/dropped.jsonl")
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert "id 512 at position 3, expected 0 to 511" in json.dumps(row)


def test_it_is_described_by_its_text_part(case: Case) -> None:
    spec = Cache(case.cache).spec.target
    assert (spec.dtype, spec.attention) == ("float32", case.architecture.attention)
    assert spec.model_type == case.architecture.model_type
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (4, 64, 512)
    assert spec.quantization is None


@pytest.mark.parametrize(
    ("architecture", "message"), [pytest.param(*row, id=row[0].id) for row in REFUSED]
)
@pytest.mark.parametrize("last_hidden", ["none", "post_norm"])
def test_what_no_drafter_can_be_trained_for_is_refused_in_one_line(
    architecture: Architecture, message: str, last_hidden: Any, tmp_path: Path
) -> None:
    build(architecture).save_pretrained(tmp_path)
    config = TargetConfig(path="-", dtype="float32", attention=architecture.attention)
    with pytest.raises(TargetError, match=message) as caught:
        Target.load(tmp_path, config, LAYERS, last_hidden, "cpu").head(ids(20))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if a.attention == "eager"], ids=lambda a: a.id
)
def test_a_kernel_that_the_target_does_not_have_is_refused_in_one_line(
    architecture: Architecture, tmp_path: Path
) -> None:
    build(architecture).save_pretrained(tmp_path)
    config = TargetConfig(path="-", dtype="float32")
    with pytest.raises(TargetError, match=r"cannot load it .* Set target\.attention") as caught:
        Target.load(tmp_path, config, LAYERS, "none", "cpu")
    assert "\n" not in str(caught.value)


def test_the_readme_lists_what_is_tested() -> None:
    text = (REPOSITORY / "README.md").read_text()
    table = text.partition("| | `model_type` |\n|---|---|\n")[2].partition("\n\n")[0]
    listed = {name.strip() for row in table.splitlines() for name in row.split("|")[2].split(",")}
    assert listed == {architecture.model_type for architecture in ARCHITECTURES}
