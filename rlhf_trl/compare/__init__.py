"""The book's mathematics beside what TRL computes."""
