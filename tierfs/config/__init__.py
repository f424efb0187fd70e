"""The TOML schema and its loading."""
