"""Look after a home in the background: learn when there is news and the moment is right.

``policy`` decides from frozen values. ``backlog`` reads them from the home and ``probes`` from the
machine. ``worker`` acts, ``tasks`` are its actions beside learning, ``journal`` records, and
``poll_loop`` calls it. ``units`` starts it with the system.
"""
