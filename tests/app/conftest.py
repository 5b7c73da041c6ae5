from tests.cli.conftest import folder, models

__all__ = ["folder", "models"]
