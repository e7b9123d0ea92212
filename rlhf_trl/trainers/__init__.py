"""The overrides on TRL's trainers; each is the smallest that does its job."""
