"""Composition: builds every part from the configuration and opens the long-lived nurseries."""
