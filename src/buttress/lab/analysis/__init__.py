"""Analysis of run records: power laws, how they differ, what they save, figures, and the paper's own points."""

from buttress.lab.analysis.fits import Difference, FitError, Point, PowerLaw, Saving, difference, fit, saving

__all__ = ["Difference", "FitError", "Point", "PowerLaw", "Saving", "difference", "fit", "saving"]
