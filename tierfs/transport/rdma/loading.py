"""Finding pyverbs. Nothing of it is imported before somebody wants RDMA, and a machine without it only gets a reason.

pyverbs comes with the distribution (Debian: python3-pyverbs), for the distribution's Python, or from PyPI. A virtual
environment does not see the distribution's packages; where its Python has the same version, pyverbs alone is taken
from there, and nothing else.
"""

import importlib
import importlib.util
import logging
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

from tierfs.blocks.errors import SourceUnavailable

DISTRIBUTION_PLACES = (Path("/usr/lib/python3/dist-packages"), Path("/usr/lib64") / f"python3.{sys.version_info[1]}")
_INSTALL = "install it with `apt-get install python3-pyverbs ibverbs-providers`, or `pip install pyverbs`"


def load_pyverbs() -> ModuleType:
    """The package ``pyverbs``, whose modules can be imported then. Raises SourceUnavailable saying how to get it."""
    problem = ""
    try:
        return _checked()
    except ImportError as error:
        if error.name not in ("pyverbs", None):
            problem = str(error)
    for directory in DISTRIBUTION_PLACES:
        package = directory / "pyverbs"
        if not (package / "__init__.py").exists():
            continue
        if not any((package / f"device{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
            problem = f"{package} is for another Python than {sys.version.split()[0]}, which runs tierfs"
            continue
        try:
            _graft(package)
            return _checked()
        except ImportError as error:
            _forget()
            problem = str(error)
    reason = f"pyverbs cannot be used: {problem}" if problem else "pyverbs is not installed"
    raise SourceUnavailable(f"{reason}; {_INSTALL}")


def _checked() -> ModuleType:
    """Import what is used, so that a missing library shows now."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        package = importlib.import_module("pyverbs")
        for name in ("device", "pd", "mr", "cq", "qp", "wr", "addr"):
            importlib.import_module(f"pyverbs.{name}")
        return package
    finally:  # it calls logging.basicConfig, and logging is not its business
        root.handlers[:] = handlers
        root.setLevel(level)


def _graft(package: Path) -> None:
    """Make that directory the package ``pyverbs``, without making anything beside it importable."""
    spec = importlib.util.spec_from_file_location(
        "pyverbs", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None, "a file that exists can be a module"
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    spec.loader.exec_module(module)


def _forget() -> None:
    for name in [name for name in sys.modules if name == "pyverbs" or name.startswith("pyverbs.")]:
        del sys.modules[name]
