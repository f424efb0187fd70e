"""Limits of the process that a daemon sets for itself."""

import resource


def raise_descriptor_limit() -> None:
    """Open files up to the hard limit: tiers and sources keep some hundred each, and 1,024 is a usual default."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
