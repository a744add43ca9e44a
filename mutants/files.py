"""Mistakes in writing files and locking them."""

from __future__ import annotations

from mutants.mutation import Mutation

TESTS = ("tests/test_files.py",)

MUTATIONS = (
    Mutation(
        "a file gets its name before it is on disk",
        "files.py",
        "        flush(part)\n        part.replace(path)\n",
        "        part.replace(path)\n",
        TESTS,
    ),
    Mutation(
        "a failed write leaves its temporary file",
        "files.py",
        "        part.unlink(missing_ok=True)\n",
        "        pass\n",
        TESTS,
    ),
    Mutation(
        "half a folder stays after an error",
        "files.py",
        "        shutil.rmtree(part, ignore_errors=True)\n        raise\n",
        "        raise\n",
        TESTS,
    ),
    Mutation(
        "a lock on a file that was removed",
        "files.py",
        "            if _is_open(path, descriptor):\n                return descriptor\n",
        "            return descriptor\n",
        TESTS,
    ),
    Mutation(
        "a folder behind a link counts as another one",
        "files.py",
        "is_relative_to(os.path.realpath(folder))",
        "is_relative_to(os.path.abspath(folder))",
        TESTS,
    ),
    Mutation(
        "new folders whose names are not on disk",
        "files.py",
        "    for path in missing:\n        flush(path.parent)\n",
        "",
        TESTS,
    ),
)
