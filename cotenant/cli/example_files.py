"""Find the example files of the documentation, which come with the package: `cotenant examples --files`."""

from __future__ import annotations

from pathlib import Path

import cotenant
from cotenant.cli.loading import read_bytes, write_file
from cotenant.errors import ConfigError

PACKAGE = Path(cotenant.__file__).parent


def copy_examples(folder: Path) -> list[Path]:
    """Copy them into a folder, and return their paths there. Raises ConfigError, with nothing written, where one is
    there and different."""
    texts = {folder / path.name: read_bytes(path).decode() for path in sorted(_source().iterdir())}
    for path, text in texts.items():
        if path.exists() and read_bytes(path).decode("utf-8", "replace") != text:
            raise ConfigError(f"{path}: is there already, and different; name another folder")
    for path, text in texts.items():
        write_file(path, text, quiet=True)
    return list(texts)


def _source() -> Path:
    """Return their folder: within an installed package, or in a checkout."""
    for folder in (PACKAGE / "examples", PACKAGE.parent / "docs" / "examples"):
        if folder.is_dir():
            return folder
    raise ConfigError(f"{PACKAGE}: the example files are missing; install Cotenant again")
