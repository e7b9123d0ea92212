"""Configs of other code, as configs for this project's recipes."""
