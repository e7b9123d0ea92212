"""How a reward model reads a text, scores it, and how good its scores are."""
