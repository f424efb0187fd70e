"""Loading the configuration: file, then flags over it, into the structs of schema.py, or one ConfigError.

Called by ``app`` and the commands. Every mistake names the file (or the command line), the full key, what was found and
what was expected. The walk over the schema is our own and only leaf values are given to msgspec: its errors do not
carry the names of mapping keys, and say nothing of what would have been right.
"""

import difflib
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from tierfs.blocks.errors import ConfigError
from tierfs.blocks.units import Duration, Rate, Share, Size, parse_bytes, parse_duration, parse_rate, parse_share
from tierfs.config.memory import memory_room
from tierfs.config.relations import complete_mount, complete_serve
from tierfs.config.schema import MountConfig, ServeConfig

Overrides = Mapping[str, object]
_DEPTH_MAX = 16
_S = TypeVar("_S", bound=msgspec.Struct)


def load_mount_config(path: Path | str, overrides: Overrides | None = None, *, pid: int | str = "self") -> MountConfig:
    """The configuration of a mount: the file at ``path`` with ``overrides`` over it.

    ``pid`` is the process whose cgroups say how much memory there is for computed defaults.

    ``overrides`` maps full keys to values as TOML would give them (``{"warm.capacity": "1GiB"}``); None means not
    given. Relative paths in the file start at the file's directory, those of overrides at the working directory.
    Raises ConfigError.
    """
    document = _Document.read(Path(path), overrides or {}, MountConfig)
    return complete_mount(_build(MountConfig, document.table, "", document), document.mistake, memory_room(pid))


def given_keys(path: Path | str, overrides: Overrides | None = None) -> frozenset[str]:
    """The full keys that the file or the overrides of a mount give; the others have defaults. Raises ConfigError."""
    table = _Document.read(Path(path), overrides or {}, MountConfig).table
    return frozenset(key for key in keys(MountConfig) if _is_given(table, key.split(".")))


def _is_given(table: object, parts: list[str]) -> bool:
    for part in parts:
        if not isinstance(table, dict) or part not in table:
            return False
        table = table[part]
    return True


def load_serve_config(path: Path | str, overrides: Overrides | None = None) -> ServeConfig:
    """The configuration of a server; the arguments are those of load_mount_config. Raises ConfigError."""
    document = _Document.read(Path(path), overrides or {}, ServeConfig)
    return complete_serve(_build(ServeConfig, document.table, "", document), document.mistake)


def serve_config_for_directory(path: Path | str, overrides: Overrides | None = None) -> ServeConfig:
    """The configuration of ``tierfs serve DIR``: one export with the empty name, and defaults.

    Overrides are keys of the file; ``export.KEY`` stands for the keys of that one export. Raises ConfigError.
    """
    renamed: dict[str, object] = {"exports..path": str(path)}
    for key, value in (overrides or {}).items():
        renamed["exports.." + key.removeprefix("export.") if key.startswith("export.") else key] = value
    document = _Document(file=None, table={}, overridden=frozenset())
    document = document.over(renamed, ServeConfig)
    return complete_serve(_build(ServeConfig, document.table, "", document), document.mistake)


@dataclass(frozen=True)
class _Document:
    """A parsed file with the overrides merged in, which remembers where each key came from."""

    file: Path | None
    table: dict[str, Any]
    overridden: frozenset[str]

    @classmethod
    def read(cls, path: Path, overrides: Overrides, schema: type[msgspec.Struct]) -> "_Document":
        try:
            table = tomllib.loads(path.read_bytes().decode())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); expected a TOML file") from error
        except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, and so is a number too long
            raise ConfigError(f"{path}: not a TOML file: {error}") from error
        if _too_deep(table):
            raise ConfigError(f"{path}: tables and lists within {_DEPTH_MAX} others; expected no such nesting")
        return cls(file=path, table=table, overridden=frozenset()).over(overrides, schema)

    def over(self, overrides: Overrides, schema: type[msgspec.Struct]) -> "_Document":
        """This document with the overrides merged in. A flag for ``warm.path`` replaces ``warm.paths`` too."""
        given = {key: value for key, value in overrides.items() if value is not None}
        table = _copy_tables(self.table)
        for key, value in given.items():
            *parents, leaf = key.split(".")
            inner = table
            for depth, parent in enumerate(parents, start=1):
                inner = inner.setdefault(parent, {})
                if not isinstance(inner, dict):
                    raise ConfigError(f"{self.file}: {'.'.join(parents[:depth])} is {inner!r}; expected a table")
            inner[leaf] = value
            for one, other in (("path", "paths"), ("paths", "path")):
                if parents == ["warm"] and leaf == one and f"warm.{other}" not in given:
                    inner.pop(other, None)
        return _Document(file=self.file, table=table, overridden=frozenset(given))

    def mistake(self, key: str, text: str) -> ConfigError:
        """The error that key has; ``text`` goes on after it ("is 3; expected ...")."""
        where = "command line" if self.file is None or key in self.overridden else str(self.file)
        return ConfigError(f"{where}: {key.replace('exports..', 'export.')} {text}")

    def base(self, key: str) -> Path:
        """Where a relative path of this key starts."""
        if self.file is None or key in self.overridden:
            return Path.cwd()
        return self.file.absolute().parent


def _too_deep(table: dict[str, Any]) -> bool:
    """Whether what walks it, and what prints it, would run out of stack."""
    level: list[Any] = [table]
    for _ in range(_DEPTH_MAX):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
    return bool(level)


def _copy_tables(table: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_tables(value) if isinstance(value, dict) else value for key, value in table.items()}


def _build(schema: type[_S], table: object, prefix: str, document: _Document) -> _S:
    if not isinstance(table, dict):
        raise document.mistake(prefix.removesuffix("."), f"is {_shown(table)}; expected a table")
    hints = get_type_hints(schema, include_extras=True)
    for key in table:
        if key not in hints:
            raise document.mistake(prefix + key, _unknown(prefix, key, list(hints)))
    values: dict[str, Any] = {}
    for info in msgspec.structs.fields(schema):
        key = prefix + info.name
        hint = hints[info.name]
        inner = struct_of(hint)
        if info.name not in table:
            if info.required:
                raise document.mistake(key, f"is missing; expected {_required(hint)}")
        elif inner is not None:
            values[info.name] = _build(inner, table[info.name], key + ".", document)
        elif get_origin(hint) is dict:
            values[info.name] = _build_each(get_args(hint)[1], table[info.name], key + ".", document)
        else:
            values[info.name] = _leaf(hint, table[info.name], key, document)
    return schema(**values)


def _build_each(
    schema: type[msgspec.Struct], table: object, prefix: str, document: _Document
) -> dict[str, msgspec.Struct]:
    if not isinstance(table, dict):
        raise document.mistake(prefix.removesuffix("."), f"is {_shown(table)}; expected a table")
    return {name: _build(schema, inner, f"{prefix}{name}.", document) for name, inner in table.items()}


def _leaf(hint: Any, value: object, key: str, document: _Document) -> object:
    def decode(kind: type, text: object) -> object:
        if kind is Share and isinstance(text, (str, int, float)) and not isinstance(text, bool):
            return parse_share(text)
        if not isinstance(text, str):
            raise ConfigError(f"not text: {text!r}")
        if kind is Path:
            if not text or "\0" in text:
                raise ConfigError("an empty path")
            return document.base(key) / Path(text).expanduser()
        parse = {Size: parse_bytes, Duration: parse_duration, Rate: parse_rate}[kind]
        return parse(text)

    try:
        return msgspec.convert(value, hint, dec_hook=decode)
    except (msgspec.ValidationError, ConfigError, RuntimeError) as error:  # RuntimeError: no home for "~user"
        raise document.mistake(key, f"is {_shown(value)}; expected {expected(hint)}") from error


def struct_of(hint: Any) -> type[msgspec.Struct] | None:
    """The struct that a table of this type is read into, or None for a value."""
    for candidate in (hint, *get_args(hint)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct) and get_origin(hint) is not dict:
            return candidate
    return None


def expected(hint: Any) -> str:
    """What a key of this type takes, in words."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        bounds = next((note for note in notes if isinstance(note, msgspec.Meta) and note.ge is not None), None)
        text = expected(inner)
        if bounds is not None and bounds.le is not None:
            text += f" from {bounds.ge} to {bounds.le}"
        return text
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return expected(next(option for option in get_args(hint) if option is not type(None)))
    if get_origin(hint) is tuple:
        return "a list, each " + expected(get_args(hint)[0])
    words = {
        Size: 'a size such as "64MiB"',
        Duration: 'a duration such as "30s"',
        Rate: 'a rate such as "20Gbit/s"',
        Share: 'a share from 0 to 1, or such as "95%"',
        Path: "a path",
        bool: "true or false",
        int: "a whole number",
        str: "a text",
    }
    return words[hint]


def keys(schema: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Every full key of the schema; the name of an export is ``NAME``."""
    for name, hint in get_type_hints(schema, include_extras=True).items():
        inner = struct_of(hint)
        if inner is not None:
            yield from keys(inner, f"{prefix}{name}.")
        elif get_origin(hint) is dict:
            yield from keys(get_args(hint)[1], f"{prefix}{name}.NAME.")
        else:
            yield prefix + name


def _unknown(prefix: str, key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        return f"is not a known key; did you mean {prefix}{near[0]}?"
    everywhere = [*keys(MountConfig), *keys(ServeConfig)]
    leaves = {full.rpartition(".")[2]: full for full in reversed(everywhere)}
    near = difflib.get_close_matches(key, leaves, n=1, cutoff=0.6)
    if near:
        return f"is not a known key; did you mean {leaves[near[0]]}?"
    return f"is not a known key; expected one of {', '.join(prefix + name for name in known)}"


def _required(hint: Any) -> str:
    if struct_of(hint) is not None or get_origin(hint) is dict:
        return "a table"
    return expected(hint)


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
