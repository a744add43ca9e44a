"""What the points of a scaling study say: power laws, how they differ, what they save, and the paper's own points."""

from buttress.lab.analysis.fits import (
    Difference,
    FitError,
    Point,
    PowerLaw,
    Saving,
    difference,
    fit,
    frontier,
    saving,
)

__all__ = ["Difference", "FitError", "Point", "PowerLaw", "Saving", "difference", "fit", "frontier", "saving"]
