"""Faults put into this backend on purpose, to see that the accuracy comparison finds them; for tests alone.

Nothing of it is in the installed package. `python -m ci.accuracy.faulty NAME -- ...` puts one into an engine.
"""
