"""Analysis of run records: fits of power laws, figures, reports, and the paper's published values."""

from buttress.lab.analysis.fits import Difference, FitError, Point, PowerLaw, Saving, difference, fit, saving

__all__ = ["Difference", "FitError", "Point", "PowerLaw", "Saving", "difference", "fit", "saving"]
