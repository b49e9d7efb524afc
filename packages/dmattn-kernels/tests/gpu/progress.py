"""What a run of the suite leaves in its folder, so that another one can go on with the rest."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from gpu.sanitize import Finding

FILE = "progress.json"


@dataclasses.dataclass
class Progress:
    """The progress of all runs in one folder.

    Attributes:
        of: what is tested, and how; equal in all runs.
        seconds: how long the runs took together.
        runs: the number of runs.
        findings: those of the sanitizer's jobs that came to an end.
    """

    of: dict[str, Any]
    seconds: float = 0.0
    runs: int = 0
    findings: list[Finding] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, of: dict[str, Any]) -> Progress:
        """The progress that earlier runs have left in the folder; a new one if there were none.

        Raises:
            ValueError: earlier runs in the folder tested something else.
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
        """Add a run that has ended. `findings`: of its jobs, without those that ran out of time."""
        self.seconds, self.runs = self.seconds + seconds, self.runs + 1
        self.findings = sorted([*self.findings, *findings], key=lambda finding: finding.name)

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
