"""What is printed and written of measurements."""
