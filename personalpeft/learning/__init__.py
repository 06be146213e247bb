"""Learn from a user's signals: dataset, plan, training, evaluation, gate, publication."""
