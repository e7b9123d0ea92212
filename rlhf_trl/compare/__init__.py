"""Book against TRL on one batch."""
