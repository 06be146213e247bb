"""Configure and run training sessions."""
