from tests.cli.conftest import folder, models, program

__all__ = ["folder", "models", "program"]
