"""The only part that touches the home folder."""
