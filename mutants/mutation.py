"""What a mutation is, and the checks that it still applies."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

SOURCE = "src/buttress"


class MutationError(Exception):
    """A mutation that does not apply, or tests that cannot judge it."""


@dataclass(frozen=True)
class Mutation:
    """One mistake that a programmer could make.

    Attributes:
        name: The mistake, in a few words; unique.
        file: The file that contains it, relative to the source folder.
        old: The text to replace, which occurs exactly once in the file.
        new: The text that takes its place.
        tests: Files of tests, or node ids, that must notice it.
        equivalent: Why no test can notice it, for a mutation that survives; else empty.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def applied(self, text: str) -> str:
        """The text of the file with the mistake.

        Raises:
            MutationError: If the old text does not occur exactly once, or the new text is the same.
        """
        if (count := text.count(self.old)) != 1:
            raise MutationError(f"{self.name}: the old text occurs {count} times in {self.file}, not once")
        if self.old == self.new:
            raise MutationError(f"{self.name}: the new text is the old one")
        return text.replace(self.old, self.new)

    def test_files(self, root: Path) -> list[Path]:
        """The files that contain the tests.

        Raises:
            MutationError: If there are none, or one does not exist.
        """
        files = [root / test.partition("::")[0] for test in self.tests]
        if not files:
            raise MutationError(f"{self.name}: no tests are named")
        for file in files:
            if not file.is_file():
                raise MutationError(f"{self.name}: {file.relative_to(root)} does not exist")
        return files

    def key(self, root: Path, source: str = SOURCE) -> str:
        """Identifies the mutation with its file and its tests: an outcome holds as long as this is the same."""
        digest = sha256(repr((self.file, self.old, self.new, self.tests)).encode())
        for file in (root / source / self.file, *self.test_files(root)):
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]


def check(mutations: dict[str, Mutation], root: Path, source: str = SOURCE) -> None:
    """Check that every mutation applies to the sources, and that its tests exist.

    Args:
        mutations: The mutations by name.
        root: The repository.
        source: Its source folder.

    Raises:
        MutationError: With one line for each mutation that does not.
    """
    problems = []
    for mutation in mutations.values():
        try:
            mutation.applied((root / source / mutation.file).read_text(encoding="utf-8"))
            mutation.test_files(root)
        except (MutationError, OSError) as error:
            problems.append(str(error))
    if problems:
        raise MutationError("\n".join(problems))
