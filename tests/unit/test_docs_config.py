"""docs/CONFIGURATION.md is what the schema says."""

from pathlib import Path

from tierfs.config.document import MOUNT_EXAMPLE, SERVE_EXAMPLE, render
from tierfs.config.load import keys
from tierfs.config.schema import TEXT_DEFAULTS, MountConfig, ServeConfig

PAGE = Path(__file__).parents[2] / "docs/CONFIGURATION.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run: python -m tierfs.config.document > docs/CONFIGURATION.md"


def test_every_key_is_on_the_page() -> None:
    page = render()
    for key in [*keys(MountConfig), *keys(ServeConfig)]:
        table, _, leaf = key.rpartition(".")
        assert f"| `{leaf}` |" in page
        assert not table or f"[{table}]" in page


def test_texts_for_computed_defaults_belong_to_keys() -> None:
    assert set(TEXT_DEFAULTS) <= {*keys(MountConfig), *keys(ServeConfig)}


def test_examples_are_toml_with_known_keys() -> None:
    import tomllib

    for example, schema in ((MOUNT_EXAMPLE, MountConfig), (SERVE_EXAMPLE, ServeConfig)):
        table = tomllib.loads(example.split("```")[1].removeprefix("toml"))
        tables = {key.split(".")[0] for key in keys(schema)}
        assert set(table) <= tables
