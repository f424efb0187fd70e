"""Ids, spans, digests, units and errors: the words every other part uses."""
