"""From an event to action: what is announced to whom, and the training data that goes with it."""
