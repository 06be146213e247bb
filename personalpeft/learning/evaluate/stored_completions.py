"""What the bare base says to the generic questions, kept in the cache from one process to the next: every learn on it would
ask the same again, and a learn from the command line would wait for it each time.

Invariants: only the bare base's words are kept, never those of a user's stack. A file belongs to one base, one set of
questions and one way to compute; a file that is not whole, or was changed, is no file, so at worst all is asked again. Who
cannot write goes on without.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

from personalpeft.backends.base import Backend
from personalpeft.learning.evaluate.probes import generic_questions
from personalpeft.learning.plan import BUILD_FORMAT
from personalpeft.types import canonical_digest

_log = logging.getLogger(__name__)


def spoken_by(backend: Backend, cache: Path) -> Spoken:
    """What this base said, computed in this way, to the questions as they are now."""
    how = [
        BUILD_FORMAT,
        backend.base.digest,
        backend.name,
        backend.description,
        generic_questions().digest,
    ]
    return Spoken(cache / "spoken", canonical_digest(how)[:32])


class Spoken:
    """The file ``<folder>/<name>.json``. Processes may share it: the last who adds wins, and what it did not know is asked
    again.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._place = folder / f"{name}.json"

    def read(self) -> dict[str, str]:
        """What is kept: replies by question."""
        try:
            kept = json.loads(self._place.read_text("utf-8"))
            said, digest = kept["said"], kept["digest"]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.info(
                "What the base said before cannot be read from %s (%s); it is asked again.",
                self._place,
                type(error).__name__,
            )
            return {}
        return dict(said) if isinstance(said, dict) and digest == canonical_digest(said) else {}

    def add(self, said: Mapping[str, str]) -> None:
        """Keeps more of it, all or nothing."""
        if not said:
            return
        whole = self.read() | dict(said)
        text = json.dumps({"digest": canonical_digest(whole), "said": whole}, ensure_ascii=False)
        try:
            self._place.parent.mkdir(parents=True, exist_ok=True)
            # A folder of its own, which goes whatever happens: what a full disk cuts off is not left lying.
            with tempfile.TemporaryDirectory(dir=self._place.parent) as folder:
                part = Path(folder) / self._place.name
                part.write_text(text, "utf-8")
                part.replace(self._place)
        except OSError as error:
            _log.info(
                "What the base said is not kept in %s: %s.", self._place, type(error).__name__
            )
