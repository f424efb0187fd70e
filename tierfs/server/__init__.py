"""Exports a source over a transport."""
