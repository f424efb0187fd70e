"""Expected trouble, as exceptions a caller can act on. A bug is an assertion, a miss is a value.

errno exists only in ``tierfs.fuse``; its table there names every class of this file.
"""


class TierfsError(Exception):
    """Base of all expected trouble. The message says what is wrong, where, and what to do."""


class NotFound(TierfsError):
    """The path or the version is not in the catalog."""


class NameTooLong(TierfsError):
    """A name has more than 255 bytes, or a path more than 4,095."""


class StaleVersion(TierfsError):
    """The file has another version by now and the source no longer has the one that was asked for."""


class SourceUnavailable(TierfsError):
    """The source cannot be reached or did not answer just now; the same request may succeed later."""


class SourceTimeout(TierfsError):
    """The source stayed unavailable until ``source.timeout``; this reader gets an error."""


class SourceRefused(TierfsError):
    """The source answered that it will not serve this; asking again does not help."""


class CorruptBlock(TierfsError):
    """Bytes that do not match their digest, wherever they came from."""


class TierFailed(TierfsError):
    """A local tier's medium failed: an I/O error, a full disk, a directory that went away."""


class NoBuffer(TierfsError):
    """The buffer pool stayed full until the deadline."""


class ProtocolError(TierfsError):
    """The peer sent something this version does not understand; the connection is closed."""


class AuthenticationFailed(TierfsError):
    """The peer does not know the token of the export."""


class ConfigError(TierfsError):
    """The configuration has a mistake: the file, the full key and what was expected."""


class MountFailed(TierfsError):
    """The mount could not be made or is not there."""


class ControlError(TierfsError):
    """The daemon of a mount cannot be asked, or refused a command."""


def first(group: BaseExceptionGroup[TierfsError]) -> TierfsError:
    """The first error in a group that nurseries made of it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TierfsError)
    return error
