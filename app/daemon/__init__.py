"""Looks after a home at its own times: learns when there is something to learn and the moment is right, and keeps the home
in order.

``deciding`` is what to do now and why, of frozen values alone; ``facts`` asks the home and ``probes`` the machine for them;
``keeper`` acts, one step after another, and ``journal`` is what it remembers; ``ticking`` wakes it; ``units`` are the files by
which a system starts it.
"""
