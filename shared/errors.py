"""Errors that this project raises on purpose.

DraftCacheError
+-- ConfigError                 a TOML file or an override does not fit the schema
+-- DataError                   the conversations given to stage one cannot be used
+-- TargetError                 the target model cannot be loaded, tapped or read
+-- EndpointError               a server that runs the target does not answer as it must
+-- CaptureError                workers died, samples failed, or shards are missing
+-- OutOfSpaceError             the disk is too full to go on (also OSError)
+-- StorageError                an object store or a disk cannot be reached, or refuses
+-- CacheError                  the store on disk is not what the caller needs
|   +-- CacheNotFoundError          no cache at that path (also FileNotFoundError)
|   +-- CacheIncompatibleError      format version, target, layers or codec differ
|   +-- CacheLockedError            another builder holds the cache
|   +-- ShardCorruptError           a digest, checksum, shape or dtype differs from the record
+-- RunError                    a run directory, checkpoint or drafter is not what the caller needs
+-- NonFiniteError              a loss, gradient or logit is not finite (also ArithmeticError)

A message says where, what is wrong, what was expected and found, and what to do.
The command line prints it as one line and exits with 1; any other exception is a bug.
"""


class DraftCacheError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(DraftCacheError, ValueError):
    """A TOML file or an override does not fit the schema."""


class DataError(DraftCacheError, ValueError):
    """The conversations given to stage one cannot be used."""


class TargetError(DraftCacheError):
    """The target model cannot be loaded, tapped or read."""


class EndpointError(DraftCacheError):
    """A server that runs the target does not answer as it must."""


class CaptureError(DraftCacheError):
    """Workers died, samples failed, or shards are missing at the end of a build."""


class OutOfSpaceError(DraftCacheError, OSError):
    """The disk is too full to go on."""


class StorageError(DraftCacheError):
    """An object store or a disk cannot be reached, or refuses. Says nothing about what is stored:
    no CacheError, which would have a verify call it damage and a repair capture it anew."""


class CacheError(DraftCacheError):
    """The store on disk is not what the caller needs."""


class CacheNotFoundError(CacheError, FileNotFoundError):
    """There is no cache at that path."""


class CacheIncompatibleError(CacheError):
    """Format version, target, layers or codec differ from what is asked for."""


class CacheLockedError(CacheError):
    """Another builder holds the cache."""


class ShardCorruptError(CacheError):
    """A digest, checksum, shape or dtype differs from the record."""


class RunError(DraftCacheError):
    """A run directory, checkpoint or drafter is not what the caller needs."""


class NonFiniteError(DraftCacheError, ArithmeticError):
    """A loss, gradient, state or logit is not finite."""
