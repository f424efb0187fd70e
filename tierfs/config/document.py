"""Renders docs/CONFIGURATION.md from the schema: ``python -m tierfs.config.document > docs/CONFIGURATION.md``.

A test compares the file with what this gives, so that a key and its documentation cannot part.
"""

import sys
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from tierfs.blocks.units import Duration, Share, Size, format_bytes, format_duration
from tierfs.config.load import expected, struct_of
from tierfs.config.schema import TEXT_DEFAULTS, MountConfig, ServeConfig

HEAD = """\
# Configuration

One TOML file for `tierfs mount`, one for `tierfs serve`. Every key is optional unless it says *needed*; a table that is
absent stands for its defaults, but `[hot]` and `[warm]` are tiers only where they are written. A flag goes before the
file, the file before the default. An unknown key, a wrong value or a contradiction is refused with the file, the full
key, and what was expected.

| written as | means |
|---|---|
| `"64MiB"`, `"2TB"` | a size: B, KiB, MiB, GiB, TiB, PiB count by 1024, kB, MB, GB, TB, PB by 1000 |
| `"30s"`, `"500ms"`, `"1h30m"` | a duration: ns, us, ms, s, m or min, h, d |
| `0.95`, `"95%"` | a share of a whole |
| `"cache"`, `"~/cache"` | a path: relative ones start at the configuration's directory, `~` is the home directory |

This page is generated: `python -m tierfs.config.document > docs/CONFIGURATION.md`.
"""
MOUNT_EXAMPLE = """\
```toml
[source]
url = "tierfs://10.0.0.5:7411/models"     # or "dir:/srv/models"
token_file = "/etc/tierfs/token"

[warm]
path = "/var/cache/tierfs"
capacity = "2TiB"
```
"""
SERVE_EXAMPLE = """\
```toml
[server]
listen = ["tcp://10.0.0.5:7411"]
token_file = "/etc/tierfs/token"

[exports.models]
path = "/srv/models"

[metrics]
listen = "tcp://127.0.0.1:9465"           # see METRICS.md
```

`tierfs serve DIR` needs no file: it exports DIR as `tierfs://HOST:PORT/`.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, schema, example in (
        ("The mount: `tierfs mount CONFIG MOUNTPOINT`", MountConfig, MOUNT_EXAMPLE),
        ("The server: `tierfs serve CONFIG`", ServeConfig, SERVE_EXAMPLE),
    ):
        parts.append(f"## {title}\n\n{example}")
        parts += _sections(schema)
    return "\n".join(parts)


def _sections(schema: type[msgspec.Struct]) -> list[str]:
    hints = get_type_hints(schema, include_extras=True)
    plain: list[str] = []
    tables: list[str] = []
    for info in msgspec.structs.fields(schema):
        hint = hints[info.name]
        if get_origin(hint) is dict:
            tables.append(_table(f"{info.name}.NAME", get_args(hint)[1]))
        elif (inner := struct_of(hint)) is not None:
            tables.append(_table(info.name, inner))
        else:
            plain.append(_row(info, hint, ""))
    if plain:
        tables.append("### Outside of any table\n\n" + _rows(plain))
    return tables


def _table(name: str, schema: type[msgspec.Struct]) -> str:
    hints = get_type_hints(schema, include_extras=True)
    rows = [_row(info, hints[info.name], name + ".") for info in msgspec.structs.fields(schema)]
    return f"### [{name}]\n\n{schema.__doc__}\n\n{_rows(rows)}"


def _rows(rows: list[str]) -> str:
    return "| key | takes | default | meaning |\n|---|---|---|---|\n" + "".join(rows)


def _row(info: "msgspec.structs.FieldInfo", hint: Any, prefix: str) -> str:
    description = next((note.description for note in get_args(hint) if isinstance(note, msgspec.Meta)), None)
    assert description, f"{prefix}{info.name} has no description"
    return f"| `{info.name}` | {expected(hint)} | {_default(info, prefix + info.name)} | {description} |\n"


def _default(info: "msgspec.structs.FieldInfo", key: str) -> str:
    if info.required:
        return "*needed*"
    if key in TEXT_DEFAULTS:
        return TEXT_DEFAULTS[key]
    value = info.default
    if value is None or value == ():
        return "none"
    if isinstance(value, Size):
        return f'`"{format_bytes(value)}"`'
    if isinstance(value, Duration):
        return f'`"{format_duration(value)}"`'
    if isinstance(value, Share):
        return f"`{float(value):g}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{item}"' for item in value) + "]`"
    return f"`{str(value).lower()}`" if isinstance(value, (bool, int)) else f'`"{value}"`'


if __name__ == "__main__":
    sys.stdout.write(render())
