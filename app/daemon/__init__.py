"""The background daemon of a home: it learns when there is a reason and the machine is free.

``policy`` decides from frozen values. ``worker`` reads them from the home and ``machine`` from the
sensors. ``worker`` acts, ``tasks`` are its actions beside learning, ``journal`` records, and
``poll_loop`` calls it. ``units`` starts it with the system.
"""

TASK = "daemon"
"""The name of the daemon's lease and of its note."""
