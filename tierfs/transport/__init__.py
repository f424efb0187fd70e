"""Moves bytes; knows no message."""
