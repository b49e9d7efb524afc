"""What a run of the suite leaves behind, so that another can go on where its time was up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from gpu.sanitize import Finding

FILE = "progress.json"


@dataclasses.dataclass
class Progress:
    """Of all runs in one folder.

    Attributes:
        of: what was tested, and how: equal in all runs.
        seconds: how long they took together.
        runs: how many there were.
        findings: of the sanitizer's jobs that came to an end.
    """

    of: dict[str, Any]
    seconds: float = 0.0
    runs: int = 0
    findings: list[Finding] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, of: dict[str, Any]) -> Progress:
        """What was left in the folder; nothing in one that is new.

        Raises:
            ValueError: the runs there were of something else.
        """
        file = folder / FILE
        if not file.is_file():
            return cls(of)
        left = cls(**json.loads(file.read_text()))
        left.findings = [Finding(**finding) for finding in left.findings]  # type: ignore[arg-type]
        for what, value in of.items():
            if left.of.get(what) != value:
                before = f"what ran in {folder} before had {left.of.get(what)!r}"
                raise ValueError(f"{what}: got {value!r}, but {before}: take another folder")
        return left

    def add(self, seconds: float, findings: list[Finding]) -> None:
        """A run that has ended; `findings`: of its jobs, but for those that time cut off."""
        self.seconds, self.runs = self.seconds + seconds, self.runs + 1
        self.findings = sorted([*self.findings, *findings], key=lambda finding: finding.name)

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
