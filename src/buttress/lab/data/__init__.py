"""Tasks: what a model is given, what is asked of it, and how well it did."""

from buttress.lab.data import cifar, digits, folder, teacher, text  # noqa: F401  (they register themselves)
from buttress.lab.data.base import DataError, Task, load, tasks

__all__ = ["DataError", "Task", "load", "tasks"]
