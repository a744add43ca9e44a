"""Public name of the coordinate check, which `buttress.lab.analysis.diagnostics` defines."""

from buttress.lab.analysis.diagnostics import Coordinate, CoordinateCheck, coordinate_check, plot

__all__ = ["Coordinate", "CoordinateCheck", "coordinate_check", "plot"]
