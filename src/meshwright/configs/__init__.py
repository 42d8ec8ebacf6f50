"""Config files of other frameworks, read into a run and written from one. Imports no torch.

A format is a table: key of its file -> rule (`rules.py`). Every key of a file is reported as mapped, changed
or refused, with the reason; none is dropped in silence.
"""
