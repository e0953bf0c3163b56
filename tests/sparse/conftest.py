"""Policy tests run once per instruction set of this machine."""

from tests.ops.conftest import isa, keep_threads

__all__ = ["isa", "keep_threads"]
