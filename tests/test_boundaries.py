"""The stages meet only in `shared`, and stage two starts without the target's libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
HEAVY = ("transformers", "tokenizers", "huggingface_hub", "requests", "httpx", "wandb")


def modules(tree: ast.AST) -> set[str]:
    """Names of all modules that the source imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imports(package: str, *, but: str = "") -> set[str]:
    """Top-level names that the modules of `package` import, without those of its part `but`."""
    names = set()
    for path in (REPOSITORY / package).rglob("*.py"):
        if not but or (REPOSITORY / package / but) not in path.parents:
            names |= {name.partition(".")[0] for name in modules(ast.parse(path.read_text()))}
    return names


@pytest.mark.parametrize(
    ("package", "but", "forbidden"),
    [
        ("cache_builder", "", {"trainer", "wandb"}),
        ("trainer", "decoding", {"cache_builder", *HEAVY[:3]}),
        ("trainer/decoding", "", {"cache_builder", *HEAVY[1:]}),
        ("shared", "", {"cache_builder", "trainer", "transformers", "wandb"}),
    ],
)
def test_packages_import_only_what_they_may(package: str, but: str, forbidden: set[str]) -> None:
    assert imports(package), "there is something to look at"
    assert not imports(package, but=but) & forbidden


def test_only_its_command_imports_the_decoding_and_only_when_it_runs() -> None:
    trainer, found = REPOSITORY / "trainer", []
    for path in trainer.rglob("*.py"):
        if trainer / "decoding" in path.parents:
            continue
        tree = ast.parse(path.read_text())
        if any(name.startswith("trainer.decoding") for name in modules(tree)):
            found.append(path.relative_to(trainer).as_posix())
            at_import = [
                node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            top = modules(ast.Module(at_import, []))
            assert not any(name.startswith("trainer.decoding") for name in top)
    assert found == ["commands/evaluate.py"]


def test_the_trainer_runs_without_the_targets_libraries(tiny_cache: Path, tmp_path: Path) -> None:
    """A whole run, not only the import: train, evaluate, export."""
    script = f"""
import sys
from pathlib import Path
for name in {HEAVY!r}:
    sys.modules[name] = None  # an import of it raises
from trainer import config as training
from trainer.export import export_dflash
from trainer.run import Run
from trainer.train import train
config = training.TrainConfig(
    run=training.RunConfig(path=Path({str(tmp_path)!r})),
    cache=training.CacheConfig(path=Path({str(tiny_cache)!r}), heldout_fraction=0.2),
    sampler=training.SamplerConfig(tokens_per_batch=512),
    drafter=training.DrafterConfig(mask_token_id=3, num_layers=1, block_size=8,
        intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=16, rope_theta=1e4),
    train=training.StepConfig(steps=2, device="cpu"),
    evaluate=training.EvaluateConfig(max_samples=2),
)
train(config)
export_dflash(Run(config.run.path), config.run.path / "export" / "dflash")
"""
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True)
    assert (tmp_path / "export" / "dflash" / "model.safetensors").is_file()


def test_importing_the_command_line_of_the_trainer_is_light() -> None:
    script = "import sys, trainer.cli, trainer.train; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert not set(HEAVY) & set(done.stdout.split())
