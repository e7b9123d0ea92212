"""Fixed windows: what one optimizer step sees, for a trainer of TRL's kind and for the book."""
