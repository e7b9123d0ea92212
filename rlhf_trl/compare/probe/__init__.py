"""Properties that any loss has, tried on a function or on a trainer."""
