"""Turn signals into training examples, filter them and batch them."""
