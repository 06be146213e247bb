"""From signals to lessons, from lessons to a candidate, from a candidate to a verdict."""
