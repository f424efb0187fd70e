"""The one place where trouble becomes an errno."""

import errno

from tierfs.blocks import errors

ERRNO: dict[type[errors.TierfsError], int] = {
    errors.NotFound: errno.ENOENT,
    errors.NameTooLong: errno.ENAMETOOLONG,
    errors.StaleVersion: errno.ESTALE,  # makes the kernel look the path up again
    errors.SourceUnavailable: errno.EIO,
    errors.SourceTimeout: errno.EIO,
    errors.SourceRefused: errno.EIO,
    errors.CorruptBlock: errno.EIO,
    errors.TierFailed: errno.EIO,
    errors.NoBuffer: errno.EIO,
    errors.ProtocolError: errno.EIO,
    errors.AuthenticationFailed: errno.EIO,
    errors.ConfigError: errno.EINVAL,
    errors.MountFailed: errno.EIO,
    errors.ControlError: errno.EIO,
}


def errno_of(error: errors.TierfsError) -> int:
    """The errno a reader gets for this error."""
    return ERRNO[type(error)]
