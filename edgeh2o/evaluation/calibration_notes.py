"""What a calibration has measured so far, in a file, so that one that was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ResourceError
from ..formats.atomic_file import make_folder, write_file

NOTES_SUFFIX = ".calibration.json"
_MAX_BYTES = 64 * 2**20


class CalibrationNotes:
    """Measured values by name, such as JSON can hold; kept in the file ``path``, if there is one.

    ``identity`` names all that they depend on: notes of another one, and a file that is damaged,
    are as good as none. Where the file cannot be written they are kept for as long as this lives.
    """

    def __init__(self, path: Path | None = None, identity: str = "") -> None:
        self._path = path
        self._identity = identity
        self._values: dict[str, Any] = {}
        if path is not None:
            with suppress(OSError, ValueError, RecursionError):
                with path.open("rb") as file:
                    data = json.loads(file.read(_MAX_BYTES))
                self._values = self._read(data)

    def recall(self, name: str, measure: Callable[[], Any]) -> Any:
        """What is noted, or what ``measure()`` gives, which is noted."""
        if name not in self._values:
            self._values[name] = measure()
            self._write()
        return self._values[name]

    def remove(self) -> None:
        """Leaves no file behind."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()

    def _read(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict) or not isinstance(data.get("values"), dict):
            return {}
        values: dict[str, Any] = data["values"]
        return values if data.get("digest") == self._digest(values) else {}

    def _write(self) -> None:
        if self._path is None:
            return
        content = {"digest": self._digest(self._values), "values": self._values}
        with suppress(ResourceError):
            make_folder(self._path.parent)
            write_file(self._path, json.dumps(content), what="the notes of the calibration")

    def _digest(self, values: dict[str, Any]) -> str:
        """Of the values, and of what they are of."""
        text = self._identity + json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
