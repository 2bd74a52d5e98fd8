"""stub"""

from dataclasses import dataclass


@dataclass
class Proof:
    reason: str | None

    def changed(self) -> str | None:
        return None
