"""What each command does: thin over the public surface, with nothing that a library user cannot have."""
