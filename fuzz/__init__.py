"""A bounded fuzz and fault run: `python -m fuzz`, or `make fuzz`.

Each area takes inputs that someone else could have written, damages them, and uses them as a user would. A case fails
if

- an exception is raised that is not a ButtressError; an OSError is accepted where files of a run or of data are read,
  since it names the file in one line, and the areas of model folders state what they accept,
- the message of an error has more than three lines or 2,000 characters,
- it takes more than its area's seconds, or a gibibyte more memory than the process had,
- the process ends, or a result differs from the undamaged one without an error or a warning,
- code from the input runs, a file outside its folder is opened, or the network is used.

A case depends on the seed, the area and its number alone: `python -m fuzz plans --case 123` repeats it, with a
traceback.
"""
