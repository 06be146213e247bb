"""The web page: hand-written files, served as they are, and their security headers."""
