"""Analysis of run records: fits of power laws, figures, reports, and the paper's published values."""

from buttress.lab.analysis.fits import Difference, PowerLaw, Saving, difference, fit, saving
from buttress.lab.analysis.point import FitError, Point

__all__ = ["Difference", "FitError", "Point", "PowerLaw", "Saving", "difference", "fit", "saving"]
