"""Without pyverbs there is a reason, and nothing else happens."""

import subprocess
import sys
from pathlib import Path

import pytest

from tierfs.blocks.errors import SourceUnavailable
from tierfs.transport.rdma import loading


def test_nothing_of_pyverbs_is_imported_before_it_is_wanted() -> None:
    program = "import sys, tierfs.app.mount, tierfs.app.serve; print([n for n in sys.modules if 'pyverbs' in n])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["['tierfs.transport.rdma.pyverbs_device']"]


def test_where_it_is_not_installed_the_reason_says_how_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "DISTRIBUTION_PLACES", (tmp_path,))
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(SourceUnavailable, match="pyverbs is not installed; .*apt-get install python3-pyverbs"):
        loading.load_pyverbs()


def test_one_for_another_python_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyverbs").mkdir()
    (tmp_path / "pyverbs" / "__init__.py").write_text("")
    (tmp_path / "pyverbs" / "device.cpython-26-other.so").write_text("")
    monkeypatch.setattr(loading, "DISTRIBUTION_PLACES", (tmp_path,))
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(SourceUnavailable, match="is for another Python"):
        loading.load_pyverbs()
