"""The coordinate check, public here; it is defined in `buttress.lab.analysis.diagnostics`."""

from buttress.lab.analysis.diagnostics import Coordinate, CoordinateCheck, coordinate_check, plot

__all__ = ["Coordinate", "CoordinateCheck", "coordinate_check", "plot"]
