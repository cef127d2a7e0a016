"""`monarch.actor.config`: switches of the actor layer that scripts set as attributes."""

prefix_python_logs_with_actor = True
"""Whether log records of actors name their actor."""

IN_PAR = False
"""Whether the program runs from one self-contained archive; no such builds are made of this package."""
