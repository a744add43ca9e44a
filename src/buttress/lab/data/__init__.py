"""Tasks: data sets as a model trains on them. Importing this package registers all of them."""

from buttress.lab.data import cifar, digits, folder, teacher, text  # noqa: F401  (they register themselves)
from buttress.lab.data.base import DataError, Task, load
from buttress.lab.data.packed import write_manifest

__all__ = ["DataError", "Task", "load", "write_manifest"]
