"""The files of a target: where they lie, what target they are, and that they stay the same."""

from pathlib import Path

from cache_builder.config import TargetConfig
from cache_builder.target_config import describe_quantization, load_config, read_target_json
from shared.errors import TargetError
from shared.files import canonical_json, sha256_bytes
from shared.spec import TargetSpec
from shared.weights import weights_sha256

_VOLATILE_CONFIG = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
"""Keys of config.json that say nothing about the model's function."""

_STAMPED = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""What a target is loaded from."""

FileStamps = dict[str, tuple[int, int, int]]
"""By name: size in bytes, time of the last change in nanoseconds, and inode."""


def resolve_target(config: TargetConfig) -> Path:
    """The local directory of the target, fetched from the hub if it is a name there.

    Raises:
        TargetError: there is no such directory and the hub does not give it either; or there is
            one, and a revision is set.
    """
    path = Path(config.path)
    if path.is_dir():
        if config.revision is not None:
            raise TargetError(
                f"{path}: is a directory, which has no revisions. Leave the revision out, or "
                "name a model on the hub."
            )
        if not (path / "config.json").is_file():
            raise TargetError(f"{path}: no config.json; expected a model in Hugging Face format.")
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(config.path, revision=config.revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise TargetError(
            f"target {config.path!r}: no such directory, and the hub does not give it "
            f"({type(error).__name__}: {error}). Set target.path."
        ) from error


def target_name(config: TargetConfig) -> str:
    """What the `generated_by` of rows calls the target. Not its local directory: one that came from
    the hub is called by its commit."""
    return config.name or Path(config.path).absolute().name


def hub_revision(config: TargetConfig, path: Path) -> str | None:
    """The commit of a target that `resolve_target` fetched to `path`; None of a directory."""
    return None if path == Path(config.path) else path.name


def stamp_files(path: Path) -> FileStamps:
    """What shows cheaply that the files of the target in `path` are still the same."""
    try:
        found = [(f.name, f.stat()) for f in sorted(path.iterdir()) if f.suffix in _STAMPED]
    except OSError as error:
        raise TargetError(f"{path}: cannot be read ({error}).") from error
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found}


def require_unchanged(path: Path, stamps: FileStamps) -> None:
    """Refuse a target whose files are not those of `stamps`: what was hashed is not what runs.

    Raises:
        TargetError: naming the first file.
    """
    now = stamp_files(path)
    if changed := sorted(n for n in stamps.keys() | now.keys() if stamps.get(n) != now.get(n)):
        raise TargetError(
            f"{path / changed[0]}: changed since the target was hashed. Leave the target's files "
            "alone during a build, and run the same command again."
        )


def describe_target(path: Path, config: TargetConfig) -> TargetSpec:
    """Identify the target by the content of its files, without loading it.

    Raises:
        TargetError: there are no safetensors weights, or a file of it cannot be read.
    """
    model_config = load_config(path)
    text = model_config.get_text_config()
    weights = weights_sha256(path)
    fields = read_target_json(path / "config.json")
    stable = {key: value for key, value in fields.items() if key not in _VOLATILE_CONFIG}
    return TargetSpec(
        config_sha256=sha256_bytes(canonical_json(stable)),
        weights_sha256=weights,
        model_type=model_config.model_type,
        dtype=config.dtype,
        quantization=describe_quantization(path, model_config),
        attention=config.attention,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )
