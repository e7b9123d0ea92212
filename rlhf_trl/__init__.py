"""The algorithms of the RLHF Book as thin subclasses and loss hooks on Hugging Face TRL."""
