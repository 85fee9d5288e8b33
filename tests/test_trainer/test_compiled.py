"""Compiled layers: the same values, few graphs, the same names, and one line where it fails."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from safetensors import safe_open
from torch import Tensor

from shared.errors import RunError
from trainer import config as training
from trainer.attention import build_mask
from trainer.compiled import compile_layers_
from trainer.config import TrainConfig
from trainer.drafter import Drafter
from trainer.export import export_dflash
from trainer.recipe import DrafterConfig
from trainer.run import Run
from trainer.train import Training, train

MakeTrain = Callable[..., TrainConfig]
HIDDEN, FEATURES, BLOCK = 64, 128, 8
CONFIG = DrafterConfig(
    mask_token_id=1,
    num_layers=3,
    block_size=BLOCK,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=1e4,
)


pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler, on its own code


@pytest.fixture(autouse=True)
def no_graphs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in this process nor on disk, where a user's processes share what they compile."""
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))


def drafter() -> Drafter:
    return Drafter(CONFIG, HIDDEN, FEATURES, torch.Generator().manual_seed(0))


def values_and_gradients(
    model: Drafter, num_context: int, num_anchors: int, dtype: torch.dtype
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_context)
    document_S = (torch.arange(num_context) >= num_context // 2).long()
    anchor_A = torch.randperm(num_context - BLOCK, generator=generator)[:num_anchors]
    mask = build_mask(document_S, anchor_A, torch.ones(num_anchors, dtype=torch.bool), BLOCK)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden_QD = model(
            torch.randn(num_context, FEATURES, generator=generator),
            torch.randn(num_anchors * BLOCK, HIDDEN, generator=generator),
            torch.arange(num_context),
            (anchor_A[:, None] + torch.arange(BLOCK)).flatten(),
            mask,
        )
    (hidden_QD.float() * torch.linspace(-1, 1, HIDDEN)).sum().backward()
    return [hidden_QD.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_sizes_take_few_graphs_and_give_the_values_and_gradients_of_the_layers(
    dtype: torch.dtype,
) -> None:
    plain, compiled = drafter(), drafter()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")  # type: ignore[no-untyped-call]
    compile_layers_(compiled, counter)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    sizes = [(128, 16), *((64 * k, 5 + k) for k in range(2, 14))]  # 128: as many slots as tokens
    for size in sizes:
        expected = values_and_gradients(plain, *size, dtype)
        found = values_and_gradients(compiled, *size, dtype)
        assert len(found) == 1 + len(list(plain.parameters()))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    assert 0 < counter.frame_count <= 6


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_run_learns_the_same_resumes_and_exports(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    plain = tiny_train(tmp_path / "plain", tiny_cache, steps=4)
    train(plain)
    compiled = replace(
        plain,
        run=training.RunConfig(path=tmp_path / "compiled"),
        train=replace(plain.train, compile=True),
    )
    with pytest.MonkeyPatch.context() as patch:  # as after a kill
        patch.setattr(Training, "_is_done", lambda run: run.step >= 2)
        train(compiled)
    train(compiled)
    scores = [Run(config.run.path).evaluations(4) for config in (plain, compiled)]
    assert scores[1][-1]["loss"] == pytest.approx(scores[0][-1]["loss"], rel=1e-4)
    names = []
    for config in (plain, compiled):
        out = config.run.path / "out"
        export_dflash(Run(config.run.path), out)
        with safe_open(out / "model.safetensors", "pt") as file:
            names.append(sorted(file.keys()))
    assert names[0] == names[1]


def test_a_compiler_that_is_not_there_is_one_line(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", (None, "no-such-compiler"))
    config = tiny_train(tmp_path, tiny_cache)
    config = replace(config, train=replace(config.train, compile=True))
    with pytest.raises(
        RunError, match=r"torch's compiler failed \(.*No working C\+\+ compiler.*train.compile"
    ):
        train(config)
